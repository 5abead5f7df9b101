"""What all tests share: peace between two plugins, and no need of a quiet machine."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import anyio.to_thread
import pytest
from hypothesis import HealthCheck, settings

from tests.loops import LOOP_VARIABLE, OnUvloop
from tests.rabbit.fixtures import (  # brokers start when a test asks for one
    _spare_broker,
    certificates,
    own_broker,
    own_vhost,
    rabbit_url,
    rabbit_vhost,
    shared_broker,
)

__all__ = (
    "_spare_broker",
    "certificates",
    "own_broker",
    "own_vhost",
    "rabbit_url",
    "rabbit_vhost",
    "shared_broker",
)

# A busy machine makes an example slow, not wrong.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# Started in the background by a shell, we would hand an ignored INT on to every process that the
# tests start, and those that are to end by Ctrl-C would not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """looptime 0.9 asks pytest-asyncio's policy for a loop also before a sync test; the policy then
    makes one that nobody closes, and the ResourceWarning fails the run.
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(pyfuncitem.obj)):
        pyfuncitem.funcargs.pop("event_loop_policy", None)
    return (yield)


# -- the event loop -----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--uvloop", action="store_true", help="Run tests and services on uvloop.")


def pytest_configure(config: pytest.Config) -> None:
    """A loop in the environment of who runs the tests is not for them."""
    os.environ.pop(LOOP_VARIABLE, None)
    if config.getoption("--uvloop"):
        os.environ[LOOP_VARIABLE] = "uvloop"
        config.pluginmanager.register(OnUvloop())


# -- virtual time and threads -------------------------------------------------------------------

NOOP_CYCLES = 2
"""Empty turns of the loop before virtual time moves on, for what a step has still to begin.
looptime makes 42, which took a third of the processor time of the service's tests."""
THREAD_S = 1.0
"""Real seconds for which virtual time waits for a thread; some tests hold one on purpose."""


@pytest.fixture(autouse=True)
def _threads_take_no_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """looptime waits for threads of asyncio's own executor alone. While one of anyio's had not
    begun, a call timed out, or a drain gave it up: seen a few times in a hundred runs.
    """
    run_sync = anyio.to_thread.run_sync

    async def waited_for(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        if not getattr(loop, "looptime_on", False):
            return await run_sync(function, *args, **options)
        over = threading.Event()

        def run() -> Any:
            try:
                return function(*args)
            finally:
                over.set()

        try:
            loop.run_in_executor(None, over.wait, THREAD_S)
            return await run_sync(run, **options)
        finally:
            over.set()

    monkeypatch.setattr(anyio.to_thread, "run_sync", waited_for)


# -- what `make quick` leaves out ---------------------------------------------------------------

SERVERS = {"shared_broker", "rabbit_url", "rabbit_vhost", "own_broker", "own_vhost"}
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a broker of the tests by its fixtures; save empty turns of virtual time;
    begin with the longest tests.
    """
    for item in items:
        if SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("server")
        if item.get_closest_marker("looptime"):
            item.add_marker(pytest.mark.looptime(noop_cycles=NOOP_CYCLES))
    # Otherwise one worker would get all of the long ones, and the others could not take them over.
    if "worksteal" in getattr(config, "workerinput", {}).get("mainargv", ()):
        items.sort(key=_time_limit, reverse=True)


def pytest_collection() -> None:
    """Keep the collector from walking what pytest makes of our modules, of which nothing goes."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the collector from walking thousands of tests again and again."""
    gc.freeze()
    gc.enable()


def _time_limit(item: pytest.Item) -> float:
    """In seconds; 0 without one of its own. Tests that take long have one.

    A long test that began last would run on while the other workers have nothing left to do.
    """
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker and marker.args else 0.0


class Limit:
    """The time limit of a test, in which a second without a free processor counts as a tenth.

    On a machine with other work a test takes longer, and has not failed for that.

    Args:
        limit_s: In seconds.
        expire: Called when the limit has passed, as a handler of SIGALRM.
    """

    def __init__(self, limit_s: float, expire: Callable[[int, FrameType | None], object]) -> None:
        self._limit_s = limit_s
        self._expire = expire
        self._began = time.monotonic() - 0.9 * _stalled_s()

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        """The handler: wait on, or end the test."""
        left_s = self._limit_s - (time.monotonic() - 0.9 * _stalled_s() - self._began)
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1.0))
        else:
            self._expire(number, frame)


def _stalled_s() -> float:
    """Seconds since the boot in which some process waited for a processor; 0 if not known."""
    try:
        pressure = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return 0.0
    return int(pressure.partition("total=")[2].split()[0]) / 1e6


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, bool, bool]:
    """Replace the handler that pytest-timeout has set."""
    is_set = yield
    expire = signal.getsignal(signal.SIGALRM)
    if settings.timeout and settings.method == "signal" and callable(expire):
        signal.signal(signal.SIGALRM, Limit(settings.timeout, expire).on_alarm)
    return is_set


class Guard:
    """Fails a test that starts a process and does not say so: `make quick` would run it."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        sys.addaudithook(self.look)

    def look(self, event: str, _: object) -> None:
        """Called by Python before each such event."""
        item = self.item
        if event in STARTS and item is not None:
            self.item = None  # once, and not for what the failure itself starts
            raise AssertionError(f"{item.nodeid} starts a process ({event}): mark it `process`")


_guard = Guard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Watch a test that is marked neither `process` nor `server`."""
    is_marked = item.get_closest_marker("process") or item.get_closest_marker("server")
    _guard.item = None if is_marked else item
    try:
        return (yield)
    finally:
        _guard.item = None
