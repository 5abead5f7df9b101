"""Another process on the same file of queues: `python -m tests.rpc.peer consume|send path …`.

It says what it does on its standard output, one line each, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from gracekit.clock import Clock
from gracekit.process import FAILPOINTS_ON, Process
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Delivery, Message, Queue, QueueKind, shared_queue
from tests.rpc.kit import FOR_EVER_S, PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201


async def consume(transport: SqliteTransport, kind: str, queue: str, prefetch: str) -> None:
    """Hold what comes; ack what says so."""
    acks: set[asyncio.Task[None]] = set()

    def on_delivery(delivery: Delivery) -> None:
        say(delivery.body.decode(), delivery.redelivered)
        if delivery.body.startswith(b"ack"):
            acks.add(asyncio.create_task(delivery.ack()))

    await transport.consume(
        [Queue(queue, QueueKind(kind), queue)], on_delivery, prefetch=int(prefetch)
    )
    say("ready")
    await asyncio.to_thread(sys.stdin.read)


async def send(transport: SqliteTransport, name: str, number: str) -> None:
    """Send numbered messages one after the other."""
    for n in range(int(number)):
        await transport.publish(SHARED, Message(body=f"{name} {n}".encode()))
        say("sent", n)


async def main(command: str, path: str, *arguments: str) -> None:
    transport = SqliteTransport(Path(path), process=Process(), clock=Clock(), poll_s=FOR_EVER_S)
    await transport.start()
    await {"consume": consume, "send": send}[command](transport, *arguments)
    await transport.stop()


class Peer:
    """The child as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def wait(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def peer(
    *arguments: object, failpoint: str = "", inside: Sequence[str] = ()
) -> AsyncIterator[Peer]:
    """Start a child, as a child of *inside* if given; it is killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *inside,
        sys.executable,
        "-m",
        "tests.rpc.peer",
        *map(str, arguments),
        cwd=ROOT,
        env={"GRACEKIT_FAILPOINT": failpoint, **FAILPOINTS_ON, "PATH": os.environ["PATH"]},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


SHARED = shared_queue("q")

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
