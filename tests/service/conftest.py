"""What the service tests share: a machine in memory, checked at the end of each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gracekit import Service
from tests.service.kit import Systemd, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A broker, a disk, and processes in virtual time."""
    made = World()
    try:
        yield made
        if made.lives:
            made.check_accounts()
            made.check_faults()
    finally:
        await made.close()


@pytest.fixture
def svc() -> Service:
    """A service to declare methods on."""
    return Service("compute")


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    """What systemd hears of the processes of this test, once it listens."""
    path = tmp_path / "notify"
    made = Systemd(path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    yield made
    made.close()
