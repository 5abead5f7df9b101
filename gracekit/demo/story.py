"""The story of the demonstration: real processes and real signals, in one directory.

`play` is the plot. The story reads the files that its processes write at each tick,
and waits for conditions in them. Every wait has a limit, and no process outlives
the story, even after an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gracekit.clock import Clock
from gracekit.config.postgres_url import PostgresUrl
from gracekit.config.settings import Settings, variable_name
from gracekit.config.values import PREFIX
from gracekit.demo.app import (
    ATTACHED,
    CONFIRMED,
    DONE,
    EFFECTS,
    PARENT_VARIABLE,
    PINGS,
    PROCESS_VARIABLE,
    PROCESSES,
    START,
    TOPIC_VARIABLE,
    DemoError,
    Entry,
    append,
    entries,
)
from gracekit.demo.judge import ENDED, read_rows, reader_of
from gracekit.errors import GracekitError
from gracekit.exits import ExitCode
from gracekit.process import Process as ThisProcess
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import directed_queue, shared_queue
from gracekit.runs.run import list_runs
from gracekit.store.location import ReadOnlyStore

TICK_S: Final = 0.2
PATIENCE_S: Final = 40.0
DRAIN_S: Final = 5.0
BLOCKS: Final = 24
A_FEW: Final = 4
HOST: Final = "demo"
SETTINGS: Final = {
    "GRACEKIT_DRAIN_TIMEOUT": f"{DRAIN_S:g}s",
    "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "1s",
    "GRACEKIT_HOST": HOST,
    "GRACEKIT_LOG_FORMAT": "text",
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of all files at one moment.

    Attributes:
        now_s: Seconds since the beginning.
        asked: Confirmed requests, in order.
        rows: The journal, by request id.
        phases: State of the service by process name; `gone` with the exit code after its end.
        pings: Answers to ops pings, also missing ones.
        effects: Effects of the handlers.
        drain_left_s: Seconds left of the present drain; None outside of a drain.
    """

    now_s: float
    asked: list[Entry]
    rows: Mapping[str, Entry]
    phases: Mapping[str, str]
    pings: list[Entry]
    effects: list[Entry]
    drain_left_s: float | None

    def state(self, label: str) -> str:
        """The state of the request with that label: its row's, `sent`, or empty if unconfirmed."""
        for request in self.asked:
            if request["label"] == label:
                row = self.rows.get(request["id"])
                return "sent" if row is None else str(row["state"])
        return ""

    def done(self, label: str) -> list[str | int]:
        """Items of the request with that label, in the order in which they were done."""
        ids = {request["id"] for request in self.asked if request["label"] == label}
        return [effect["item"] for effect in self.effects if effect["id"] in ids]

    @property
    def settled(self) -> bool:
        """Whether every confirmed request has ended."""
        rows = (self.rows.get(request["id"]) for request in self.asked)
        return all(row is not None and row["state"] in ENDED for row in rows)


class View(Protocol):
    """Displays the story."""

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot; called at each tick."""

    def say(self, text: str) -> None:
        """Announce a step of the story."""


class _Child(msgspec.Struct):
    name: str
    process: Process
    stopping_at: float | None = None

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode


class Story(msgspec.Struct):
    """One demonstration in *directory*, displayed by *view*.

    Attributes:
        broker: URL of the broker with the queues; None for a file in the directory.
        database: A database for the store, which gets a schema of its own; None for a file.
        exit_codes: Exit codes of the service's processes, by name.
    """

    directory: Path
    view: View
    broker: str | None = None
    database: PostgresUrl | None = None
    exit_codes: dict[str, int] = msgspec.field(default_factory=dict)
    _clock: Clock = msgspec.field(default_factory=Clock)
    _children: dict[str, _Child] = msgspec.field(default_factory=dict)
    _services: dict[str, _Child] = msgspec.field(default_factory=dict)
    _reader: ReadOnlyStore | None = None
    _began: float = 0.0
    _topic: str = msgspec.field(default_factory=lambda: f"demo-{Clock().new_id()[:8]}")

    @property
    def schema(self) -> str:
        """Of the store in the user's database."""
        return self._topic.replace("-", "_")

    @property
    def store_url(self) -> str | None:
        """Of the store in the user's database; None for a file in the directory."""
        return None if self.database is None else self.database.with_schema(self.schema)

    def remove_store(self) -> None:
        """Remove the store from the user's database."""
        if self.database is not None:
            from gracekit.store.postgres.postgres_link import PostgresLink  # noqa: PLC0415 - an extra

            link = PostgresLink(self.database.libpq, self.schema)
            link.ask(f'DROP SCHEMA IF EXISTS "{self.schema}" CASCADE')
            link.close()

    async def play(self, *, crash: bool) -> None:
        """Play the story, from the first start to the last exit.

        Args:
            crash: Whether the second process is killed and a third one settles.

        Raises:
            DemoError: an expected event did not happen in time, or a process ended unexpectedly.
        """
        self._began = self._clock.loop()
        async with self._stage():
            await self._first_process()
            await self._nobody()
            await self._next_process("B", crash=crash)
            if crash:
                await self._next_process("C", crash=False)

    async def _first_process(self) -> None:
        await self._start_service("A")
        for name in ("sender-1", "sender-2"):
            await self._start_client(name, "send")
        await self._start_client("pinger", "ping")
        await self._send("sender-1", "charge", account="acct-1", seconds=0.6)
        await self._send("sender-1", "copy", disk="disk-1", blocks=BLOCKS, seconds=9.6)
        await self._send("sender-1", "attach", volume="vol-9", seconds=20)
        await self._send("sender-2", "resize", vm="vm-3", seconds=8)
        await self._send("sender-2", "resize", vm="vm-4", seconds=3.5)
        await self._send("sender-2", "reboot", vm="vm-7", seconds=2.5)
        await self._send("sender-1", "reboot", vm="vm-7", again=True, seconds=2.5)
        await self._until(self._is_in_the_middle, "A works")

        self._stop("A", signal.SIGTERM)
        self.view.say(
            f"SIGTERM to A: it starts nothing more; what runs has {DRAIN_S:g} s to end or to "
            "reach a safe point"
        )
        await self._pause(1.0)
        await self._send("sender-1", "charge", account="acct-2", seconds=1.0)
        await self._pause(1.5)
        await self._send("sender-2", "resize", vm="vm-5", seconds=2)
        await self._end_of("A", ExitCode.HANDED_OVER)

    def _is_in_the_middle(self, snapshot: Snapshot) -> bool:
        running = all(
            snapshot.state(label) == "running"
            for label in ("copy disk-1", "resize vm-3", "attach vol-9")
        )
        return (
            running
            and ATTACHED in snapshot.done("attach vol-9")
            and len(snapshot.done("copy disk-1")) >= A_FEW
        )

    async def _nobody(self) -> None:
        self.view.say("A has left with 75: handed over. No process serves now; the senders go on")
        await self._send("sender-1", "charge", account="acct-3", seconds=0.8)
        await self._send("sender-2", "resize", vm="vm-6", seconds=1.5)
        await self._pause(1.0)

    async def _next_process(self, name: str, *, crash: bool) -> None:
        await self._start_service(name)
        self.view.say(f"{name} settles what was left, and takes what was sent meanwhile")
        if crash:
            await self._until(self._is_worth_a_crash, f"{name} works")
            self._stop(name, signal.SIGKILL)
            self.view.say(f"kill -9 to {name}: no farewell, no drain")
            await self._end_of(name, -signal.SIGKILL)
            return
        await self._until(lambda snapshot: snapshot.settled, "every request to end")
        self._stop(name, signal.SIGTERM)
        self.view.say(f"SIGTERM to {name}: nothing is left to wait for")
        await self._end_of(name, ExitCode.DRAINED)

    def _is_worth_a_crash(self, snapshot: Snapshot) -> bool:
        charged = all(snapshot.state(f"charge acct-{n}") in ENDED for n in (1, 2, 3))
        return charged and len(set(snapshot.done("copy disk-1"))) > BLOCKS / 2

    # -- seeing ----------------------------------------------------------------------

    async def _until(self, condition: Callable[[Snapshot], bool], what: str) -> None:
        limit = self._clock.loop() + PATIENCE_S
        while True:
            snapshot = await self._look()
            self.view.show(snapshot)
            if condition(snapshot):
                return
            if self._clock.loop() > limit:
                raise DemoError(
                    f"waited {PATIENCE_S:g} s for {what}; the logs in {self.directory} tell more"
                )
            self._watch()
            await asyncio.sleep(TICK_S)

    async def _pause(self, seconds: float) -> None:
        until = self._clock.loop() + seconds
        await self._until(lambda _: self._clock.loop() >= until, "a pause")

    async def _look(self) -> Snapshot:
        rows, phases = await self._read_store()
        return Snapshot(
            now_s=self._clock.loop() - self._began,
            asked=entries(self.directory / CONFIRMED),
            rows=rows,
            phases=phases | self._left(),
            pings=entries(self.directory / PINGS),
            effects=entries(self.directory / EFFECTS),
            drain_left_s=self._drain_left_s(),
        )

    async def _read_store(self) -> tuple[Mapping[str, Entry], dict[str, str]]:
        phases = dict.fromkeys(self._services, "starting")
        if self._reader is None:
            if not self._services:
                return {}, phases
            reader = reader_of(self.directory, self.store_url)
            try:
                reader.open()
            except GracekitError:
                return {}, phases  # A is about to write the schema
            self._reader = reader
        names = {child.process.pid: child.name for child in self._services.values()}
        for run in await list_runs(self._reader):
            if run.identity.pid in names:
                phases[names[run.identity.pid]] = run.phase
        return await read_rows(self._reader, names), phases

    def _left(self) -> dict[str, str]:
        """The states of processes that have ended or were asked to stop.

        The store shows a drain later than this.
        """
        found: dict[str, str] = {}
        for name, child in self._services.items():
            if child.exit_code is not None:
                found[name] = f"gone {child.exit_code}"
            elif child.stopping_at is not None:
                found[name] = "draining"
        return found

    def _drain_left_s(self) -> float | None:
        for child in self._services.values():
            if child.stopping_at is not None and child.exit_code is None:
                return max(0.0, child.stopping_at + DRAIN_S - self._clock.loop())
        return None

    def _watch(self) -> None:
        """Fail if a process has ended on its own, as waiting for its work would be in vain."""
        for child in self._children.values():
            if child.exit_code is not None and child.stopping_at is None:
                raise self._fault(child, "though it was not asked to stop")

    def _fault(self, child: _Child, but: str) -> DemoError:
        log = self.directory / f"{child.name}.log"
        tail = log.read_text(errors="replace")[-1500:]
        return DemoError(f"{child.name} left with {child.exit_code}, {but}; end of {log}:\n{tail}")

    # -- acting ------------------------------------------------------------------------

    async def _start_service(self, name: str) -> None:
        self.view.say(f"start of {name}")
        child = await self._start(name, "gracekit", "run", "gracekit.demo.app:svc")
        self._services[name] = child
        await self._until(lambda snapshot: snapshot.phases[name] == "serving", f"{name} to serve")

    async def _start_client(self, name: str, verb: str) -> None:
        await self._start(name, "gracekit.demo.app", verb)

    async def _start(self, name: str, *arguments: str) -> _Child:
        with (self.directory / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                cwd=self.directory,
                env=_environment(name) | self._way(),
                stdin=PIPE if name.startswith("sender") else DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches only the story
            )
        child = self._children[name] = _Child(name, process)
        return child

    async def _send(
        self, sender: str, method: str, *, again: bool = False, **args: str | float
    ) -> None:
        """Have *sender* cast a request, and wait until it is confirmed."""
        label = f"{method} {next(iter(args.values()))}{' again' if again else ''}"
        request = {"label": label, "method": method, "args": args, "items": _items(method, args)}
        pipe = self._children[sender].process.stdin
        assert pipe is not None
        pipe.write(json.dumps(request).encode() + b"\n")
        await pipe.drain()
        await self._until(lambda snapshot: snapshot.state(label) != "", f"{label} to be confirmed")

    def _way(self) -> dict[str, str]:
        """Environment variables by which all processes use the same queues and the same store."""
        way = {}
        if self.broker is not None:
            way = {variable_name("transport_url"): self.broker, TOPIC_VARIABLE: self._topic}
        if self.store_url is not None:
            way[variable_name("store_url")] = self.store_url
        return way

    def _stop(self, name: str, number: int) -> None:
        child = self._services[name]
        child.stopping_at = self._clock.loop()
        child.process.send_signal(number)

    async def _end_of(self, name: str, expected: int) -> None:
        """Wait for the end of a process, and record its exit code and the cursors."""
        child = self._services[name]
        await self._until(lambda _: child.exit_code is not None, f"{name} to end")
        snapshot = await self._look()
        cursors = {row["id"]: row["cursor"] for row in snapshot.rows.values()}
        code = await child.process.wait()
        entry = {"name": name, "pid": child.process.pid, "exit_code": code, "cursors": cursors}
        append(self.directory / PROCESSES, entry)
        self.exit_codes[name] = code
        if code != expected:
            raise self._fault(child, f"and {int(expected)} was expected")

    @contextlib.asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        """Kill all processes at the end, also after an error."""
        try:
            yield
        finally:
            if self._reader is not None:
                self._reader.close()
            for child in self._children.values():
                if child.exit_code is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.kill()
            for child in self._children.values():
                await child.process.wait()
            if self.broker is not None:
                with contextlib.suppress(GracekitError):  # the demonstration is over anyway
                    await _remove_queues(self.broker, self._topic)


async def _remove_queues(url: str, topic: str) -> None:
    """Delete the queues from the user's broker; marks and reply queues expire by themselves."""
    from gracekit.rpc.amqp.amqp_transport import AmqpTransport  # noqa: PLC0415 - most have no broker

    transport = open_transport(url, process=ThisProcess(), clock=Clock())
    assert isinstance(transport, AmqpTransport)
    await transport.start()
    try:
        for one in (topic, Settings().ops_topic_of(topic)):
            hosts = (HOST, f"{HOST}-0")  # ops also reads a queue of the instance
            await transport.remove([shared_queue(one), *(directed_queue(one, h) for h in hosts)])
    finally:
        await transport.stop()


def _items(method: str, args: Mapping[str, str | float]) -> list[str | int]:
    """The effects that a request must have once it has SUCCEEDED."""
    match method:
        case "copy":
            return list(range(int(args["blocks"])))
        case "attach":
            return [ATTACHED]
        case _:
            return [START, DONE]


def _environment(name: str) -> dict[str, str]:
    """An environment without the user's settings of gracekit, and with this gracekit's path."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (home, own.get("PYTHONPATH"))))
    story = {PROCESS_VARIABLE: name, PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": path}
    return own | SETTINGS | story
