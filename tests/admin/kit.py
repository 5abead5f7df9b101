"""A service with its HTTP endpoint in this process, and plain requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from gracekit import Runtime, Service, Settings
from gracekit.rpc.memory import MemoryBroker

PATIENCE_S: Final = 300.0
TOKEN: Final = "0123456789abcdef0123456789abcdef"
ALICE: Final = {"Authorization": f"Bearer {TOKEN}"}
JSON: Final = {"Content-Type": "application/json"}
LIVEZ: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """The response to one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def why(self) -> str:
        """The message of an error response."""
        return str(self.json["error"]["message"])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def connection_to(address: str) -> http.client.HTTPConnection:
    """A connection that is made when it is used."""
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"))
    return http.client.HTTPConnection(address, timeout=PATIENCE_S)


def ask_now(
    address: str, path: str, method: str = "GET", *, body: object = None, **headers: str
) -> Answer:
    """One request; `user_agent="x"` sends `User-Agent: x`."""
    connection = connection_to(address)
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, body=sent, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def write_tokens(place: Path, text: str = f"alice:{TOKEN}:act\n") -> Path:
    file = place / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    return file


class Site:
    """A service whose store is a file in *place*; `admin` is a free port, unless said."""

    def __init__(self, place: Path, svc: Service, **settings: Any) -> None:
        place.chmod(0o700)
        given = {
            "transport_url": "memory://",
            "store_url": f"sqlite:///{place}/store.db",
            "host": "h",
            "admin": "127.0.0.1:0",
        } | settings
        self.runtime = Runtime(svc, Settings(**given), broker=MemoryBroker())
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.runtime.ground.telemetry.subscribe(
            lambda name, fields: self.events.append((name, dict(fields)))
        )

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.runtime.request_stop(reason="the test is over")
        async with asyncio.timeout(PATIENCE_S):
            await self.runtime.serve()

    @property
    def address(self) -> str:
        (opened,) = (fields for name, fields in self.events if name == "admin.opened")
        return str(opened["address"])

    def told(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]

    async def ask(
        self, path: str, method: str = "GET", *, body: object = None, **headers: str
    ) -> Answer:
        return await asyncio.to_thread(ask_now, self.address, path, method, body=body, **headers)

    async def act(self, path: str, headers: dict[str, str] = ALICE, **body: str) -> Answer:
        """An action as the documents say: fetch a key, then act."""
        key = (await self.ask("/api/v1/action-key", **headers)).json
        sent = {"run_id": key["run_id"], "key": key["key"], **body}
        return await self.ask(path, "POST", body=sent, **headers, **JSON)


async def raw(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent nothing yet."""
    host, _, port = site.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What is received until the connection is closed or reset."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    return b""
