"""A full host, a resolver that is killed after it has made room, and a deadline that passes.

    python -m examples.reaper.play                                  # files in a temporary directory
    python -m examples.reaper.play amqp://user:password@host/vhost  # by RabbitMQ

Preemptible requests are refused at once, and normal ones wait for room. The
first resolver deletes a machine, and is killed before it can say so. Then the
scheduler is started again. The second resolver finds what waits, and that
there is room for it already. Indented lines come from the resolvers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from examples.reaper.api import ask_for, show
from examples.reaper.scheduler import cloud, delete, svc
from gracekit import RpcClient

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 30.0


async def main(url: str) -> None:
    """Fill the host, kill the resolver, start the scheduler again, resolve the rest."""
    async with scheduler(url), svc.client(url) as client:
        await fill_the_host(client)
        async with resolver(url, "--every", "60", "--pause", "60") as first:
            print(await ask_for(client, "n-2", 1024))
            await listen(first, until="freed")
            first.kill()
            await first.wait()
        print(f"\nthe resolver was killed; these wait: {await waiting(client)}")
    print("the scheduler has ended, and is started again, with a deadline of 5 s for new requests")
    async with scheduler(url, GRACEKIT_PENDING_TIMEOUT="5s"), svc.client(url) as client:
        print(f"these wait: {await waiting(client)}\n")
        async with resolver(url) as second:
            await listen(second, until="retried")
            await ask_for_too_much(client, second)
    print("\nin the end:")
    show()


async def fill_the_host(client: RpcClient) -> None:
    """8192 MiB, of which preemptible machines have the most."""
    for vm, memory_mb, preemptible in (
        ("p-1", 2048, True),
        ("p-2", 4096, True),
        ("n-1", 2048, False),
        ("p-3", 1024, True),  # does not fit
    ):
        print(await ask_for(client, vm, memory_mb, preemptible=preemptible))


async def ask_for_too_much(client: RpcClient, second: Process) -> None:
    """More than the host has; and more than it can have, as normal machines are not deleted."""
    print(await ask_for(client, "n-3", 65536))
    await listen(second, until="gave")
    print(await ask_for(client, "n-4", 8192))
    print(await ask_for(client, "n-5", 8192))
    await client.call(delete, vm="n-5")
    print(f"the user has deleted n-5; these wait: {await waiting(client)}")
    await until(lambda: "n-4" in cloud.failures())


async def waiting(client: RpcClient) -> str:
    """What is parked, as any resolver can ask."""
    tasks = client.prepare(ops=True, namespace="gracekit.tasks", version="1.1")
    page = await tasks.call("list_pending")
    return ", ".join(f"{task['resource']} at version {task['version']}" for task in page["tasks"])


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for a while."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - files of other processes
            await asyncio.sleep(0.05)


# -- processes ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def scheduler(url: str, **settings: str) -> AsyncIterator[Process]:
    """The service as a process: begins when it takes requests, ends by SIGTERM."""
    run = ("gracekit", "run", "--app-dir", str(CHECKOUT), "examples.reaper.scheduler:svc")
    async with process(*run, until="service.serving", GRACEKIT_TRANSPORT_URL=url, **settings) as it:
        yield it


@contextlib.asynccontextmanager
async def resolver(url: str, *options: str) -> AsyncIterator[Process]:
    """A resolver as a process: begins when it listens."""
    run = ("examples.reaper.resolver", *options)
    path = {"GRACEKIT_TRANSPORT_URL": url, "PYTHONPATH": path_to_this()}
    async with process(*run, until="listening", **path) as it:
        yield it


def path_to_this() -> str:
    """As PYTHONPATH, for a process in another directory."""
    return os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))


@contextlib.asynccontextmanager
async def process(module: str, *arguments: str, until: str, **env: str) -> AsyncIterator[Process]:
    """A module that runs; begins when it has said *until*, ends by SIGTERM."""
    program = (sys.executable, "-m", module, *arguments)
    started = await asyncio.create_subprocess_exec(*program, stdout=PIPE, env={**os.environ, **env})
    try:
        await listen(started, until=until)
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await listen(started)


async def listen(process: Process, until: str | None = None) -> None:
    """Pass on what a process prints, without its log, until it says *until* or has ended."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        async for line in process.stdout:
            text = line.decode()
            if not text.startswith("{"):
                print(f"    {text}", end="", flush=True)
            if until is not None and until in text:
                return
        code = await process.wait()
        assert until is None, f"it ended with {code} before {until!r}"


if __name__ == "__main__":
    asked_url = sys.argv[1] if len(sys.argv) > 1 else "sqlite:///gracekit.db"
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main(asked_url))
