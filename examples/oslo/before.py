"""Disks, before: a service on oslo.messaging. `after.py` beside it is the same one on gracekit.

    python examples/oslo/before.py rabbit://guest:guest@localhost:5672/

A file in the working directory stands for a disk.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)  # before oslo_messaging

import oslo_messaging
from oslo_config import cfg


class DiskInUseError(Exception):
    """Something is attached to it."""


class Disks:
    """What callers may ask for."""

    target = oslo_messaging.Target(version="1.1")

    def create(self, ctxt: dict[str, Any], disk: str, size: int) -> dict[str, Any]:
        """Make a disk, which takes a tenth of a second for each gigabyte."""
        time.sleep(size / 10)
        Path(f"{disk}.disk").write_text(f"{size} GB for {ctxt.get('user', 'nobody')}")
        return {"disk": disk, "size": size}

    @oslo_messaging.expected_exceptions(DiskInUseError)
    def delete(self, ctxt: dict[str, Any], disk: str) -> None:
        """Delete a disk; one that is gone is no error."""
        if Path(f"{disk}.attached").exists():
            raise DiskInUseError(f"{disk} is attached")
        Path(f"{disk}.disk").unlink(missing_ok=True)

    def count(self, ctxt: dict[str, Any]) -> int:
        """How many disks there are."""
        return len(list(Path().glob("*.disk")))


def main(url: str) -> None:
    """Serve until a signal comes."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    transport = oslo_messaging.get_rpc_transport(cfg.CONF, url)
    target = oslo_messaging.Target(topic="disks", server=socket.gethostname())
    server = oslo_messaging.get_rpc_server(transport, target, [Disks()])
    server.start()
    print("serving", flush=True)
    stopping.wait()
    server.stop()
    server.wait()


if __name__ == "__main__":
    main(sys.argv[1])
