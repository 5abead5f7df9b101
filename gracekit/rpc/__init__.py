"""RPC: messages, their wire format, and the transports. Nothing here keeps records.

`message` and `transport` define the terms. `memory`, `sqlite/` and `amqp/` are the
transports, `oslo_wire` is the wire format, `methods` declares what is served, and
`server` and `client` are the two ends.
"""
