"""How a reload reads the settings: with a limit, and with few threads that may be stuck."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracekit import Settings
from gracekit.config import LiveSettings
from gracekit.control import reload
from gracekit.control.reload import READERS, SettingsReader
from gracekit.errors import ConfigError
from gracekit.process import Threads


@pytest.fixture
def well_again() -> Iterator[threading.Event]:
    """Set when what is read answers again; at the end of a test it does."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "READ_S", 0.1)


def reader_of(read: Callable[[], Settings], file: Path | None = None) -> SettingsReader:
    return SettingsReader(LiveSettings(Settings(), read=read, file=file), Threads(READERS))


async def until_read(reader: SettingsReader) -> None:
    """Read until it succeeds: the threads that were stuck end one after the other."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(ConfigError):
                await reader.read()
                return
            await asyncio.sleep(0.01)


async def test_a_program_s_own_reader_may_be_stuck_while_a_later_one_reads(
    well_again: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The first call never returns in time, and the next ones give the settings.
    """
    calls: list[int] = []

    def read() -> Settings:
        calls.append(1)
        if len(calls) == 1:
            well_again.wait()
        return Settings(max_running=len(calls))

    reader = reader_of(read)
    with pytest.raises(ConfigError, match=r"the settings were not read within 0\.1 s"):
        await reader.read()

    monkeypatch.setattr(reload, "READ_S", 30.0)  # the start of a thread may take 0.1 s
    assert [(await reader.read()).max_running for _ in range(3)] == [2, 3, 4]


async def test_readers_that_are_stuck_do_not_become_more_and_more(
    well_again: threading.Event,
) -> None:
    """
    When every thread is stuck, a reload fails without another one, until one of them ends.
    """
    calls: list[int] = []

    def read() -> Settings:
        calls.append(1)
        well_again.wait()
        return Settings()

    reader = reader_of(read)
    for _ in range(READERS):
        with pytest.raises(ConfigError, match="were not read within"):
            await reader.read()
    for _ in range(3):
        with pytest.raises(ConfigError, match="earlier reloads still wait"):
            await reader.read()
    assert len(calls) == READERS
    well_again.set()
    await until_read(reader)


async def test_a_file_that_one_reader_waits_for_is_read_by_no_other(
    well_again: threading.Event, tmp_path: Path
) -> None:
    """
    A second thread would be stuck too; another file in its place is read.
    """
    calls: list[str] = []
    file, other = tmp_path / "settings.toml", tmp_path / "other.toml"
    file.write_text("stuck")
    other.write_text("well")

    def read() -> Settings:
        calls.append(file.read_text())
        if calls[-1] == "stuck":
            well_again.wait()
        return Settings()

    reader = reader_of(read, file)
    with pytest.raises(ConfigError, match=r"settings\.toml were not read within"):
        await reader.read()
    for _ in range(3):
        with pytest.raises(ConfigError, match="still waits for this file"):
            await reader.read()
    other.replace(file)

    for _ in range(3):
        assert await reader.read() == Settings()
    assert calls == ["stuck", *["well"] * 3]
