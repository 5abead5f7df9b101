"""13 - A service inside a larger program, which has a server and signals of its own.

    python examples/ex13_embedded.py

An embedded Runtime leaves the process alone: no signal handlers (unless it is
made with `signals=True`), no logging, no exit. Here the program has a small HTTP
server for readiness, and has SIGTERM ask the Runtime to stop. While the last
task runs, the server goes on answering, "503 draining"; it is closed after the
Runtime, not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from asyncio import StreamReader, StreamWriter

from gracekit import Context, Runtime, Service

svc = Service("films")
begun, finish = asyncio.Event(), asyncio.Event()


@svc.rpc(on_interrupt="retry")
async def transcode(_ctx: Context, film: str) -> str:
    """Takes as long as the visitors want."""
    begun.set()
    await finish.wait()
    return f"{film} is transcoded"


async def main() -> None:
    """The program: what starts first is closed last."""
    runtime = Runtime(svc)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.request_stop)

    async def readiness(_: StreamReader, writer: StreamWriter) -> None:
        code = 200 if runtime.not_ready is None else 503
        answer = f"HTTP/1.1 {code} {runtime.state.value}\r\nConnection: close\r\n\r\n"
        writer.write(answer.encode())
        writer.close()

    async with await asyncio.start_server(readiness, "127.0.0.1", 0) as server, runtime:
        visits = asyncio.create_task(visit(server.sockets[0].getsockname()[1]))
        report = await runtime.serve()
        await visits
    print(f"drained: {report.finished} finished, {len(report.handed_over)} handed over")


async def visit(port: int) -> None:
    """Who is outside: a caller, a load balancer, and whoever sends signals."""
    async with svc.client("sqlite:///gracekit.db") as client:
        answer = asyncio.create_task(client.call(transcode, film="Alien"))
        await begun.wait()
        print(f"a task runs, and the server says {await status(port)}")
        os.kill(os.getpid(), signal.SIGTERM)
        while (said := await status(port)) == "200 serving":
            pass
        print(f"SIGTERM was sent, and the server says {said}")
        finish.set()
        print(f"the caller's answer: {await answer}")


async def status(port: int) -> str:
    """What a load balancer sees: `200 serving`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = (await reader.readline()).decode()
    writer.close()
    return line.removeprefix("HTTP/1.1 ").strip()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
