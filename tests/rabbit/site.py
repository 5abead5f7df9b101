"""A site whose requests come through a broker; the store stays a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.loops import without_settings
from tests.process.helpers import ROOT, Site
from tests.rabbit.broker import Broker


class RabbitSite(Site):
    """Processes on one store and one virtual host.

    Args:
        root: Directory of the store, the effects and the logs.
        broker: Where the virtual host is.
        vhost: Nobody else's.
        port: Through which the processes reach the broker; None for its own.
    """

    def __init__(self, root: Path, broker: Broker, vhost: str, port: int | None = None) -> None:
        super().__init__(root)
        self.broker = broker
        self.vhost = vhost
        self.url = broker.url_of(vhost, port=port)

    def queued(self) -> int:
        """Messages that the broker holds for the service, in the dead-letter queues too."""
        return sum(
            queue.ready + queue.unacked
            for name, queue in self.broker.queues(self.vhost).items()
            if not name.startswith("reply_")
        )


def gracekit(site: RabbitSite, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, with the service's settings in the environment."""
    ours = {
        "GRACEKIT_TRANSPORT_URL": site.url,
        "GRACEKIT_STORE_URL": f"sqlite:///{site.store}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        (sys.executable, "-m", "gracekit", *arguments),
        cwd=site.root,
        env=without_settings() | ours,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
