"""The permissions that docs/rabbitmq.md gives each role, on a real broker: enough, and no more."""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiormq
import pytest
from pamqp.commands import Basic

from gracekit import Context, GracekitError, RpcClient, Runtime, Service, Settings
from gracekit.clock import Clock
from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.message import Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import (
    Delivery,
    Message,
    Queue,
    Transport,
    directed_queue,
    fanout_queue,
    notification_queue,
    reply_queue,
    shared_queue,
)
from tests.docs.pages import Page
from tests.oslo.kit import OsloError, oslo_client, oslo_peer
from tests.rabbit.broker import HOST, Broker
from tests.rabbit.erlang import binary
from tests.rabbit.machine import wait_until

pytestmark = pytest.mark.process

PAGE: Final = Path(__file__).parents[2] / "docs" / "rabbitmq.md"
PASSWORD: Final = "a-password"
DOUBLE: Final = encode_request(Request(request_id="a", method="double", args={"n": 2}))
TWICE: Final = encode_request(Request(request_id="c", method="double", args={"n": 4}))
PING: Final = encode_request(Request(request_id="b", method="ping", args={}))
SERVICE, CLIENT, OPERATOR = "compute", "compute-client", "compute-operator"
LISTENER, OSLO_CLIENT = "compute-listener", "compute-oslo-client"
NOTIFIER: Final = "compute-notifier"
NOTIFICATIONS: Final = notification_queue("compute-notifications", "info")


def commands() -> list[list[str]]:
    """The words of each `rabbitmqctl` command of the page."""
    (block,) = [one for one in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
                if "set_permissions" in one]  # fmt: skip
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("rabbitmqctl")]


@pytest.fixture
def login(shared_broker: Broker, rabbit_vhost: str) -> Callable[[str], str]:
    """The URL of a role, whose user may do what the page gives it, and nothing else."""

    def user_of(role: str) -> str:
        return f"{role}-{rabbit_vhost}"

    by = binary("tests")
    for role in (SERVICE, CLIENT, OSLO_CLIENT, OPERATOR, LISTENER, NOTIFIER):
        shared_broker.eval(
            f"rabbit_auth_backend_internal:add_user({binary(user_of(role))}, "
            f"{binary(PASSWORD)}, {by})"
        )
    for _, command, _, _, role, *rights in commands():
        words = [user_of(role), rabbit_vhost, *rights]
        listed = ", ".join(map(binary, words))
        shared_broker.eval(f"rabbit_auth_backend_internal:{command}({listed}, {by})")
    return lambda role: (
        f"amqp://{user_of(role)}:{PASSWORD}@{HOST}:{shared_broker.port}/{rabbit_vhost}"
    )


@asynccontextmanager
async def transport_to(url: str, profile: str = "durable") -> AsyncIterator[Transport]:
    transport = open_transport(url, process=Process(), clock=Clock(), profile=profile)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


def ignore(delivery: object) -> None:
    del delivery


def a_service(seen: list[str], topic: str = "compute") -> Service:
    svc = Service(topic)

    @svc.rpc
    async def double(ctx: Context, n: int) -> int:
        seen.append("double")
        return 2 * n

    @svc.ops
    async def ping(ctx: Context) -> str:
        seen.append("ping")
        return "pong"

    return svc


@pytest.mark.parametrize("profile", ["durable", "quorum", "oslo-transient"])
async def test_what_the_page_gives_is_enough(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, rabbit_url: str, login, profile: str
) -> None:
    """A service, its clients and its operators do all that they do with these patterns alone."""
    seen = list[str]()
    settings = Settings(
        store_url=f"sqlite:///{tmp_path}/store.db",
        transport_url=login(SERVICE),
        declare_profile=profile,
        host="node-1",
    )
    client = RpcClient(login(CLIENT), "compute", declare_profile=profile)
    async with Runtime(a_service(seen), settings), client:
        view = client.prepare(timeout=20)
        assert await view.call("double", n=2) == 4
        assert await view.prepare(fail_fast=True).call("double", n=3) == 6
        assert await view.prepare(host="node-1").call("double", n=4) == 8
        assert await view.prepare(ops=True).call("ping") == "pong"
        await client.cast("double", n=5)
        await client.fanout("double", n=6)
        await client.prepare(ops=True).fanout("ping")
        await asyncio.to_thread(wait_until, lambda: len(seen) == 7, "all requests")

        async with transport_to(rabbit_url, profile) as publisher:
            await publisher.publish(shared_queue("compute"), Message(body=b"no request"))
        if profile.startswith("oslo"):
            return

        def ready(name: str) -> int:
            return shared_broker.queues(rabbit_vhost)[name].ready

        await asyncio.to_thread(wait_until, lambda: ready("compute_dead") == 1, "a dead letter")
        connection = await aiormq.connect(login(OPERATOR))
        try:
            channel = await connection.channel()
            letter = await channel.basic_get("compute_dead", no_ack=True)
            assert letter.body == b"no request"
            await channel.basic_publish(letter.body, exchange="gracekit", routing_key="compute")
            await asyncio.to_thread(wait_until, lambda: ready("compute_dead") == 1, "its return")
        finally:
            await connection.close()


@pytest.mark.parametrize("name", ["mycompute", "computer", "compute-opsx", "nova", "nova_compute"])
async def test_a_service_cannot_have_the_queues_of_another(login, name: str) -> None:
    """The patterns are anchored: a name that contains theirs is not theirs."""
    async with transport_to(login(SERVICE)) as transport:
        with pytest.raises(GracekitError, match="refused"):
            await transport.declare([shared_queue(name)])


@pytest.mark.parametrize(
    "queue",
    [shared_queue("compute"), shared_queue("compute-ops"), directed_queue("compute", "node-1"),
     reply_queue("compute_dead"), reply_queue("reply_of_mine")],
    ids=lambda queue: queue.name,
)  # fmt: skip
@pytest.mark.parametrize("role", [CLIENT, OSLO_CLIENT])
async def test_a_client_reads_its_own_answers_alone(
    rabbit_url: str, login, role: str, queue: Queue
) -> None:
    """Neither requests nor dead letters, nor queues under names that nobody has drawn."""
    async with transport_to(rabbit_url) as owner, transport_to(login(role)) as client:
        await owner.declare([queue])
        with pytest.raises(GracekitError, match="refused"):
            await client.consume([queue], ignore, prefetch=1)


@pytest.mark.parametrize("profile", ["durable", "quorum", "oslo-transient"])
async def test_notifications_go_from_the_service_to_its_listeners(login, profile: str) -> None:
    """Whichever of them comes first; and a listener sends none, nor does it read requests."""
    seen: asyncio.Queue[Delivery] = asyncio.Queue()
    async with (
        transport_to(login(LISTENER), profile) as listener,
        transport_to(login(SERVICE), profile) as service,
    ):
        await listener.consume([NOTIFICATIONS], seen.put_nowait, prefetch=1)
        await service.declare([NOTIFICATIONS, shared_queue("compute")])
        await service.publish(NOTIFICATIONS, Message(body=b"a"))
        async with asyncio.timeout(20):
            delivery = await seen.get()
        await delivery.ack()

        assert delivery.body == b"a"
        for queue in (NOTIFICATIONS, shared_queue("compute")):
            with pytest.raises(GracekitError, match="does not let this login send"):
                await listener.publish(queue, Message(body=b"b"))
        with pytest.raises(GracekitError, match="refused"):
            await listener.consume([shared_queue("compute")], ignore, prefetch=1)


async def test_clients_of_oslo_messaging_need_a_login_that_declares_exchanges(
    tmp_path: Path, login
) -> None:
    """They declare the exchanges to which they send, so the login of gracekit's clients is
    refused.
    """
    seen = list[str]()
    settings = Settings(
        store_url=f"sqlite:///{tmp_path}/store.db",
        transport_url=login(SERVICE),
        declare_profile="oslo-transient",
        host="node-1",
    )
    async with (
        Runtime(a_service(seen), settings),
        oslo_client(login(OSLO_CLIENT), "compute", exchange="gracekit") as client,
        oslo_client(login(CLIENT), "compute", exchange="gracekit") as refused,
    ):
        view = client.prepare(timeout=20)
        assert await view.call({}, "double", n=2) == 4
        assert await view.prepare(server="node-1").call({}, "double", n=3) == 6
        assert await view.prepare(topic="compute-ops").call({}, "ping") == "pong"
        await view.cast({}, "double", n=4)
        await view.prepare(fanout=True).cast({}, "double", n=5)
        await asyncio.to_thread(wait_until, lambda: len(seen) == 5, "all requests")

        with pytest.raises(OsloError):
            await refused.prepare(timeout=2).call({}, "double", n=6)
        assert "ACCESS_REFUSED" in refused.peer.log


async def test_an_application_s_own_notifier_declares_the_queue_that_it_fills(
    shared_broker: Broker, rabbit_vhost: str, login
) -> None:
    """The Notifier of oslo.messaging makes exchange, queue and binding before it sends."""
    options = {"default": {"control_exchange": "gracekit"}}
    async with oslo_peer(login(NOTIFIER), **options) as peer:
        await peer.ask(
            "notify",
            topic="notifications",
            driver="messagingv2",
            publisher_id="disks.node-1",
            priority="info",
            ctxt={},
            event_type="disk.created",
            payload={"disk": "d1"},
        )

        def ready() -> int:
            return shared_broker.queues(rabbit_vhost)["notifications.info"].ready

        await asyncio.to_thread(wait_until, lambda: ready() == 1, "the notification")


@pytest.mark.parametrize("role", [CLIENT, OSLO_CLIENT])
async def test_a_client_sends_requests_to_its_service_alone(
    rabbit_url: str, login, role: str
) -> None:
    """Not to other services, and nothing into a queue as it pleases."""
    others = [shared_queue("nova"), reply_queue("reply_of_others")]
    async with transport_to(rabbit_url) as owner, transport_to(login(role)) as client:
        await owner.declare([*others, shared_queue("compute")])
        await client.publish(shared_queue("compute"), Message(body=b"{}"))
        for queue in others:
            with pytest.raises(GracekitError, match="refused"):
                await client.publish(queue, Message(body=b"{}"))


async def test_the_login_of_a_service_is_no_client_s_and_the_error_says_so(
    rabbit_url: str, login
) -> None:
    """It may neither send requests nor read answers: the remedy is the login of a client."""
    async with transport_to(rabbit_url) as owner:
        await owner.declare([shared_queue("compute")])
        async with RpcClient(login(SERVICE), "compute") as client:
            for send in (client.cast, client.prepare(timeout=20).call):
                with pytest.raises(ConfigError, match="use the login of a client"):
                    await send("double", n=1)


async def test_a_service_without_a_right_of_its_own_is_not_sent_to_a_client_s_login(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, rabbit_url: str, login
) -> None:
    """Refused is the queue by which its readers are counted, and then the exchange of its
    answers.
    """
    url, user = login(SERVICE), binary(f"{SERVICE}-{rabbit_vhost}")

    def permit(configure: str, write: str) -> None:
        rights = ", ".join(map(binary, (configure, write, ".*")))
        shared_broker.eval(
            f"ok = rabbit_auth_backend_internal:set_permissions({user}, {binary(rabbit_vhost)},"
            f" {rights}, {binary('tests')})"
        )

    settings = Settings(
        store_url=f"sqlite:///{tmp_path}/store.db", transport_url=url, host="node-1"
    )
    permit("^(?!compute_readers).*$", ".*")
    with pytest.raises(ConfigError, match="forbids queue 'compute_readers") as refused:
        async with Runtime(a_service([]), settings):
            pass
    permit(".*", "^gracekit$")
    async with transport_to(rabbit_url) as owner, transport_to(url) as service:
        await owner.declare([reply_queue("reply_1")])
        with pytest.raises(ConfigError, match="that of a service the permissions for answers"):
            await service.publish(reply_queue("reply_1"), Message(body=b"{}"))

    assert "a client" not in str(refused.value)
    assert "give the user configure, write and read on it" in str(refused.value)


@pytest.mark.parametrize("exchange", ["gracekit", "compute_fanout"])
async def test_a_client_deletes_no_exchange(rabbit_url: str, login, exchange: str) -> None:
    """All bindings of all services would go with it."""
    async with transport_to(rabbit_url) as owner:
        await owner.declare([shared_queue("compute"), fanout_queue("compute", "0" * 32)])
        connection = await aiormq.connect(login(CLIENT))
        try:
            channel = await connection.channel()
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await channel.exchange_delete(exchange)
        finally:
            await connection.close()


@pytest.mark.parametrize("header", ["CC", "BCC"])
async def test_a_copy_to_another_service_is_refused_by_it(
    tmp_path: Path,
    shared_broker: Broker,
    rabbit_vhost: str,
    rabbit_url: str,
    login,
    header: str,
) -> None:
    """RabbitMQ copies a message to each topic of a header and asks for no permission; the service
    that gets such a copy runs nothing, and keeps it aside.
    """
    seen = list[str]()
    settings = Settings(
        store_url=f"sqlite:///{tmp_path}/store.db",
        transport_url=rabbit_url,
        host="node-1",
    )
    own, other = shared_queue("compute"), ["volume", "volume-ops", "volume.node-1"]
    to_others = Basic.Properties(headers={header: other})
    async with transport_to(rabbit_url) as owner, Runtime(a_service(seen, "volume"), settings):
        await owner.declare([own])
        connection = await aiormq.connect(login(CLIENT))
        try:
            channel = await connection.channel()
            for request in (DOUBLE, PING):
                await channel.basic_publish(
                    request, exchange="gracekit", routing_key="compute", properties=to_others
                )
        finally:
            await connection.close()

        def kept() -> list[int]:
            queues = shared_broker.queues(rabbit_vhost)
            return [queues[name].ready for name in ("compute", "volume_dead", "volume-ops_dead")]

        await asyncio.to_thread(wait_until, lambda: kept() == [2, 4, 2], "all copies kept aside")
        async with transport_to(rabbit_url) as permitted:
            await permitted.publish(shared_queue("volume"), Message(body=DOUBLE))
            await asyncio.to_thread(wait_until, lambda: seen == ["double"], "a request of its own")


@pytest.mark.parametrize("key", ["#", "*", "volume", "volume-ops"])
async def test_a_service_gets_no_requests_of_others_by_a_binding(
    rabbit_url: str, login, key: str
) -> None:
    """Who reads the control exchange may bind to it: to the service's own topics alone."""
    async with transport_to(rabbit_url) as owner, transport_to(login(SERVICE)) as service:
        await owner.declare([shared_queue("volume")])
        await service.declare([shared_queue("compute"), directed_queue("compute", "node-1")])
        connection = await aiormq.connect(login(SERVICE))
        try:
            channel = await connection.channel()
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await channel.queue_bind("compute", "gracekit", routing_key=key)
        finally:
            await connection.close()


async def test_an_operator_sends_dead_letters_to_its_service_alone(rabbit_url: str, login) -> None:
    """The control exchange is that of all services."""
    async with transport_to(rabbit_url) as owner:
        await owner.declare([shared_queue("compute"), shared_queue("volume")])
        connection = await aiormq.connect(login(OPERATOR))
        try:
            channel = await connection.channel()
            await channel.basic_publish(b"{}", exchange="gracekit", routing_key="compute")
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await channel.basic_publish(b"{}", exchange="gracekit", routing_key="volume")
        finally:
            await connection.close()


async def test_an_operator_looks_at_dead_letters_as_the_page_shows(rabbit_url: str, login) -> None:
    """A look removes nothing; then one is removed by its id, and the others stay in their order."""
    names: dict[str, Any] = {"__name__": "look"}
    exec(Page("rabbitmq.md").files["look.py"], names)
    look = names["look"]
    queue = shared_queue("compute")
    async with transport_to(rabbit_url) as owner, aiormq.Connection(rabbit_url) as connection:
        channel = await connection.channel()
        await owner.declare([queue])
        assert await look(login(OPERATOR), "compute_dead") == []
        for body in (DOUBLE, b"no request", TWICE):
            await owner.publish(queue, Message(body=body))
            letter = await channel.basic_get(queue.name)
            await channel.basic_reject(letter.delivery_tag, requeue=False)

        first = await look(login(OPERATOR), "compute_dead")
        same = await look(login(OPERATOR), "compute_dead", remove="of another")
        odd = first[1].split()[0]
        removed = await look(login(OPERATOR), "compute_dead", remove=odd)
        left = await look(login(OPERATOR), "compute_dead")

    assert [line.partition(" 20")[0] for line in first] == [
        "a double {'n': 2} rejected in compute",
        f"{odd} ? b'no request' rejected in compute",
        "c double {'n': 4} rejected in compute",
    ]
    assert same == first
    assert removed == [first[0], f"{first[1]} REMOVED", first[2]]
    assert left == [first[0], first[2]]


async def test_the_same_program_shows_what_waits_for_a_host_that_is_gone(rabbit_url: str, login):
    """A request in the queue of a host has never died; the service may read it, and its operator
    not.
    """
    names: dict[str, Any] = {"__name__": "look"}
    exec(Page("rabbitmq.md").files["look.py"], names)
    queue = directed_queue("compute", "oldhost")
    async with transport_to(rabbit_url) as owner:
        await owner.declare([queue])
        await owner.publish(queue, Message(body=DOUBLE))

        assert await names["look"](login(SERVICE), queue.name) == ["a double {'n': 2}"]


def test_an_id_that_no_dead_letter_has_is_a_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prints what there is, and ends with 1."""
    text = Page("rabbitmq.md").files["look.py"]
    monkeypatch.setattr(sys, "argv", ["look.py", "amqp://", "compute_dead", "nothing"])
    monkeypatch.setattr(asyncio, "run", lambda coro: coro.close() or ["a double {'n': 2}"])

    with pytest.raises(SystemExit, match="no message has the id nothing"):
        exec(text, {"__name__": "__main__"})


def program_of_again(directory: Path, patch: pytest.MonkeyPatch) -> Any:
    """The page's `send_again`, with `look.py` beside it."""
    Page("rabbitmq.md").make_importable(directory, patch)
    for name in ("look", "again"):
        patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("again").send_again


async def test_an_operator_sends_one_dead_letter_again_and_none_that_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rabbit_url: str, login
) -> None:
    """The others stay, in their order; a call that has expired stays even if all are sent again."""
    send_again = program_of_again(tmp_path, monkeypatch)
    look = importlib.import_module("look").look
    queue = shared_queue("compute")
    async with transport_to(rabbit_url) as owner, aiormq.Connection(rabbit_url) as connection:
        channel = await connection.channel()
        await owner.declare([queue])
        await channel.basic_publish(
            DOUBLE,
            routing_key=queue.name,
            properties=Basic.Properties(expiration="0"),
        )
        while not await look(login(OPERATOR), "compute_dead"):
            pass  # the broker is about to move it
        for body in (PING, TWICE):
            await owner.publish(queue, Message(body=body))
            letter = await channel.basic_get(queue.name)
            await channel.basic_reject(letter.delivery_tag, requeue=False)

        none = await send_again(login(OPERATOR), "compute_dead", "unknown")
        one = await send_again(login(OPERATOR), "compute_dead", "c")
        left = await look(login(OPERATOR), "compute_dead")
        rest = await send_again(login(OPERATOR), "compute_dead")
        (expired,) = await look(login(OPERATOR), "compute_dead")

    assert (none, one, rest) == (0, 1, 1)
    assert [line.split()[0] for line in left] == ["a", "b"]
    assert expired.startswith("a double {'n': 2} expired in compute ")


@pytest.mark.parametrize("number", [0, 2])
async def test_an_operator_sends_dead_letters_again_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rabbit_url: str, login, number: int
) -> None:
    """Each to the queue from which it came, and a service then runs it."""
    send_again = program_of_again(tmp_path, monkeypatch)
    seen = list[str]()
    settings = Settings(
        store_url=f"sqlite:///{tmp_path}/store.db", transport_url=rabbit_url, host="node-1"
    )
    requests = {shared_queue("compute"): DOUBLE, directed_queue("compute", "node-1"): TWICE}
    async with transport_to(rabbit_url) as owner, aiormq.Connection(rabbit_url) as connection:
        channel = await connection.channel()
        await owner.declare([*requests, shared_queue("compute-ops")])
        for queue, body in [*requests.items()][:number]:
            await owner.publish(queue, Message(body=body))
            letter = await channel.basic_get(queue.name)
            await channel.basic_reject(letter.delivery_tag, requeue=False)

        assert await send_again(login(OPERATOR), "compute_dead") == number
        assert await send_again(login(OPERATOR), "compute_dead") == 0
        async with Runtime(a_service(seen), settings):
            await asyncio.to_thread(wait_until, lambda: len(seen) == number, "those sent again")


async def test_an_operator_of_dead_letters_reads_no_requests(rabbit_url: str, login) -> None:
    """The dead letters are all that this role may take."""
    async with transport_to(rabbit_url) as owner:
        await owner.declare([shared_queue("compute")])
        connection = await aiormq.connect(login(OPERATOR))
        try:
            channel = await connection.channel()
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await channel.basic_get("compute")
        finally:
            await connection.close()
