"""What the private node promises to the tests that use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import AMQPConnectionError, ChannelNotFoundEntity
from aiormq.exceptions import ChannelPreconditionFailed

from tests.process.helpers import ROOT, until
from tests.rabbit.broker import Broker
from tests.rabbit.certificates import Certificates
from tests.rabbit.erlang import find_server
from tests.rabbit.machine import HOST, Child, free_ports, process, reserve, see_off
from tests.scale import scale

pytestmark = pytest.mark.process

PATIENCE_S = 300.0  # for what must happen; never waited for in full
QUORUM = {"x-queue-type": "quorum"}


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[AbstractConnection]:
    connection = await aio_pika.connect(url, timeout=PATIENCE_S)
    try:
        yield connection
    finally:
        if not connection.is_closed:
            with contextlib.suppress(AMQPConnectionError):
                await connection.close()


def ending(
    of: AbstractConnection | AbstractChannel,
) -> asyncio.Future[BaseException | None]:
    """Done with the reason when it closes; `closed()` does not see what the node closes."""
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def end(_: object, reason: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(reason)

    of.close_callbacks.add(end)
    return ended


async def ignore(message: AbstractIncomingMessage) -> None:
    """Neither ack nor reject."""


async def publish(channel: AbstractChannel, queue: str, count: int = 1) -> None:
    """Persistent and confirmed."""
    message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    for _ in range(count):
        await channel.default_exchange.publish(message, queue)


def listeners(pid: int) -> set[str]:
    """Addresses that a process listens on, as the kernel writes them."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(descriptor.readlink()))
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    peerless = {row[1] for row in rows if int(row[2].partition(":")[0], 16) == 0 and
                f"socket:[{row[9]}]" in sockets}  # fmt: skip
    return {local.partition(":")[0] for local in peerless}


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1


def test_nothing_listens_but_on_loopback(own_broker: Broker):
    """Neither the node, with AMQP, TLS and distribution, nor its epmd or children can be reached
    from another machine.
    """
    found = {pid: listeners(pid) for pid in own_broker.pids}

    assert found[own_broker.pid] == {"0100007F"}
    assert set().union(*found.values()) <= LOOPBACK
    assert sum(bool(addresses) for addresses in found.values()) == 2


def test_its_ports_are_none_that_the_system_hands_out():
    """A client that calls a dead port of that range again and again comes to answer itself."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert not [port for port in ports if low <= port <= high]


def test_a_port_is_chosen_once_though_nobody_listens_there_yet():
    """Two nodes that start at the same time in two processes do not get the same one."""
    (port,) = free_ports(1)
    script = f"from tests.rabbit.machine import reserve; print(reserve({port}))"

    here = reserve(port)
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert (here, there.stdout) == (False, b"False\n")


def test_a_closed_node_leaves_no_process_and_no_port(tmp_path: Path):
    """Its epmd, its helpers and its guard go with it."""
    broker = Broker(tmp_path)
    broker.start()
    started = [process(pid) for pid in broker.pids]
    assert all(child.lives for child in started)
    assert len(started) >= 6

    broker.close()

    assert not [child for child in started if child.lives]
    assert not broker.running
    broker.close()


async def test_a_test_run_that_is_killed_leaves_no_node(tmp_path: Path):
    """Not even one that is frozen."""
    program = (
        "import sys; from pathlib import Path; from tests.rabbit.broker import Broker;"
        "broker = Broker(Path(sys.argv[1])); broker.launch(); broker.freeze();"
        "print(*broker.pids, flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with run:
        assert run.stdout is not None
        found = [process(int(pid)) for pid in run.stdout.readline().split()]
        started = [child for child in found if child.lives]  # the start script has short ones
        assert len(started) >= 4

        run.kill()

    try:
        await until(lambda: not [child for child in started if child.lives], "all of it gone")
    finally:
        see_off(started)


def test_it_is_the_program_itself_and_not_a_script_for_root():
    """Debian's own start script refuses to serve a developer."""
    assert find_server().name == "rabbitmq-server"
    assert find_server() != Path("/usr/sbin/rabbitmq-server")


# -- looking --------------------------------------------------------------------


def test_erlang_is_evaluated_in_the_node(shared_broker: Broker):
    """Values come back as Erlang writes them, letters of all kinds included."""
    assert shared_broker.eval("{1 + 1, node()}") == "{2,rabbit@localhost}"
    assert shared_broker.eval('<<"grün"/utf8>>') == '<<"grün"/utf8>>'
    assert shared_broker.eval("A = 1, B = 2, A + B") == "3"
    assert shared_broker.eval('"ok, ok}"') == '"ok, ok}"'


@pytest.mark.parametrize("wrong", ["1 / 0", "throw(x)", "exit(x)", "no(", "no:such()"])
def test_an_error_in_erlang_is_an_error_here(shared_broker: Broker, wrong: str):
    """A fault that was not brought about would make a test pass."""
    with pytest.raises(RuntimeError, match=r"error|throw|exit"):
        shared_broker.eval(wrong)


async def test_queues_are_counted_exactly(
    shared_broker: Broker, rabbit_url: str, rabbit_vhost: str
):
    """At once after a confirm or a delivery, on classic queues and on quorum queues; who gets a
    message without consuming is no consumer.
    """
    deliveries: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with connected(rabbit_url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=2)
        await channel.declare_queue("lost", durable=False)
        for name, arguments in (("classic", {"x-max-length": 9}), ("quorum", QUORUM)):
            queue = await channel.declare_queue(name, durable=True, arguments=arguments)
            await publish(channel, name, 6)
            assert await queue.get(no_ack=False)
            tag = await queue.consume(deliveries.put)
            for _ in range(2):
                await deliveries.get()

            found = shared_broker.queues(rabbit_vhost)[name]

            assert (found.ready, found.unacked, found.consumers) == (3, 3, 1)
            assert (found.durable, found.type, found.arguments) == (True, name, arguments)
            await queue.cancel(tag)
            assert shared_broker.queues(rabbit_vhost)[name].consumers == 0
        assert set(shared_broker.queues(rabbit_vhost)) == {"lost", "classic", "quorum"}
        assert not shared_broker.queues(rabbit_vhost)["lost"].durable


async def test_a_look_at_messages_takes_none_and_marks_none(
    shared_broker: Broker, rabbit_url: str, rabbit_vhost: str
):
    """Those that a client holds are seen too, and who gets one after the look is its first
    reader.
    """
    async with connected(rabbit_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True)
        await channel.declare_queue("empty")
        for body in (b"held", b"\x00\xff", b"large" * 10_000):
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "q")
        held = await queue.get(no_ack=False)

        found = shared_broker.bodies(rabbit_vhost)

        assert found["q"] == [b"held", b"\x00\xff", b"large" * 10_000]
        assert found["empty"] == []
        await held.ack()
        assert not (await queue.get()).redelivered
        assert shared_broker.queues(rabbit_vhost)["q"].ready == 1


async def test_a_virtual_host_is_fresh_and_knows_no_other(shared_broker: Broker):
    """So many tests can live on one node; what is deleted takes its connections with it."""
    one, other = shared_broker.fresh_vhost(), shared_broker.fresh_vhost()
    async with (
        connected(shared_broker.url_of(one)) as here,
        connected(shared_broker.url_of(other)) as there,
    ):
        await (await here.channel()).declare_queue("q", durable=True)
        assert set(shared_broker.queues(one)) == {"q"}
        assert not shared_broker.queues(other)
        ended = ending(here)

        shared_broker.delete_vhost(one)

        async with asyncio.timeout(PATIENCE_S):
            await ended
        await (await there.channel()).declare_queue("q")
        shared_broker.delete_vhost(other)


async def test_its_url_is_that_of_the_default_virtual_host(shared_broker: Broker):
    """A queue that a client declares there is found there."""
    async with connected(shared_broker.url) as connection:
        await (await connection.channel()).declare_queue("here", exclusive=True)

        assert "here" in shared_broker.queues()


# -- faults ---------------------------------------------------------------------


async def test_a_killed_node_comes_back_with_what_it_confirmed(own_broker: Broker, own_vhost: str):
    """On the same port, with every message of durable queues, young quorum queues included once
    they have settled; what was not durable is gone.
    """
    async with connected(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        await channel.declare_queue("transient")
        await channel.declare_queue("classic", durable=True)
        await channel.declare_queue("quorum", durable=True, arguments=QUORUM)
        await publish(channel, "classic", 20)
        await publish(channel, "quorum", 20)
        own_broker.settle()
        dead, port = process(own_broker.pid), own_broker.port
        ended = ending(connection)

        own_broker.kill()

        assert not dead.lives
        async with asyncio.timeout(PATIENCE_S):
            assert "CONNECTION_FORCED" not in str(await ended)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    await asyncio.to_thread(own_broker.start)
    assert own_broker.port == port
    found = own_broker.queues(own_vhost)
    assert {name: queue.ready for name, queue in found.items()} == {"classic": 20, "quorum": 20}


async def test_a_node_that_restarts_gently_tells_its_clients(own_broker: Broker, own_vhost: str):
    """The process stays, and so does what is durable."""
    async with connected(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        await publish(channel, "q")
        pid, ended = own_broker.pid, ending(connection)

        await asyncio.to_thread(own_broker.restart_gently)

        assert own_broker.pid == pid
        assert own_broker.queues(own_vhost)["q"].ready == 1
        async with asyncio.timeout(PATIENCE_S):
            assert "CONNECTION_FORCED" in str(await ended)


@pytest.mark.skipif(scale(True, False), reason="two more starts: in a soak only")
async def test_a_stopped_node_says_goodbye(own_broker: Broker):
    """As when a system stops it: its clients are told, and the process is gone."""
    stopped = process(own_broker.pid)
    async with connected(own_broker.url) as connection:
        ended = ending(connection)

        await asyncio.to_thread(own_broker.stop)

        assert not stopped.lives
        assert not own_broker.running
        async with asyncio.timeout(PATIENCE_S):
            assert "CONNECTION_FORCED" in str(await ended)


async def test_a_frozen_node_answers_when_it_is_thawed(own_broker: Broker, own_vhost: str):
    """Its connections stay open meanwhile, which is what makes a freeze hard to notice."""
    async with connected(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        own_broker.freeze()
        assert process(own_broker.pid).state == "T"
        asked = asyncio.ensure_future(channel.declare_queue("q"))
        reader, writer = await asyncio.open_connection(HOST, own_broker.port)  # by the kernel
        writer.close()
        await writer.wait_closed()
        assert not asked.done()

        own_broker.thaw()

        async with asyncio.timeout(PATIENCE_S):
            await asked
        assert not await reader.read()


async def test_an_alarm_blocks_who_publishes(own_broker: Broker, own_vhost: str):
    """Until it is cleared; then what was written goes through."""
    states = "[State || [{state, State}] <- rabbit_networking:connection_info_all([state])]"
    async with connected(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        own_broker.set_alarm()
        asked = asyncio.ensure_future(publish(channel, "q"))
        await until(lambda: own_broker.eval(states) == "[blocked]", "the connection blocked")
        assert not asked.done()
        assert own_broker.queues(own_vhost)["q"].ready == 0

        own_broker.clear_alarm()

        async with asyncio.timeout(PATIENCE_S):
            await asked
        assert own_broker.queues(own_vhost)["q"].ready == 1


async def test_a_healed_node_has_neither_alarm_nor_virtual_hosts(
    own_broker: Broker, own_vhost: str
):
    """So one node serves all tests that maltreat theirs, one after the other."""
    own_broker.set_alarm()
    own_broker.freeze()

    own_broker.heal()

    assert own_broker.eval("rabbit_alarm:get_alarms()") == "[]"
    assert own_broker.eval("rabbit_vhost:list_names()") == '[<<"/">>]'
    assert process(own_broker.pid).state != "T"


async def test_a_node_that_died_by_itself_is_healed_too(own_broker: Broker):
    """A test may kill it by other ways than ours."""
    dead = own_broker.pid
    os.kill(dead, signal.SIGKILL)

    await asyncio.to_thread(own_broker.heal)

    assert own_broker.running
    assert own_broker.pid != dead


async def test_all_connections_are_closed_with_a_reason(own_broker: Broker, own_vhost: str):
    """As by an operator."""
    async with connected(own_broker.url_of(own_vhost)) as connection:
        ended = ending(connection)

        own_broker.close_all_connections("for a test")

        async with asyncio.timeout(PATIENCE_S):
            assert "for a test" in str(await ended)
        await until(lambda: own_broker.connections() == 0, "no connection")


async def test_a_deleted_queue_is_gone_with_its_messages(
    shared_broker: Broker, rabbit_url: str, rabbit_vhost: str
):
    """Whoever consumes from it."""
    async with connected(rabbit_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True)
        await queue.consume(ignore)
        await publish(channel, "q")

        shared_broker.delete_queue("q", rabbit_vhost)

        assert not shared_broker.queues(rabbit_vhost)
        with pytest.raises(ChannelNotFoundEntity):
            await channel.declare_queue("q", passive=True)


async def test_a_delivery_held_for_too_long_closes_its_channel(own_broker: Broker, own_vhost: str):
    """Within seconds rather than half an hour, and the message is ready again."""
    own_broker.consumer_timeout(500)
    async with connected(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True)
        await publish(channel, "q")
        ended = ending(channel)

        await queue.consume(ignore)

        async with asyncio.timeout(PATIENCE_S):
            error = await ended
        assert isinstance(error, ChannelPreconditionFailed)
        assert "timeout" in str(error)
        await until(lambda: own_broker.queues(own_vhost)["q"].ready == 1, "the message ready")


# -- TLS ------------------------------------------------------------------------


async def secured(broker: Broker, certificates: Certificates, host: str = "localhost") -> None:
    """Connect as one who trusts the authority of the tests."""
    context = ssl.create_default_context(cafile=certificates.ca)
    url = broker.tls_url_of("", host=host)
    await (await aio_pika.connect(url, ssl_context=context)).close()


@pytest.mark.parametrize("host", ["localhost", HOST])
async def test_a_good_certificate_is_trusted(
    own_broker: Broker, certificates: Certificates, host: str
):
    """By name and by address."""
    await secured(own_broker, certificates, host)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("wrong_host", "Hostname mismatch"),
        ("expired", "certificate has expired"),
        ("stranger", "unable to get local issuer certificate"),
    ],
)
async def test_each_bad_certificate_is_bad_in_its_way_alone(
    own_broker: Broker, certificates: Certificates, bad: str, why: str
):
    """A test that expects a refusal must not get it for another reason."""
    own_broker.show(getattr(certificates, bad))

    with pytest.raises(AMQPConnectionError, match=why):
        await secured(own_broker, certificates)

    own_broker.show(certificates.good)
    await secured(own_broker, certificates)


def test_a_child_is_known_by_more_than_its_number():
    """Numbers are given out again; only what was started here is killed."""
    me = process(os.getpid())

    assert me.lives
    assert not Child(me.pid, started="1").lives
