"""Checks of a RabbitMQ broker: the connection, the declared queues, and the declare profile."""
