"""The transport on RabbitMQ: the way to it, what is declared there, and by which profile."""
