"""How a reload reads the settings: with a limit, and in a thread, which may be stuck."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gracekit import Settings
from gracekit.config import LiveSettings
from gracekit.control import reload
from gracekit.control.reload import Reload
from gracekit.errors import ConfigError
from gracekit.process import Threads


@pytest.fixture
def well_again() -> Iterator[threading.Event]:
    """Set when what is read answers again; at the end of a test it does."""
    made = threading.Event()
    yield made
    made.set()


async def test_a_reader_that_is_stuck_ends_its_reload_and_no_later_one(
    well_again: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads at last is not taken."""
    calls: list[int] = []

    def read() -> Settings:
        calls.append(1)
        if len(calls) == 1:
            well_again.wait()
        return Settings(max_running=len(calls))

    unused: Any = None
    live = LiveSettings(Settings(), read=read, file=None)
    one = Reload(live, unused, unused, unused, Threads(1), unused)
    monkeypatch.setattr(reload, "READ_S", 0.1)
    with pytest.raises(ConfigError, match=r"the settings were not read within 0\.1 s"):
        await one._read()
    monkeypatch.setattr(reload, "READ_S", 30.0)  # the start of a thread may take 0.1 s
    assert (await one._read()).max_running == 2
    well_again.set()
    assert (await one._read()).max_running == 3
