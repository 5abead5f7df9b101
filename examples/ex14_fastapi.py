"""14 - A service inside a FastAPI program, with its probes, listings and verbs under `/ops`.

    python examples/ex14_fastapi.py

It needs `pip install '.[web,prometheus]' fastapi`.
`gracekit.web.application(runtime)` is an ASGI application: probes for the platform, metrics for
Prometheus, and the API for operators, who need a token to act. The Runtime owns the signals:
SIGTERM drains the service, and uvicorn goes on answering until the drain is over.
docs/embedding.md has such a program for production.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gracekit import Context, GracekitError, RpcClient, Runtime, Service, Settings
from gracekit.exits import exit_code_of
from gracekit.web import application

TOKEN = "3b8c1f6f0d5e4a7f9c2e"
TOKENS = Path("tokens")  # only the service may read this file

svc = Service("films")
begun, finish = asyncio.Event(), asyncio.Event()


@svc.rpc(on_interrupt="retry")
async def transcode(_ctx: Context, film: str) -> str:
    """Transcode until `finish` is set."""
    begun.set()
    await finish.wait()
    return f"{film} is transcoded"


class Server(uvicorn.Server):
    """Uvicorn's server, which leaves the signals to the Runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signal."""
        yield


async def main() -> int:
    """The program: an API of its own, and the service beside it."""
    runtime = Runtime(svc, Settings(admin_token_file=str(TOKENS)), signals=True)
    app = FastAPI()
    app.mount("/ops", application(runtime))

    @app.get("/films")
    async def films() -> str:
        client: RpcClient = app.state.client
        return await client.call(transcode, film="Alien")

    @app.exception_handler(GracekitError)
    async def fail(_request: Request, error: GracekitError) -> JSONResponse:
        """For example if an operator cancels the task."""
        return JSONResponse({"error": type(error).__name__}, status_code=502)

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
    server = Server(config)
    async with runtime, svc.client(runtime.settings.transport_url) as client:
        app.state.client = client  # one client for all requests
        web = asyncio.create_task(server.serve(sockets=[listener]))
        visits = asyncio.create_task(visit(listener.getsockname()[1]))
        report = await runtime.serve()
        await visits
        server.should_exit = True
        await web
    if report.must_die:  # a handler never ended: asyncio.run would wait for it
        os._exit(report.exit_code)
    return report.exit_code


async def visit(port: int) -> None:
    """Play a customer, an operator, a load balancer, and the platform that stops the program."""
    answer = asyncio.create_task(asyncio.to_thread(get, port, "/films"))
    await begun.wait()
    _, body = await asyncio.to_thread(get, port, "/ops/api/v1/tasks")
    (task,) = json.loads(body)["tasks"]
    print(f"the operator sees a task: {task['method']}, {task['state']}")
    ready, _ = await asyncio.to_thread(get, port, "/ops/readyz")
    print(f"the load balancer sees {ready}")
    os.kill(os.getpid(), signal.SIGTERM)
    while (seen := await asyncio.to_thread(get, port, "/ops/readyz"))[0] == ready:
        pass
    print(f"SIGTERM was sent, and it sees {seen[0]}")
    finish.set()
    print(f"the customer's answer: {(await answer)[1]}")


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of the answer to a GET with the token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        TOKENS.touch(mode=0o600)
        TOKENS.write_text(f"deploy:{TOKEN}:act\n")
        logging.basicConfig()  # warnings and errors of gracekit, too
        try:
            code = asyncio.run(main())
        except GracekitError as error:  # the start was refused
            print(f"Error: {error}", file=sys.stderr)
            code = exit_code_of(error)
    sys.exit(code)
