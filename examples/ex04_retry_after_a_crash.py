"""04 - Work that may be repeated is run again after a crash: on_interrupt="retry".

    python examples/ex04_retry_after_a_crash.py

A snapshot of three parts is deleted, and the process is killed after the first
part: kill -9, which no process can notice. Deleting is idempotent, what is gone
is no error, so the method says "retry". The next start finds the unfinished
task in the journal and runs it again, under the same request id; the caller
just waits a little longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Service

svc = Service("snapshots")


# After a crash a task is left alone for `settle`, by default 10 s, because the last request of
# the dead process may still be on its way to the backend. To a local disk nothing is on its way.
@svc.rpc(resource="snapshot", on_interrupt="retry", settle="100ms")
async def delete(ctx: Context, snapshot: str) -> str:
    """Delete part after part; may be run again at any point."""
    for part in parts_of(snapshot):
        part.unlink(missing_ok=True)
        print(f"attempt {ctx.attempt} has deleted {part}", flush=True)
        await asyncio.sleep(5 if ctx.attempt == 1 else 0)  # the disk is slow, at first
    return f"{snapshot} is gone, said attempt {ctx.attempt}"


def make(snapshot: str) -> None:
    """A snapshot is three files."""
    for number in range(3):
        Path(f"{snapshot}.part{number}").touch()


def parts_of(snapshot: str) -> list[Path]:
    """What is left of a snapshot."""
    return sorted(Path().glob(f"{snapshot}.part*"))


async def main() -> None:
    """One call, one kill, one answer."""
    make("monday")
    async with svc.client("sqlite:///gracekit.db") as client:
        async with serving() as first:
            answer = asyncio.create_task(client.call(delete, snapshot="monday"))
            await listen(first, until="part0")
            first.kill()
            await first.wait()
        print(f"the process was killed; {len(parts_of('monday'))} parts are left")

        async with serving() as second:
            await listen(second, until="part2")
            print(f"the caller's answer: {await answer}; {len(parts_of('monday'))} parts are left")


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Process]:
    """The service as a process of its own: begins when it takes requests, ends by SIGTERM."""
    here = Path(__file__)
    run = ("-m", "gracekit", "run", "--app-dir", here.parent, f"{here.stem}:svc")
    service = await asyncio.create_subprocess_exec(sys.executable, *run, stdout=PIPE)
    try:
        await listen(service, until="service.serving")
        yield service
    finally:
        if service.returncode is None:
            service.terminate()
        await listen(service)


async def listen(service: Process, until: str | None = None) -> None:
    """Pass on what the service prints, without its log, until it says *until* or has ended."""
    assert service.stdout is not None
    async for line in service.stdout:
        text = line.decode()
        if not text.startswith("{"):
            print(f"    {text}", end="")
        if until is not None and until in text:
            return
    await service.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
