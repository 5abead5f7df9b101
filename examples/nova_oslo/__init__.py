"""A compute service in the shape of Nova's, before and after its move to gracekit.

The lines below are what `nova.monkey_patch` does in Nova in its threading mode: they choose real
threads before anything imports oslo.messaging.
"""

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)
