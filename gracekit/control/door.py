"""The door of one run: a unix socket in its run directory, for operators on the same host.

It works without the transport. A connection carries one request (an *ask*): the run reads a line
(`door_wire`), carries out the verb, and sends a line back. The sender must be the user of this
process, or root; the kernel says who it is. If the sender has hung up meanwhile, because the loop
was blocked for longer than it waits, the ask is not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from gracekit import background
from gracekit.clock import Clock
from gracekit.control.door_wire import (
    LONGEST_LINE,
    Ask,
    address_of,
    line_of_answer,
    line_of_error,
    read_ask,
)
from gracekit.control.verbs import Control
from gracekit.errors import BadMessageError, GracekitError
from gracekit.telemetry.telemetry import Telemetry

LINE_TIMEOUT_S: Final = 5.0
"""Timeout for reading a line, and for sending one."""
LOOK_EVERY_S: Final = 5.0
"""Seconds between two checks that the file of the socket is still there."""
MAX_ASKS: Final = 64
"""Most connections at one time. Further ones are refused before their line is read."""
LONGEST_BY: Final = 200
LAST_ANSWERS_S: Final = 0.5
"""Seconds that verbs in progress get for their answers when the door closes."""

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Asker(msgspec.Struct, frozen=True):
    """The process at the other end of a connection, as the kernel reports it."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Asker:
        """The process that made *connection*."""
        size = _CREDENTIALS.size
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return cls(pid, uid)

    @property
    def may_ask(self) -> bool:
        """Whether it is the user of this process, or root."""
        return self.uid in {0, os.geteuid()}

    def named(self, claim: object) -> str:
        """`uid 1000 (alice)@host`: *claim*, if it begins with the uid that the kernel reports."""
        proven = f"uid {self.uid}"
        words = claim if isinstance(claim, str) else ""
        return words[:LONGEST_BY] if words.startswith((f"{proven} ", f"{proven}@")) else proven


class Door:
    """Listens at the socket, and carries out verbs.

    Args:
        path: Path of the socket; None for a run without a directory, which has no door.
        control: Carries out the verbs.
    """

    def __init__(
        self, path: Path | None, control: Control, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._path = path
        self._control = control
        self._telemetry = telemetry
        self._clock = clock
        self._listening: tuple[socket.socket, asyncio.Task[None]] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._admitted: set[asyncio.Task[Any]] = set()  # of these, those carrying out a verb

    async def start(self) -> None:
        """Open the door. If that fails, the run logs it and goes on without a door."""
        if self._path is None or self._looking is not None:
            return
        self._listen(self._path)
        self._looking = self._begin(partial(self._look_after, self._path), "gracekit-door-look")

    def _listen(self, path: Path, *, again: bool = False) -> None:
        """Listen at *path*. A failure is logged, but not with *again*, as it is tried repeatedly.

        The directory itself may be missing for a while.
        """
        try:
            listener = _listener(path)
        except OSError as error:
            if not again:
                self._telemetry.emit("door.missing", path=str(path), error=str(error))
            return
        self._listening = listener, self._begin(partial(self._take_asks, listener), "gracekit-door")

    def _begin(self, work: background.Work, name: str) -> asyncio.Task[None]:
        return background.start(work, name, telemetry=self._telemetry, clock=self._clock)

    async def _look_after(self, path: Path) -> None:
        """Make the socket again if its file is removed, for example by a cleaner of old files."""
        while True:
            await self._clock.wait_tick(LOOK_EVERY_S)
            if path.exists():  # noqa: ASYNC240 - of its own directory, which the run uses
                continue
            if self._listening is not None:
                why = "its file was removed; it is made again"
                self._telemetry.emit("door.missing", path=str(path), error=why)
            self._close()
            self._listen(path, again=True)

    def _close(self) -> None:
        if self._listening is not None:
            (listener, work), self._listening = self._listening, None
            work.cancel()
            self._answering.add(work)
            work.add_done_callback(self._answering.discard)
            work.add_done_callback(lambda _: listener.close())

    async def stop(self) -> None:
        """Close the door: accept no new ask, and cut off answers that take too long."""
        if self._looking is not None:
            looking, self._looking = self._looking, None
            looking.cancel()
            self._answering.add(looking)
        if self._listening is not None:
            self._close()
            assert self._path is not None
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._admitted:  # answer a verb that was already accepted, if that is quick
            await asyncio.wait(self._admitted, timeout=LAST_ANSWERS_S)
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering, timeout=background.LONGEST_END_S)

    async def _take_asks(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            background.run_beside(self._answering, self._serve(connection), "gracekit-door-ask")

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection; never raises an error of the sender."""
        with connection, contextlib.suppress(OSError, TimeoutError):  # the sender has hung up
            connection.setblocking(False)
            try:
                ask = await self._admit(connection)
            except GracekitError as error:
                await _send(connection, line_of_error(error))
                return
            if not _has_gone(connection):
                await self._obey(ask, connection)

    async def _obey(self, ask: Ask, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._admitted.add(task)
        try:
            await _send(connection, await self._carry_out(ask))
        finally:
            self._admitted.discard(task)

    async def _admit(self, connection: socket.socket) -> Ask:
        """Read an ask and note its sender in it; raises GracekitError if it is refused."""
        asker = Asker.of(connection)
        if not asker.may_ask:
            self._telemetry.emit("door.refused", uid=asker.uid, pid=asker.pid)
            raise GracekitError(
                f"uid {asker.uid} may not ask this run: it answers uid {os.geteuid()}, which it "
                "runs as, and root"
            )
        if len(self._answering) > MAX_ASKS:
            raise GracekitError(f"{MAX_ASKS} asks are being answered now: try again")
        ask = read_ask(await _read_line(connection))
        return ask._replace(args={**ask.args, "by": asker.named(ask.args.get("by"))})

    async def _carry_out(self, ask: Ask) -> bytes:
        try:
            return line_of_answer(await self._control.carry_out(ask.verb, ask.run_id, ask.args))
        except GracekitError as error:
            return line_of_error(error)
        except Exception as error:  # noqa: BLE001 - an error in a verb; the run goes on
            self._telemetry.emit("dispatch.failed", cause=error, error=repr(error))
            return line_of_error(error)


def _listener(path: Path) -> socket.socket:
    """A socket that listens at *path*; only this user (and root) can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux makes the file with the mode of its socket
        with address_of(path) as address:
            listener.bind(address)
        listener.listen(MAX_ASKS)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def _read_line(connection: socket.socket) -> bytes:
    loop, line = asyncio.get_running_loop(), b""
    async with asyncio.timeout(LINE_TIMEOUT_S):
        while not line.endswith(b"\n"):
            piece = await loop.sock_recv(connection, LONGEST_LINE)
            line += piece
            if not piece or len(line) > LONGEST_LINE:
                raise BadMessageError(
                    f"an ask is one line of at most {LONGEST_LINE:,} bytes, with its line end"
                )
    return line


async def _send(connection: socket.socket, line: bytes) -> None:
    async with asyncio.timeout(LINE_TIMEOUT_S):
        await asyncio.get_running_loop().sock_sendall(connection, line)


def _has_gone(connection: socket.socket) -> bool:
    """Whether the sender has closed its socket, and not only shut it down for writing."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    return any(events & select.POLLHUP for _, events in poll.poll(0))
