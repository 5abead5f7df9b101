"""The transport over RabbitMQ, in the oslo.messaging wire. Loaded only when a URL names it."""
