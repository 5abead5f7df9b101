"""Disks, after: the service of `before.py`, on gracekit; its endpoint class is the same.

    GRACEKIT_TRANSPORT_URL=sqlite:///gracekit.db gracekit run --app-dir examples/oslo after:svc

A file in the working directory stands for a disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)  # before oslo_messaging

import oslo_messaging

from gracekit import Service
from gracekit.rpc.oslo_adapter import include_endpoints


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


svc = Service("disks")
options = {
    "create": {"resource": "disk"},
    "delete": {"resource": "disk", "on_interrupt": "retry"},
    "count": {"on_interrupt": "requeue"},
}
include_endpoints(svc, [Disks()], options=options)
