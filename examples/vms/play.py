"""Virtual machines end in every way; an agent tells a wish from a crash, and nothing runs twice.

python -m examples.vms.play
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from examples.vms.driver import BOOT, Driver
from gracekit import NoCapacity, RpcClient

LONGEST_S = 60.0
LOOP = 4
"""Crashes after which the budget is spent: two starts are charged already."""


class Play:
    """The agent as a process, and what its users see."""

    def __init__(self, directory: Path, client: RpcClient) -> None:
        self._directory = directory
        self._client = client
        self.driver = Driver(directory / "machines")
        self._environment = {
            "VMS_DIRECTORY": str(directory / "machines"),
            "VMS_EVERY": "1s",
            "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0.5s",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        self.failed = 0

    def start(self, **more: str) -> None:
        """Start the agent."""
        with (self._directory / "agent.log").open("a") as log:
            self._agent = subprocess.Popen(
                (sys.executable, "-m", "gracekit", "run", "examples.vms.agent"),
                cwd=self._directory,
                env=os.environ | self._environment | more,
                stdout=log,
                stderr=log,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the agent; the machines go on."""
        self._agent.send_signal(number)
        self._agent.wait()

    async def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until it is so; returns whether it is."""
        deadline = time.monotonic() + LONGEST_S
        while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.02)
        return condition()

    async def ask(self, method: str, **args: Any) -> Any:
        """Call the agent, also while it starts."""
        log = self._directory / "agent.log"
        await self.until(lambda: "service.serving" in log.read_text())  # it makes the queues
        return await self._client.prepare(timeout="60s").call(method, **args)

    async def see(self, what: str, name: str, wanted: str) -> None:
        """Wait until the info of a machine says *wanted*; a mere look changes nothing."""
        found, deadline = "", time.monotonic() + LONGEST_S
        while wanted not in found and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            found = (await self.ask("info", name=name))["words"]
        self.note(what, found, ok=wanted in found)

    def note(self, what: str, seen: str, *, ok: bool) -> None:
        """Print one line of the play."""
        self.failed += not ok
        print(f"{'ok ' if ok else 'NOT'}  {what:<58} {seen}", flush=True)

    async def started_again(self, name: str, before: int) -> bool:
        """Wait until another process runs it."""
        return await self.until(lambda: self.pid(name) not in {0, before})

    def pid(self, name: str) -> int:
        """The process of a machine; 0 if it does not run."""
        return self.driver._pid(name)  # noqa: SLF001 - the play stands beside the machine


async def stopped_from_inside(play: Play) -> None:
    """Marked down, as its owner chose; only its operator starts it again."""
    await play.ask("create", name="a", memory=256)
    await play.see("created", "a", "runs")
    play.driver.signal("a", signal.SIGUSR1)
    await play.see("its user shuts it down from inside", "a", "as its user wished")
    await play.ask("wish", name="a", wanted="up")
    await play.see("its operator starts it again", "a", "runs")


async def restart_by_choice(play: Play) -> None:
    """Its owner chose to have it started again."""
    await play.ask("create", name="b", memory=256, on_stop="restart")
    before = play.pid("b")
    play.driver.signal("b", signal.SIGUSR1)
    await play.started_again("b", before)
    await play.see("by choice it is started again after such a stop", "b", "runs")


async def crashes(play: Play) -> None:
    """Each is started again, until there were too many."""
    for number, how in ((signal.SIGUSR2, "crashes"), (signal.SIGKILL, "is killed by kill -9")):
        before = play.pid("a")
        play.driver.signal("a", number)
        await play.started_again("a", before)
        await play.see(f"it {how}, and is started again", "a", "runs")
    for n in range(LOOP):
        before = play.pid("a")
        play.driver.signal("a", signal.SIGUSR2)
        if n < LOOP - 1:
            await play.started_again("a", before)
    await play.see("it crashes in a loop", "a", "given up")
    await play.ask("wish", name="a", wanted="up")
    await play.see("its operator starts it again", "a", "runs")


async def stop_of_a_stopped_one(play: Play) -> None:
    """The agent is away when it ends; then its operator stops it."""
    play.stop()
    play.driver.signal("b", signal.SIGUSR1)
    await play.until(lambda: play.driver.seen("b") == "stopped")
    play.start(VMS_EVERY="1h", GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS="1h")
    await play.see("the agent was away when it stopped", "b", "shut down from inside")
    await play.ask("wish", name="b", wanted="down")
    await play.see("its operator stops what has stopped", "b", "as its operator wished")
    left = "b" in play.driver.names()
    play.note("nothing of it is left", "its files are gone" if not left else "files", ok=not left)


async def room_of_dead_ones(play: Play) -> None:
    """No pass comes now: the create makes the room itself."""
    await play.ask("create", name="c", memory=700)
    play.driver.signal("c", signal.SIGUSR1)
    await play.until(lambda: play.driver.seen("c") == "stopped")
    await play.ask("create", name="d", memory=700)
    await play.see("a create needs the memory of a dead one", "d", "runs")
    try:
        await play.ask("create", name="e", memory=700)
        play.note("a create without room", "runs", ok=False)
    except NoCapacity as error:
        play.note("a create without room is refused", str(error), ok=True)


async def reboot(play: Play) -> None:
    """Everything is gone, without evidence; what is wanted runs again."""
    play.stop(signal.SIGKILL)
    for name in ("a", "d"):
        await play.until(lambda name=name: play.pid(name) > 0)  # type: ignore[misc]
        keeper = play.driver._read(f"{name}.vm")["keeper"]  # noqa: SLF001 - as the kernel
        for pid in (keeper, play.pid(name)):
            os.kill(pid, signal.SIGKILL)
    play.start(**{BOOT: "another"})
    await play.see("after a reboot of the host, it", "a", "runs")
    await play.see("after a reboot of the host, the other", "d", "runs")
    await play.see("one that its user had stopped", "c", "as its user wished")


async def killed_agent(play: Play) -> None:
    """At whatever step it is killed, nothing runs twice, and nothing is forgotten."""
    for n in range(6):
        before = play.pid("a")
        if before:
            play.driver.signal("a", signal.SIGKILL)
        await play.ask("wish", name="a", wanted="up")  # the budget begins anew
        await asyncio.sleep(0.15 * n)
        play.stop(signal.SIGKILL)
        play.start(**{BOOT: "another"})
    await play.see("the agent is killed six times", "a", "runs")
    twice = (play._directory / "machines" / "twice").exists()  # noqa: SLF001 - its own
    play.note("none ran twice", "yes" if twice else "none", ok=not twice)


STEPS: tuple[Callable[[Play], Awaitable[None]], ...] = (
    stopped_from_inside,
    restart_by_choice,
    crashes,
    stop_of_a_stopped_one,
    room_of_dead_ones,
    reboot,
    killed_agent,
)


async def main() -> int:
    """Play it; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="vms-") as place:
        directory = Path(place)
        async with RpcClient(f"sqlite:///{directory / 'gracekit.db'}", "vms") as client:
            play = Play(directory, client)
            play.start()
            try:
                for step in STEPS:
                    await step(play)
            except BaseException:
                print((directory / "agent.log").read_text()[-5000:])
                raise
            finally:
                play.stop(signal.SIGKILL)
                for name in play.driver.names():
                    play.driver.destroy(name)
        print(f"{play.failed} not as the page says" if play.failed else "all as it should be")
        return 1 if play.failed else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
