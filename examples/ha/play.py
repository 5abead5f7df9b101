"""Three hosts, one PostgreSQL, and a virtual machine that must run once: its host dies, three ways.

    python -m examples.ha.play postgresql://user@localhost/database

The store is a schema of its own, `ha_play`; drop it afterwards. It takes about a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from examples.ha.host import EFFECTS
from gracekit import LeaseExists, Leases

HOSTS = ("one", "two", "three")
LONGEST_S = 60.0
SHOWN_S = 2.0  # the machine runs for a while between two troubles


class Wire:
    """The way of one host to the database, which can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._writers: list[asyncio.StreamWriter] = []
        self.is_cut = False
        self.port = 0

    async def open(self) -> None:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers += [writer, back]
        with contextlib.suppress(asyncio.CancelledError):  # the end of the play
            await asyncio.gather(_pump(reader, back), _pump(there, writer))

    def cut(self) -> None:
        """Nothing passes any more."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


class Play:
    """The hosts, and what they have done."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = f"{url}{'&' if '?' in url else '?'}schema=ha_play"
        self._directory = directory
        self.effects = directory / "effects"
        self.effects.touch()
        self._processes: dict[str, Process] = {}
        self._wires: dict[str, Wire] = {}

    async def declare(self) -> None:
        """An operator's part: declare the lease, once."""
        async with Leases(self._url, host="operator", instance="play") as leases:
            with contextlib.suppress(LeaseExists):
                await leases.create("vm", "vm-1")

    async def start(self, host: str) -> None:
        """Start a host behind a wire of its own."""
        url = urlsplit(self._url)
        wire = self._wires[host] = Wire(url.hostname or "localhost", url.port or 5432)
        await wire.open()
        user = f"{url.netloc.rpartition('@')[0]}@" if "@" in url.netloc else ""
        mine = urlunsplit(url._replace(netloc=f"{user}127.0.0.1:{wire.port}"))
        environment = {
            "GRACEKIT_STORE_URL": mine,
            "GRACEKIT_RUN_DIRECTORY": str(self._directory / f"runs-{host}"),
            EFFECTS: str(self.effects),
        }
        command = (sys.executable, "-m", "examples.ha.host", host)
        self._processes[host] = await asyncio.create_subprocess_exec(
            *command, env=os.environ | environment
        )

    async def runs(self, *, other_than: str = "") -> tuple[str, int]:
        """Wait until the machine runs, and return where and with which token."""
        before, until = len(self._lines()), time.monotonic() + LONGEST_S
        while True:
            for _, host, token in self._lines()[before:]:
                if host != other_than:
                    return host, int(token)
            if time.monotonic() > until:
                raise SystemExit("the machine does not run: see above")
            await asyncio.sleep(0.05)

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self.effects.read_text().splitlines()]

    async def trouble(self, what: str, host: str) -> None:
        """Kill the host, stop it, or cut its wire; the machine starts elsewhere."""
        print(f"-- {host} is {what}", flush=True)
        began = time.monotonic()
        if what == "cut off from the store":
            self._wires[host].cut()
        else:
            self._processes[host].send_signal(
                signal.SIGKILL if what == "killed" else signal.SIGSTOP
            )
        other, token = await self.runs(other_than=host)
        print(f"-- after {time.monotonic() - began:.1f} s it runs on {other}, token {token}")
        await self._end(host)
        await self.start(host)

    async def _end(self, host: str) -> None:
        process = self._processes[host]
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def close(self) -> None:
        """End all hosts."""
        for host in self._processes:
            await self._end(host)

    def judge(self) -> bool:
        """Whether it never ran in two places: no effect of a token comes after a higher one."""
        tokens = [int(token) for _, _, token in self._lines()]
        places = {(host, token) for _, host, token in self._lines()}
        ok = tokens == sorted(tokens) and len(places) == len(set(tokens))
        rise = "yes" if ok else "NO"
        print(f"{len(tokens)} effects, {len(places)} owners, tokens only rise: {rise}")
        return ok


async def main(url: str) -> int:
    """Play it; the exit status says whether the machine ran in one place at a time."""
    with tempfile.TemporaryDirectory(prefix="ha-") as directory:
        play = Play(url, Path(directory))
        try:
            await play.declare()
            for host in HOSTS:
                await play.start(host)
            for what in ("killed", "stopped", "cut off from the store"):
                host, _ = await play.runs()
                await asyncio.sleep(SHOWN_S)
                await play.trouble(what, host)
            return 0 if play.judge() else 1
        finally:
            await play.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case [given]:
            sys.exit(asyncio.run(main(given)))
        case _:
            sys.exit(__doc__)
