"""A broker in trouble while requests pass: nothing lost, nothing stuck, nothing started twice."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Message, shared_queue
from tests.process import served
from tests.process.helpers import ServiceProcess, until
from tests.process.judge import check_fences, rows
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy
from tests.rabbit.site import RabbitSite, gracekit
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 1800))]

CASTERS = 2
HOW_MANY = scale(300, 2000)
PER_SECOND = 15.0  # of each caster: together about what the service can do
CONSUMING_AGAIN_S = 10.0
HARD_LIMIT_S = 10.0  # of drains of 3 s, on a busy machine
IN_SILENCE_S = 2.0  # beside the one wait for an answer that does not come


@pytest.fixture
def proxy(own_broker: Broker) -> Iterator[Proxy]:
    with Proxy(own_broker.port) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, own_broker: Broker, own_vhost: str, proxy: Proxy) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, own_broker, own_vhost, port=proxy.port)
    yield made
    made.close()


Trouble = Callable[[RabbitSite, Proxy], Awaitable[None]]


async def cuts(site: RabbitSite, proxy: Proxy) -> None:
    """Connections break in the middle of a frame, again and again."""
    proxy.cut_at_random(1, most=5_000)
    proxy.cut()
    await asyncio.sleep(scale(10, 60))
    proxy.heal()


async def kill(site: RabbitSite, proxy: Proxy) -> None:
    await asyncio.to_thread(site.broker.kill)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(site.broker.start)


async def freeze(site: RabbitSite, proxy: Proxy) -> None:
    site.broker.freeze()
    await asyncio.sleep(20)
    site.broker.thaw()


async def close_all(site: RabbitSite, proxy: Proxy) -> None:
    for _ in range(3):
        await asyncio.to_thread(site.broker.close_all_connections)
        await asyncio.sleep(1)


async def cut_at_once(site: RabbitSite, proxy: Proxy) -> None:
    for _ in range(3):
        proxy.cut()
        await asyncio.sleep(1)


@pytest.mark.parametrize(
    "trouble", [cuts, kill, freeze, close_all, cut_at_once], ids=lambda one: one.__name__
)
async def test_trouble_with_the_broker_loses_nothing(
    site: RabbitSite, proxy: Proxy, trouble: Trouble
) -> None:
    """Each confirmed cast ends on record; as the service itself lives on, none is started twice,
    and it reads again within ten seconds of the trouble's end.
    """
    service = await site.start().serving()
    names = [f"client{n}" for n in range(CASTERS)]
    casters = [site.caster(name, HOW_MANY // CASTERS, per_second=PER_SECOND) for name in names]
    # A client that has not connected yet ends when it finds no broker.
    await until(lambda: all(site.confirmed(name) for name in names), "all clients connected")
    await site.effect("done", times=20)

    await trouble(site, proxy)
    ended = time.monotonic()
    await answers(site)
    again_s = time.monotonic() - ended
    await until(lambda: all(c.poll() is not None for c in casters), "the clients", 120)
    ids = {one for name in names for one in site.confirmed(name)}
    await until(lambda: len(rows(site)) >= len(ids) and not site.transient(), "the end", 120)
    # A cast whose confirm was lost is sent again, and its copy may come last.
    await until(lambda: site.queued() == 0, "empty queues", 120)
    code = await service.stop()

    report = f"{trouble.__name__}: {len(ids)} confirmed, read again in {again_s:.1f} s; "
    print(f"\n{report}{told(service)}")  # noqa: T201 - for `pytest -s`
    assert [caster.returncode for caster in casters] == [0] * CASTERS
    assert code == 0, service.log[-3000:]
    assert len(ids) == HOW_MANY
    assert again_s < CONSUMING_AGAIN_S
    check(site, ids)


async def answers(site: RabbitSite) -> None:
    """Wait until the service answers a call and an ops call, asked as anybody would."""
    async with served.svc.client(site.broker.url_of(site.vhost)) as client:
        view = client.prepare(timeout=60, request_id="asked")
        await asyncio.gather(view.call("slow", key="asked", s=0), client.call(served.ping))


def check(site: RabbitSite, ids: set[str]) -> None:
    found = rows(site)
    assert ids <= found.keys(), "each confirmed cast has a row"
    assert {row["state"] for row in found.values()} == {"succeeded"}
    assert site.queued() == 0
    started = Counter(effect.key for effect in site.seen("start"))
    assert max(started.values()) == 1
    assert not site.rows("SELECT * FROM lease WHERE owner IS NOT NULL")
    check_fences(site)


def told(service: ServiceProcess) -> str:
    """What its log counts, by event."""
    words = ("broker.lost", "broker.connected", "consumer.lost", "consumer.resumed")
    return ", ".join(f"{service.log.count(word)} {word}" for word in words)


# -- one thing at a time ------------------------------------------------------------------


async def test_a_deleted_queue_is_made_again_and_read(site: RabbitSite) -> None:
    """Who deletes a queue loses what stood in it, ready or read and not accepted yet, and nothing
    that was accepted or comes later.
    """
    service = await site.start().serving()
    caster = site.caster("client", scale(100, 1000), per_second=PER_SECOND)
    await site.effect("done", times=20)

    lost, meanwhile = 0, set[str]()
    for queue in ("shop", "shop-ops", "shop.node-a"):
        earlier = set(site.confirmed("client"))
        lost += (await asyncio.to_thread(site.broker.queues, site.vhost))[queue].unacked
        # Not counted before: more may have come until it is deleted.
        lost += await asyncio.to_thread(site.broker.delete_queue, queue, site.vhost)
        await asyncio.sleep(0.5)
        if queue == "shop":  # read since the look, and not accepted when it was deleted
            meanwhile = set(site.confirmed("client")) - earlier
    await answers(site)
    await until(lambda: caster.poll() is not None, "the client", 120)
    ids = set(site.confirmed("client"))
    least = len(ids - meanwhile) - lost
    await until(lambda: len(rows(site)) >= least and not site.transient(), "the end", 60)

    assert await service.stop() == 0
    assert len(ids - meanwhile - rows(site).keys()) <= lost
    assert service.log.count("consumer.resumed") >= 2


async def test_a_drain_ends_in_time_while_the_broker_is_out_of_memory(site: RabbitSite) -> None:
    """Acks and cancels do not go by the connection that the broker blocks; a reply that cannot be
    sent is sent by the next start.
    """
    service = await site.start(drain_timeout="3s").serving()
    async with served.svc.client(site.broker.url_of(site.vhost)) as client:
        call = asyncio.create_task(
            client.prepare(request_id="k").call(served.through_drain, key="k", s=0.5)
        )
        await site.effect("start", "k")
        await asyncio.to_thread(site.broker.set_alarm)
        began = time.monotonic()
        service.terminate()
        code = await service.exit_code()
        took_s = time.monotonic() - began
        held = site.broker.queues(site.vhost)["shop"]
        await asyncio.to_thread(site.broker.clear_alarm)
        again = await site.start().serving()
        answer = await asyncio.wait_for(call, 30)
        await again.stop()

    assert (code, site.state("k")) == (0, "succeeded")
    assert took_s < HARD_LIMIT_S
    assert (held.ready, held.unacked, held.consumers) == (0, 0, 0)
    assert answer == "k"
    assert len(site.seen("start", "k")) == 1


async def test_a_drain_ends_in_time_while_the_broker_is_frozen(site: RabbitSite) -> None:
    """Nothing that the broker is asked is waited for beyond its bound, and what ran is on
    record.
    """
    service = await site.start(drain_timeout="2s", cancel_ok_timeout="1s").serving()
    async with served.svc.client(site.url) as client:
        for n in range(3):
            await client.prepare(request_id=f"k{n}").cast("slow", key=f"k{n}", s=0.5 if n else 60)
        await site.effect("start", times=3)
        site.broker.freeze()
        began = time.monotonic()
        service.terminate()
        code = await service.exit_code()
        took_s = time.monotonic() - began
        site.broker.thaw()

    assert code == 75
    assert took_s < HARD_LIMIT_S
    assert [site.state(f"k{n}") for n in range(3)] == ["handed_over", "succeeded", "succeeded"]


async def test_a_drain_does_not_wait_for_a_resume_that_waits_for_the_broker(
    site: RabbitSite,
) -> None:
    """The broker is frozen, so the intake cannot be opened; what runs has all of the drain's
    time.
    """
    service = await site.start(drain_timeout="5s", cancel_ok_timeout="1s").serving()
    async with served.svc.client(site.url) as client:
        await client.prepare(request_id="k").cast("slow", key="k", s=60)
        await site.effect("start", "k")
        await asyncio.to_thread(gracekit, site, "drain", "--timeout", "5s", "--no-wait")
        await service.wait_log("intake.closed")
        site.broker.freeze()
        await asyncio.to_thread(gracekit, site, "resume")
        began = time.monotonic()
        service.terminate()
        await service.wait_log("drain.started", times=2)
        begun_s = time.monotonic() - began
        code = await service.exit_code()
        took_s = time.monotonic() - began
        site.broker.thaw()

    assert code == 75
    assert begun_s < 1, service.log[-3000:]
    assert took_s < HARD_LIMIT_S
    assert site.state("k") == "handed_over"


async def stop_in_silence(service: ServiceProcess) -> tuple[int, float]:
    """Stop a service whose broker is silent; its exit code, and how long it took, in seconds."""
    began = time.monotonic()
    service.terminate()
    code = await service.exit_code(60)
    return code, time.monotonic() - began


@pytest.mark.parametrize("how", ["swallowed", "frozen"])
async def test_a_silent_broker_costs_an_idle_service_one_wait(
    site: RabbitSite, proxy: Proxy, how: str
) -> None:
    """When the first question of a drain has not been answered in time, no other is waited for; the
    log says what the drain waits for.
    """
    service = await site.start(drain_timeout="25s", cancel_ok_timeout="5s").serving()
    await answers(site)
    if how == "frozen":
        site.broker.freeze()
    else:
        proxy.swallow()
    code, took_s = await stop_in_silence(service)
    if how == "frozen":
        site.broker.thaw()

    assert code == 0
    assert took_s < 5 + IN_SILENCE_S, service.log[-3000:]
    assert 'drain.waiting step="close of the new-request intake"' in service.log
    assert service.log.count("broker.silent") == 1


async def test_a_silent_broker_leaves_a_short_drain_time_for_its_record(
    site: RabbitSite, proxy: Proxy
) -> None:
    """Its stop is on record long before the kernel's alarm, by which it would count as killed."""
    service = await site.start(drain_timeout="5s").serving()
    await answers(site)
    proxy.swallow()
    code, _ = await stop_in_silence(service)

    assert code == 0
    (waited_s,) = re.findall(r"drain.finished waited_s=([\d.]+)", service.log)
    assert float(waited_s) < 5 + IN_SILENCE_S, service.log[-3000:]


async def test_a_task_may_outlast_the_consumer_timeout(site: RabbitSite) -> None:
    """A journaled request is acked when it is accepted, so the broker waits for nothing; a
    `requeue` one loses its channel, comes again, and is journaled then: it is started once more at
    most.
    """
    await asyncio.to_thread(site.broker.consumer_timeout, 1500)
    service = await site.start().serving()
    async with served.svc.client(site.url) as client:
        await client.prepare(request_id="journaled").cast("slow", key="journaled", s=6)
        await client.prepare(request_id="held").cast("fetched", key="held")
        await site.effect("done", "journaled")
        await answers(site)
        site.go()
        await site.effect("done", "held")
        await until(lambda: site.queued() == 0, "an empty queue")
    code = await service.stop()

    assert code == 0
    assert len(site.seen("start", "journaled")) == 1
    assert len(site.seen("start", "held")) <= 2
    assert service.log.count("consumer.lost") >= 1


@pytest.mark.parametrize("how", ["swallowed", "killed"])
async def test_a_requeue_task_whose_ack_was_lost_does_not_run_again_in_its_process(
    site: RabbitSite, proxy: Proxy, how: str
) -> None:
    """Its end is remembered while the process lives: the redelivery is acked, counted, and not
    run.
    """
    service = await site.start().serving()
    async with served.svc.client(site.broker.url_of(site.vhost)) as client:
        for n in range(3):
            await client.prepare(request_id=f"k{n}").cast("fetched", key=f"k{n}")
        await site.effect("start", times=3)
    if how == "killed":
        await asyncio.to_thread(site.broker.kill)
        site.go()
        await site.effect("done", times=3)
        await asyncio.to_thread(site.broker.start)
    else:
        proxy.swallow()
        site.go()
        await site.effect("done", times=3)
        await until(lambda: proxy.counts.swallowed, "acks that nobody reads")
        proxy.heal()
    await until(lambda: site.queued() == 0, "an empty queue", 60)
    code = await service.stop()

    assert code == 0
    assert Counter(effect.key for effect in site.seen("start")) == {"k0": 1, "k1": 1, "k2": 1}
    (duplicates,) = site.rows("SELECT n FROM tally WHERE what = 'duplicate'")
    assert duplicates["n"] == 3


async def test_a_reply_queue_that_is_gone_does_not_hold_a_drain(site: RabbitSite) -> None:
    """The drain ends in time; the replies of callers that left are tried again by the next start,
    then given up and counted.
    """
    service = await site.start().serving()
    async with served.svc.client(site.url) as client:
        calls = [
            asyncio.create_task(client.call(served.through_drain, key=f"k{n}", s=0.2))
            for n in range(20)
        ]
        await site.effect("start", times=20)
        for call in calls:
            call.cancel()
    began = time.monotonic()
    service.terminate()
    code = await service.exit_code()

    took_s = time.monotonic() - began
    again = await site.start().serving()
    await until(lambda: not site.rows("SELECT * FROM reply WHERE due_at"), "no reply due")
    await again.stop()

    assert code == 0
    assert took_s < HARD_LIMIT_S
    assert service.log.count("reply.given_up") + again.log.count("reply.given_up") == 20
    assert not site.transient()


async def test_a_connection_that_is_lost_in_a_drain_brings_ops_back_and_no_intake(
    site: RabbitSite, proxy: Proxy
) -> None:
    """The handler goes on, ops is answered again, and new requests stay in the queue for others."""
    service = await site.start(drain_timeout="20s").serving()
    async with served.svc.client(site.broker.url_of(site.vhost)) as client:
        await client.prepare(request_id="k").cast("through_drain", key="k", s=4)
        await site.effect("start", "k")
        service.terminate()
        await service.wait_log("intake.closed")
        proxy.cut()
        await service.wait_log("consumer.resumed queue=shop-ops")
        pong = await client.prepare(timeout=3).call(served.ping)
        await client.prepare(request_id="late").cast("slow", key="late", s=0)
        queues = site.broker.queues(site.vhost)
        code = await service.exit_code()

    assert pong == service.pid
    assert (queues["shop"].ready, queues["shop"].consumers) == (1, 0)
    assert (code, site.state("k"), site.state("late")) == (0, "succeeded", None)
    assert len(site.seen("start", "k")) == 1


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        (
            "amqp://tests:mistaken@127.0.0.1:{port}/",
            78,
            "refused the login; check user and password",
        ),
        ("amqp://127.0.0.1:{port}/", 78, "refused the login guest, which a URL without a login"),
        ("{url}nowhere", 78, "refused vhost 'nowhere'"),
        ("amqp://tests:secret@127.0.0.1:1/", 69, "broker 127.0.0.1:1 cannot be reached"),
        ("amqps://tests:secret@127.0.0.1:{port}/", 78, "does not speak TLS as we do"),
    ],
)
async def test_a_start_that_the_broker_refuses_says_why(
    site: RabbitSite, url: str, code: int, said: str
) -> None:
    """What only the operator can mend is a matter of configuration; a broker that is down is
    none.
    """
    transport = url.format(port=site.broker.port, url=site.broker.url)
    service = site.start_cli(transport_url=transport)

    assert await service.exit_code() == code, service.log
    assert said in service.log
    for secret in ("mistaken", "secret", site.broker.password):
        assert secret not in service.log


async def test_a_full_dead_letter_queue_holds_nobody_up(site: RabbitSite) -> None:
    """What cannot be read is on record and leaves the queue, though the broker finds no place to
    keep it; good requests go on, and the drain ends in time.
    """
    await asyncio.to_thread(
        site.broker.eval,
        f'rabbit_policy:set(<<"{site.vhost}">>, <<"full">>, <<"^shop_dead$">>, '
        '[{<<"max-length">>, 1}, {<<"overflow">>, <<"reject-publish">>}], 0, <<"queues">>, '
        '<<"tests">>)',
    )
    service = await site.start().serving()
    transport = open_transport(site.url, process=Process(), clock=Clock())
    await transport.start()
    for n in range(10):
        await transport.publish(shared_queue("shop"), Message(body=b"unreadable %d" % n))
    await transport.stop()
    async with served.svc.client(site.url) as client:
        await client.prepare(timeout=20).call("slow", key="k", s=0)
    await until(lambda: len(rows(site)) == 11, "all on record")
    began = time.monotonic()
    code = await service.stop()

    assert code == 0
    assert time.monotonic() - began < HARD_LIMIT_S
    assert Counter(row["state"] for row in rows(site).values()) == {"rejected": 10, "succeeded": 1}
    queues = site.broker.queues(site.vhost)
    assert (queues["shop"].ready, queues["shop"].unacked) == (0, 0)
    assert queues["shop_dead"].ready <= 2
    assert service.log.count("task.rejected") == 10


async def test_a_reply_waits_for_a_broker_that_is_away(site: RabbitSite) -> None:
    """A caller that still waits gets its answer when the broker is back, and not only after a
    restart.
    """
    service = await site.start().serving()
    async with served.svc.client(site.broker.url_of(site.vhost)) as client:
        call = asyncio.create_task(client.prepare(request_id="k").call("slow", key="k", s=1))
        await site.effect("start", "k")
        await asyncio.to_thread(site.broker.kill)
        await site.effect("done", "k")
        await asyncio.sleep(7)  # longer than one try
        await asyncio.to_thread(site.broker.start)
        answer = await asyncio.wait_for(call, 40)
        # Without the confirm, the service sends the answer again, and the caller would be gone.
        await until(lambda: not site.rows("SELECT 1 FROM reply"), "the confirm of the reply")
    code = await service.stop()

    assert (answer, code) == ("k", 0)
    assert "reply.given_up" not in service.log
    assert len(site.seen("start", "k")) == 1
