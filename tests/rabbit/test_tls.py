"""TLS: the broker proves who it is, and no secret is told to anybody."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gracekit.clock import Clock
from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.rpc.amqp.wire import _connected
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Delivery, Message, shared_queue
from tests.process import served
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.certificates import Certificates
from tests.rabbit.site import RabbitSite

pytestmark = pytest.mark.process

QUEUE = shared_queue("compute")


@pytest.fixture(scope="module")
def brokers(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[dict[str, Broker]]:
    """One for each certificate, started together."""
    made = {
        name: Broker(tmp_path_factory.mktemp(name), tls=getattr(certificates, name))
        for name in ("good", "wrong_host", "expired", "stranger")
    }
    try:
        for broker in made.values():
            broker.launch()
        for broker in made.values():
            broker.await_serving()
        yield made
    finally:
        for broker in made.values():
            broker.close()


async def exchange(url: str) -> bytes:
    """Send a message to ourselves over *url*."""
    transport = open_transport(url, process=Process(), clock=Clock())
    await transport.start()
    try:
        inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        await transport.consume([QUEUE], inbox.put_nowait, prefetch=1)
        await transport.publish(QUEUE, Message(body=b"a"))
        delivery = await asyncio.wait_for(inbox.get(), 10)
        await delivery.ack()
        return delivery.body
    finally:
        await transport.stop()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_broker_that_proves_who_it_is_is_used(brokers, certificates, host) -> None:
    """With the authority's certificate in `cafile`, by name and by address."""
    url = brokers["good"].tls_url_of("", host=host)

    assert await exchange(f"{url}?cafile={certificates.ca}") == b"a"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_host", "Hostname mismatch"),
        ("expired", "certificate has expired"),
        ("stranger", "certificate signature failure|unable to get local issuer|self-signed"),
    ],
)
async def test_a_broker_that_does_not_is_refused(brokers, certificates, name, said) -> None:
    """Another host's certificate, an expired one, and one of an authority that nobody trusts."""
    broker = brokers[name]

    with pytest.raises(ConfigError, match=said) as refused:
        await exchange(f"{broker.tls_url_of('')}?cafile={certificates.ca}")

    assert "does not prove who it is" in str(refused.value)
    assert broker.password not in str(refused.value)


async def test_without_an_authority_the_system_s_own_are_asked(brokers) -> None:
    """A private authority is not among them."""
    with pytest.raises(ConfigError, match=r"cafile=the system's own"):
        await exchange(brokers["good"].tls_url_of(""))


async def test_verification_is_switched_off_only_in_words(brokers) -> None:
    """`verify=none` takes whatever answers."""
    assert await exchange(f"{brokers['expired'].tls_url_of('')}?verify=none") == b"a"


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
async def test_a_broker_is_reached_by_name_while_the_default_executor_is_busy(
    brokers, certificates, scheme
) -> None:
    """asyncio resolves names in the default executor, which belongs to the application."""
    good, end = brokers["good"], threading.Event()
    url = good.url_of("").replace("127.0.0.1", "localhost")
    if scheme == "amqps":
        url = f"{good.tls_url_of('')}?cafile={certificates.ca}"
    assert "@localhost:" in url
    executor = ThreadPoolExecutor(1)
    executor.submit(end.wait)
    asyncio.get_running_loop().set_default_executor(executor)

    try:
        assert await exchange(url) == b"a"
    finally:
        end.set()


async def test_a_certificate_must_name_the_host_of_the_url(brokers, certificates) -> None:
    """The host's name is verified, and not the address that it was resolved to."""
    broker = brokers["wrong_host"]

    with pytest.raises(ConfigError, match="'localhost'"):
        await exchange(f"{broker.tls_url_of('')}?cafile={certificates.ca}")


async def test_a_secret_is_told_to_nobody(brokers, certificates, tmp_path: Path) -> None:
    """Neither password nor context is in the log, the store, the process list or an error, through
    a start, requests that fail, a crash dump, and the loss of the broker.
    """
    broker = brokers["good"]
    site = RabbitSite(tmp_path, broker, "/")
    site.url = f"{broker.tls_url_of('%2F')}?cafile={certificates.ca}"
    try:
        service = await site.start_cli(log_format="text").serving()
        async with served.svc.client(site.url) as client:
            view = client.prepare(context={"auth_token": "canary-in-context"}, timeout=10)
            await view.call("slow", key="k", s=0)
            with pytest.raises(TypeError, match="wrong") as failed:
                await view.call("slow", key="k", s=0, wrong="canary-in-arguments")
            await asyncio.to_thread(broker.close_all_connections)
            await service.wait_log("consumer.resumed", times=2)
            await view.call("slow", key="k2", s=0)
        listed = b" ".join(
            path.read_bytes() for path in Path("/proc").glob(f"{service.pid}/cmdline")
        )
        service.terminate()
        await service.exit_code()
        await until(lambda: service.ended, "its end")
    finally:
        site.close()

    kept = b"".join(path.read_bytes() for path in tmp_path.glob("store.db*") if path.is_file())
    everything = service.log.encode() + listed + kept + str(failed.value).encode()
    assert broker.password.encode() not in everything
    assert b"canary-in-context" not in service.log.encode() + listed
    assert b"canary-in-arguments" not in service.log.encode()


async def test_a_connection_that_nobody_awaits_any_more_is_closed():
    """A cancelled start leaves the thread that connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = asyncio.create_task(_connected(*listener.getsockname()))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        taken, _ = await asyncio.to_thread(listener.accept)
        with taken:
            assert await asyncio.to_thread(taken.recv, 1) == b""
