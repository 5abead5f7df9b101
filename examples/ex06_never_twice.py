"""06 - What nobody has called safe is never run twice: on_interrupt="error", the default.

    python examples/ex06_never_twice.py

The process is killed while it charges a card. Nobody can ask whether the money
has gone, so nobody may guess: the next start marks the task ERRORED, tells the
`errored` hook, and the waiting caller gets an exception that says what is known.
Sending the same request again starts nothing; it gets the same answer. A person
looks at the account, and orders anew under a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Service, TaskInterruptedError

svc = Service("payments")


@svc.rpc
async def charge(ctx: Context, card: str, euros: int) -> str:
    """Move money; says nothing about being safe to repeat, because it is not."""
    print(f"attempt {ctx.attempt} charges {card} with {euros} EUR", flush=True)
    await asyncio.sleep(5)
    return f"{card} was charged"


@charge.errored
async def tell_a_person(ctx: Context, card: str, euros: int, reason: str) -> None:
    """Called at least once for each task that recovery marks ERRORED."""
    print(
        f"errored hook: {card}, {euros} EUR, {reason}: look at request {ctx.request_id}", flush=True
    )


async def main() -> None:
    """One call, one kill, and the same call again."""
    async with svc.client("sqlite:///gracekit.db") as client:
        invoice = client.prepare(request_id="invoice-9")
        async with serving() as first:
            answer = asyncio.create_task(invoice.call(charge, card="card-1", euros=80))
            await listen(first, until="charges")
            first.kill()
            await first.wait()
        print("the process was killed")

        async with serving(until="errored hook"):  # perhaps before it is ready
            try:
                await answer
            except TaskInterruptedError as error:
                print(f"the caller is told: {error}")
            try:
                await invoice.call(charge, card="card-1", euros=80)
            except TaskInterruptedError:
                print("the same request again is answered alike, and charges nothing")


@contextlib.asynccontextmanager
async def serving(until: str = "service.serving") -> AsyncIterator[Process]:
    """The service as a process of its own: begins when it says *until*, ends by SIGTERM."""
    here = Path(__file__)
    run = ("-m", "gracekit", "run", "--app-dir", here.parent, f"{here.stem}:svc")
    service = await asyncio.create_subprocess_exec(sys.executable, *run, stdout=PIPE)
    try:
        await listen(service, until=until)
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
