"""A compute service in the shape of Nova's, on oslo.messaging; `after.py` is the same on gracekit.

    python -m examples.nova_oslo.before --config-file nova.conf

Run it from the root of the checkout. A file in the working directory stands for a virtual machine.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import oslo_messaging
from oslo_context.context import RequestContext
from oslo_log import log
from oslo_service.periodic_task import PeriodicTasks, periodic_task

from examples.nova_oslo import objects, service

LOG = log.getLogger(__name__)


class ComputeManager(PeriodicTasks):
    """What `nova.compute.manager` is in Nova: three of its methods, and one periodic task."""

    target = oslo_messaging.Target(version="6.4")

    def __init__(self) -> None:
        super().__init__(service.CONF)
        self._builds = ThreadPoolExecutor(max_workers=10)

    def build_and_run_instance(self, context: RequestContext, instance: objects.Instance) -> None:
        """Begin a build, which may take minutes, in a thread of its own; the request is a cast."""
        self._builds.submit(self._do_build, context, instance)

    def _do_build(self, context: RequestContext, instance: objects.Instance) -> None:
        context.update_store()  # from here on oslo.log shows the ids of the request
        LOG.info("building %s", instance.uuid)
        for part in range(instance.memory_mb // 1024):
            time.sleep(1)  # the image, the network, the volumes
            Path(f"{instance.uuid}.vm").write_text(str(part + 1))
        instance.save("active")

    def stop_instance(
        self, context: RequestContext, instance: objects.Instance
    ) -> objects.Instance:
        """Stop a virtual machine; the caller waits for it."""
        instance.save("stopped")
        return instance

    def get_host_uptime(self, context: RequestContext) -> float:
        """How long the host runs, in seconds."""
        return time.monotonic()

    @periodic_task(spacing=1)
    def _sync_power_states(self, context: RequestContext) -> None:
        Path("synced").write_text(str(len(list(Path().glob("*.vm")))))


def main() -> None:
    """What `nova.cmd.compute` is in Nova."""
    service.parse_args(sys.argv[1:])
    manager = ComputeManager()
    service.serve(manager, "compute")


if __name__ == "__main__":
    main()
