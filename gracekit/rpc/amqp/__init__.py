"""The RabbitMQ transport, in oslo.messaging's wire format. Imported only if a URL asks for it."""
