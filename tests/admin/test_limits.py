"""Limits of the endpoint: addresses in use, endless requests, readers that stay."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gracekit import Service
from gracekit.admin import application, endpoint, live_events
from gracekit.control import accounts, facts, verbs
from gracekit.errors import ConfigError
from gracekit.store.sqlite.reader import StoreReader
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from tests.admin.kit import ALICE, LIVEZ, PATIENCE_S, Site, end_of, raw, write_tokens


async def refusal(site: Site) -> str:
    with pytest.raises(ConfigError) as caught:
        async with site:
            pass
    return str(caught.value)


# -- places -----------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_refused_at_the_start(tmp_path: Path):
    """The message has the port and a remedy; nothing of the service is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = await refusal(Site(tmp_path, Service("s"), admin=f"127.0.0.1:{port}"))

    assert said.startswith(f"admin = 127.0.0.1:{port} cannot be listened at: Address already in")
    assert "Set GRACEKIT_ADMIN to a free address" in said


async def test_a_socket_at_which_somebody_listens_is_not_taken_away(tmp_path: Path):
    """Two services with one admin path: the second is refused, and the first goes on."""
    path = tmp_path / "admin.sock"
    async with Site(tmp_path, Service("s"), admin=f"unix:{path}", instance="a") as first:
        other = Site(tmp_path, Service("s"), admin=f"unix:{path}", instance="b")
        said = await refusal(other)
        assert (await first.ask("/livez")).status == 200

    assert "cannot be listened at: Address already in use" in said


async def test_a_socket_that_a_dead_process_has_left_is_replaced(tmp_path: Path):
    """A crash leaves the file; the next start must not need an operator."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async with Site(tmp_path, Service("s"), admin=f"unix:{path}") as site:
        assert (await site.ask("/livez")).status == 200


async def test_a_directory_that_is_not_there_is_refused(tmp_path: Path):
    """The message has the path that was asked for."""
    path = tmp_path / "missing" / "admin.sock"

    said = await refusal(Site(tmp_path, Service("s"), admin=f"unix:{path}"))

    assert said.startswith(f"admin = unix:{path} cannot be listened at: No such file or directory")


async def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path):
    """The message has its length and the kernel's limit."""
    path = tmp_path / ("x" * 108)

    said = await refusal(Site(tmp_path, Service("s"), admin=f"unix:{path}"))

    assert "the kernel takes 107: set GRACEKIT_ADMIN to a shorter one" in said


async def test_without_its_packages_the_endpoint_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The message names the extra; a service without an endpoint does not need it."""
    monkeypatch.delitem(sys.modules, "gracekit.admin.endpoint")
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    assert "pip install 'gracekit[web]'" in await refusal(Site(tmp_path, Service("s")))
    (tmp_path / "b").mkdir()
    async with Site(tmp_path / "b", Service("s"), admin="off"):
        pass


async def test_a_certificate_that_is_none_is_refused(tmp_path: Path):
    """The start fails before the service takes requests."""
    file = tmp_path / "cert.pem"
    file.write_text("no certificate")

    said = await refusal(Site(tmp_path, Service("s"), admin_tls=f"{file},{file}"))

    assert said.startswith(f"admin_tls {file},{file} cannot be used: ")


# -- requests ---------------------------------------------------------------------------


async def test_a_header_without_end_is_cut(tmp_path: Path):
    """A header of ten megabytes is refused after about 64 KiB, and the next request is answered."""
    async with Site(tmp_path, Service("s")) as site:
        reader, writer = await raw(site)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        try:
            for _ in range(160):
                writer.write(b"x" * 65_536)
                await writer.drain()
                sent += 65_536
            answer = await reader.read(100)
        except ConnectionError:
            answer = b""
        writer.close()

        assert answer[:12] in {b"", b"HTTP/1.1 400"}
        assert (await site.ask("/livez")).status == 200


@pytest.mark.parametrize("path", [b"/livez", b"/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n",
        b"Origin: http://localhost\r\nOrigin: http://evil.example\r\n",
        b"Content-Type: application/json\r\nContent-Type: text/plain\r\n",
    ],
    ids=["two lengths", "two tokens", "two origins", "two types"],
)
async def test_a_request_that_can_be_read_in_two_ways_is_refused_and_its_connection_closed(
    tmp_path: Path, path: bytes, headers: bytes
):
    """A proxy before the endpoint may read it in the other way, and so let through what it
    forbids.
    """
    async with Site(tmp_path, Service("s")) as site:
        reader, writer = await raw(site)
        ask = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(ask + headers + b"\r\n0\r\n\r\n" + LIVEZ)
        answer = await end_of(reader)
        writer.close()

        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer
        assert {entry["why"] for entry in site.told("admin.refused")} == {"headers"}


async def test_a_connection_that_asks_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise each would keep a descriptor of the service for ever."""
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT_S", 0.1)
    async with Site(tmp_path, Service("s")) as site:
        reader, writer = await raw(site)
        assert await end_of(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    ("request_", "rest"),
    [(LIVEZ, b"G"), (LIVEZ[:-2] + b"Content-Length: 9\r\n\r\n", b"x"), (LIVEZ * 1000, b"")],
    ids=["next request", "rest of a body", "answers that are not read"],
)
async def test_a_connection_that_stops_after_an_answer_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: bytes, rest: bytes
):
    """Whatever the client has begun to send, and whether or not it reads."""
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT_S", 0.1)
    path, loop = tmp_path / "admin.sock", asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        async with Site(tmp_path, Service("s"), admin=f"unix:{path}"):
            client.connect(str(path))
            await loop.sock_sendall(client, request_)
            assert (await loop.sock_recv(client, 12)) == b"HTTP/1.1 200"
            await loop.sock_sendall(client, rest)
            async with asyncio.timeout(4):  # uvicorn closes one that sends nothing after 5 s
                while not is_closed(client):
                    await asyncio.sleep(0.02)


def is_closed(client: socket.socket) -> bool:
    """Whether the other end is closed, also with data before it that was not read."""
    poll = select.poll()
    poll.register(client, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


# -- readers of events ------------------------------------------------------------------


async def test_events_come_until_the_end_of_the_run(tmp_path: Path):
    """They have the run's own status, and changes of it."""
    async with Site(tmp_path, Service("s")) as site:
        reader, writer = await raw(site)
        writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"event: status\n")
            first = await reader.readuntil(b"\n\n")
            await site.runtime.wired.control.carry_out("quiet", site.runtime.run_id, {})
            while b'"phase": "quiet"' not in (seen := await reader.readuntil(b"\n\n")):
                assert b"event: status" in seen
    writer.close()

    assert b'"phase": "serving"' in first


async def test_readers_beyond_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """When a reader leaves, another one can come."""
    monkeypatch.setattr(live_events, "MAX_READERS", 1)
    async with Site(tmp_path, Service("s")) as site:
        reader, writer = await raw(site)
        writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"event: status\n")

        assert (await site.ask("/api/v1/events")).status == 503

        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reader, writer = await raw(site)
                writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if b"200" in await reader.readline():
                    break
                writer.close()
                await asyncio.sleep(0.02)
        writer.close()


@pytest.mark.looptime
async def test_a_reader_that_never_reads_is_dropped():
    """Nothing is queued for it, and after five seconds another reader can come."""
    feed = live_events.Feed(lambda: None)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]  # it never goes

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            await asyncio.Event().wait()

    began_at = asyncio.get_running_loop().time()
    await live_events.EventStream(feed)({"type": "http"}, receive, send)

    assert asyncio.get_running_loop().time() - began_at == pytest.approx(6, abs=0.1)
    assert feed.readers == 0
    assert len(sent) == 3


async def test_a_thousand_readers_at_once_are_bounded_and_the_service_goes_on(tmp_path: Path):
    """Those within the limit read on, each of the others is refused with a sentence or closed, and
    requests and probes are answered meanwhile. Nothing of them is left when they have gone.
    """
    async with Site(tmp_path, Service("s")) as site:
        before = len(asyncio.all_tasks())
        opened = await asyncio.gather(*(raw(site) for _ in range(1000)), return_exceptions=True)
        readers = [one for one in opened if not isinstance(one, BaseException)]
        for _, writer in readers:
            writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        firsts = await asyncio.gather(*(first_line(reader) for reader, _ in readers))

        assert firsts.count(b"HTTP/1.1 200 OK\r\n") == live_events.MAX_READERS
        refused = firsts.count(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert firsts.count(b"") == len(firsts) - live_events.MAX_READERS - refused
        assert len(asyncio.all_tasks()) - before < 3 * endpoint.MAX_CONNECTIONS

        for _, writer in readers:
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.02)
        assert (await site.ask("/readyz")).status == 200


async def first_line(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            return await reader.readline()
    return b""


# -- a store that hangs -----------------------------------------------------------------


async def test_while_the_store_hangs_each_ask_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Listings say what they waited for; verbs are carried out, and their record waits for the
    store.
    """
    monkeypatch.setattr(application, "LONGEST_ASK_S", 1.0)
    monkeypatch.setattr(verbs, "NOTE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(facts, "LOOK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(accounts, "COUNT_WAIT_S", 0.1)
    tokens, answers = str(write_tokens(tmp_path)), threading.Event()
    async with Site(tmp_path, Service("s"), admin_token_file=tokens) as site:
        with monkeypatch.context() as hanging:
            for name in ("query", "submit"):
                hanging.setattr(SqliteEngine, name, hang)
            hanging.setattr(StoreReader, "read", lambda *_: answers.wait() and [])
            listed = [
                await site.ask(f"/api/v1/{path}", **ALICE)
                for path in ("status", "tasks", "tasks/x", "exits", "accounts")
            ]
            config = await site.ask("/api/v1/config", **ALICE)
            ordered = await site.act("/api/v1/quiet")
            metrics = await site.ask("/metrics")
            live = await site.ask("/livez")
        answers.set()

    assert {answer.status for answer in listed} == {503}
    for answer in listed:
        assert answer.why.startswith("no answer within 1s: the store, or what was asked")
    assert [one.status for one in (config, ordered, metrics, live)] == [200, 200, 200, 200]
    assert ordered.json["phase"] == "quiet"


async def hang(*_: object, **__: object) -> None:
    await asyncio.Event().wait()
