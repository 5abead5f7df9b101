"""How many connections the endpoint keeps, what each costs, and which one makes room."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from pathlib import Path

import pytest
from uvloop.loop import SSLProtocol as OfUvloop

from gracekit import Service
from gracekit.admin import endpoint
from tests.admin.kit import LIVEZ, PATIENCE_S, Site, end_of, raw
from tests.loops import LOOPS
from tests.rabbit.certificates import Certificates
from tests.scale import scale


@pytest.fixture
def tls(certificates: Certificates) -> str:
    """The setting `admin_tls`."""
    return f"{certificates.good.certificate},{certificates.good.key}"


@pytest.mark.parametrize("limited_by", ["number", "descriptors"])
async def test_beyond_the_limit_a_connection_takes_the_place_of_the_idlest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited_by: str
):
    """The service keeps its descriptors, and clients that say nothing do not shut a probe out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limited_by == "number":
        monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 3)
    else:
        monkeypatch.setattr(endpoint, "DESCRIPTORS_PART", soft // 3)
    async with Site(tmp_path, Service("s")) as site:
        silent = [await raw(site) for _ in range(3)]
        for _ in range(2):
            assert (await site.ask("/livez")).status == 200
        assert await end_of(silent[0][0]) == b""
        reader, writer = silent[2]  # the first probe took the place of the first, and left
        writer.write(LIVEZ)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in silent:
            writer.close()

    assert site.told("admin.full") == [{"limit": 3}]


async def test_a_request_in_progress_keeps_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If all connections are at work, further ones are closed at once."""
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 2)
    async with Site(tmp_path, Service("s")) as site:
        reading = [await raw(site) for _ in range(2)]
        for reader, writer in reading:
            writer.write(LIVEZ.replace(b"/livez", b"/api/v1/events"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        reader, extra = await raw(site)
        assert await end_of(reader) == b""
        for writer in (extra, *(writer for _, writer in reading)):
            writer.close()


async def test_clients_that_begin_no_handshake_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str
):
    """With TLS a connection takes a descriptor before its first request can come. The oldest is
    cut.
    """
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 3)
    async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
        silent = [await raw(site) for _ in range(3)]
        _, extra = await raw(site)
        async with asyncio.timeout(endpoint.CLIENT_TIMEOUT_S / 2):
            assert await end_of(silent[0][0]) == b""
        for writer in (extra, *(writer for _, writer in silent)):
            writer.close()


async def test_a_client_that_begins_no_handshake_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str
):
    """In the time that it has for a request; asyncio alone would wait for a minute."""
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT_S", 0.1)
    async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
        reader, writer = await raw(site)
        async with asyncio.timeout(4):
            assert await end_of(reader) == b""
        writer.close()


def tls_states() -> int:
    """How many connections hold a loop's buffers for TLS, of 256 KiB and more each."""
    return sum(isinstance(one, SSLProtocol | OfUvloop) for one in gc.get_objects())


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """What only a garbage collection would free stays meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def ask_by_tls(site: Site) -> int:
    """The status of a probe; by blocking sockets, so that no TLS of asyncio is the client's."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = site.address.rpartition(":")

    def get() -> int:
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=PATIENCE_S, context=context
        )
        with contextlib.closing(connection):
            connection.request("GET", "/livez")
            return connection.getresponse().status

    return await asyncio.to_thread(get)


async def wait_tls_states(number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while tls_states() != number:
            await asyncio.sleep(0.02)


async def test_a_client_that_has_sent_nothing_takes_no_buffer_for_tls(tmp_path: Path, tls: str):
    """Thousands of silent connections would otherwise take hundreds of megabytes."""
    with without_collections():
        async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
            silent = [await raw(site) for _ in range(20)]
            assert await ask_by_tls(site) == 200  # those that came before it are accepted, too
            await wait_tls_states(0)
            for _, writer in silent:
                writer.close()


async def test_clients_that_have_begun_tls_are_limited_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str
):
    """One more takes the place of the idlest of them; clients that have sent nothing stay."""
    monkeypatch.setattr(endpoint, "MAX_TLS_CONNECTIONS", 3)
    gc.collect()  # buffers in cycles that earlier tests have left would be counted
    async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
        silent, _ = quiet = await raw(site)
        begun = [await raw(site) for _ in range(4)]
        for number, (_, writer) in enumerate(begun):
            writer.write(b"\x16")
            await wait_tls_states(min(number + 1, 3))
        async with asyncio.timeout(endpoint.CLIENT_TIMEOUT_S / 2):
            assert await end_of(begun[0][0]) == b""
            assert await ask_by_tls(site) == 200
        assert not silent.at_eof()
        for _, writer in (quiet, *begun):
            writer.close()

    assert site.told("admin.full") == [{"limit": 3}]


@pytest.mark.parametrize("sent", [b"", b"\x16", LIVEZ], ids=["nothing", "a byte", "no TLS"])
async def test_what_a_client_without_tls_took_is_free_when_it_has_gone(
    tmp_path: Path, tls: str, sent: bytes
):
    """At once: no cycle of references keeps the buffers until the next garbage collection."""
    with without_collections():
        async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
            for _ in range(5):
                reader, writer = await raw(site)
                writer.write(sent)
                writer.write_eof()
                await end_of(reader)
                writer.close()
            assert await ask_by_tls(site) == 200
            await wait_tls_states(0)


async def test_what_a_client_took_that_was_cut_is_free_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str
):
    """Also if it was cut in its handshake, because it took too long or another one needed the
    room.
    """
    monkeypatch.setattr(endpoint, "MAX_TLS_CONNECTIONS", 3)
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT_S", 0.5)
    with without_collections():
        async with Site(tmp_path, Service("s"), admin_tls=tls) as site:
            begun = [await raw(site) for _ in range(6)]
            for _, writer in begun:
                writer.write(b"\x16")
                await asyncio.sleep(0)
            for reader, writer in begun:
                await end_of(reader)
                writer.close()
            await wait_tls_states(0)


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_flood_of_silent_connections_never_takes_the_last_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
):
    """Connections that are being closed count until their descriptors are free, so that accepting
    finds one each time, and probes are answered during the flood and after it.
    """
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 8)
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        most = runner.run(flood(tmp_path))

    # The limit, half of it for those that are being closed, one that was just accepted; and the
    # test's own: the probe, and the directory that is being listed.
    assert most <= 8 + 4 + 1 + 3


async def flood(tmp_path: Path) -> int:
    """How many descriptors a flood of connections takes at most."""
    async with Site(tmp_path, Service("s")) as site, contextlib.AsyncExitStack() as clients:
        host, _, port = site.address.rpartition(":")
        silent = [
            clients.enter_context(socket.socket()) for _ in range(scale(200, 1000))
        ]  # fewer than the backlog
        before = descriptors()
        most = 0

        def count() -> None:
            nonlocal most
            most = max(most, descriptors() - before)
            loop.call_soon(count)

        for one in silent:
            one.connect((host, int(port)))  # the kernel answers: they wait in the backlog
        loop = asyncio.get_running_loop()
        loop.call_soon(count)
        assert (await site.ask("/livez")).status == 200
    return most


async def test_without_a_free_descriptor_connections_wait(tmp_path: Path):
    """The endpoint logs that once, tries again each second, and then answers those that waited."""
    loop, faults = asyncio.get_running_loop(), []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Site(tmp_path, Service("s")) as site:
        with socket.socket() as client:
            client.setblocking(False)
            with Path(os.devnull).open() as free:
                first_free = free.fileno()
            loop.set_exception_handler(lambda _, fault: faults.append(fault))
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
            try:
                host, _, port = site.address.rpartition(":")
                await loop.sock_connect(client, (host, int(port)))
                async with asyncio.timeout(PATIENCE_S):
                    while not site.told("admin.no_descriptor"):
                        await asyncio.sleep(0.02)
                await asyncio.sleep(1.2)  # it has tried again
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                loop.set_exception_handler(None)
            await loop.sock_sendall(client, LIVEZ)
            async with asyncio.timeout(PATIENCE_S):
                assert await loop.sock_recv(client, 12) == b"HTTP/1.1 200"

    assert faults == []
    (reported,) = site.told("admin.no_descriptor")
    assert "Too many open files" in reported["error"]
