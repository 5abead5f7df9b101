"""What a broker says when it lets nobody in, and whether time can mend it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, UnconfirmedError, Undeliverable
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import (
    Message,
    Queue,
    Transport,
    fanout_queue,
    reply_queue,
    shared_queue,
)
from gracekit.telemetry.telemetry import Telemetry
from tests.rabbit.broker import USER, Broker
from tests.rabbit.erlang import binary

_CONNECTIONS = '<<"max-connections">>'


@pytest.fixture
def closed(own_broker: Broker, own_vhost: str) -> Iterator[Callable[[str], None]]:
    """Closes a virtual host in one of the ways that time can mend, or in one that it cannot."""
    user, vhost = binary(USER), binary(own_vhost)
    ways = {
        "vhost limit": f"rabbit_vhost_limit:set({vhost}, [{{{_CONNECTIONS}, 0}}], {user})",
        "user limit": (
            "rabbit_auth_backend_internal:"
            f"set_user_limits({user}, #{{{_CONNECTIONS} => 0}}, {user})"
        ),
        "down": f"rabbit_vhost_sup_sup:delete_on_all_nodes({vhost})",
        "no permission": f"rabbit_auth_backend_internal:clear_permissions({user}, {vhost}, {user})",
        "missing": f"rabbit_vhost:delete({vhost}, {user})",
    }
    yield lambda way: own_broker.eval(ways[way]) and None
    own_broker.eval(f'rabbit_auth_backend_internal:clear_user_limits({user}, <<"all">>, {user})')


async def start(url: str) -> None:
    transport = open_transport(url, process=Process(), clock=Clock())
    try:
        await transport.start()
    finally:
        await transport.stop()


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("vhost limit", r": connection limit \(0\) is reached"),
        ("user limit", r"user connection limit \(0\) is reached"),
        ("down", "vhost 'test-[0-9]+' is down"),
    ],
)
async def test_a_vhost_that_takes_nobody_now_is_a_matter_of_time(
    own_broker: Broker, own_vhost: str, closed, way: str, said: str
) -> None:
    """A limit falls and a vhost starts: whoever supervises us must try again. The broker's own
    words say which it is, and name no user.
    """
    closed(way)

    with pytest.raises(DependencyError, match=said) as refused:
        await start(own_broker.url_of(own_vhost))

    assert f"accepts no connection to vhost '{own_vhost}' now" in str(refused.value)
    assert USER not in str(refused.value)


async def test_a_limit_of_queues_is_no_matter_of_their_flags(
    own_broker: Broker, own_vhost: str
) -> None:
    """RabbitMQ refuses with the code of other flags; a limit is raised or falls, so time mends
    it.
    """
    own_broker.eval(
        f'rabbit_vhost_limit:set({binary(own_vhost)}, [{{<<"max-queues">>, 0}}], {binary(USER)})'
    )
    transport = open_transport(own_broker.url_of(own_vhost), process=Process(), clock=Clock())
    await transport.start()
    try:
        with pytest.raises(DependencyError, match=r"no room.*queue limit.*is reached") as refused:
            await transport.declare([WORK])
    finally:
        await transport.stop()

    assert "flags" not in str(refused.value)


@pytest.mark.parametrize(
    ("way", "said"),
    [("missing", "vhost test-[0-9]+ not found"), ("no permission", "refused; make")],
)
async def test_a_vhost_that_is_not_ours_is_a_matter_of_configuration(
    own_broker: Broker, own_vhost: str, closed, way: str, said: str
) -> None:
    """Only somebody who makes it or lets us in can mend that; the broker's own words tell which."""
    closed(way)

    with pytest.raises(ConfigError, match=said) as refused:
        await start(own_broker.url_of(own_vhost))

    assert f"refused vhost '{own_vhost}'" in str(refused.value)
    assert USER not in str(refused.value)


REPEATED = frozenset({"publish.repeated"})
ANSWERS, WORK = reply_queue("reply_1"), shared_queue("work")


@dataclass
class Sender:
    """Sends at once, on one broker, and knows what it had to send again.

    Attributes:
        repeated: Names of queues, one for each message that was sent again.
    """

    transport: Transport
    broker: Broker
    vhost: str
    repeated: list[str]

    def permit(self, *, configure: str = ".*", write: str = ".*") -> None:
        """Which names its user may still declare and write to."""
        user, vhost = binary(USER), binary(self.vhost)
        self.broker.eval(
            f"ok = rabbit_auth_backend_internal:set_permissions({user}, {vhost},"
            f" {binary(configure)}, {binary(write)}, {binary('.*')}, {user})"
        )

    def limit(self, queue: Queue) -> None:
        """Have *queue* refuse messages when it holds one, by a policy."""
        self.broker.eval(
            f"ok = rabbit_policy:set({binary(self.vhost)}, {binary('full')},"
            f" {binary(f'^{queue.name}$')}, [{{{binary('max-length')}, 1}},"
            f" {{{binary('overflow')}, {binary('reject-publish')}}}], 0, {binary('queues')},"
            f" {binary(USER)})"
        )

    async def send(self, *sent: tuple[Queue, Message]) -> list[BaseException | None]:
        """What became of each; all of them leave in one iteration of the loop."""
        sending = [asyncio.create_task(self.transport.publish(*one)) for one in sent]
        return await asyncio.gather(*sending, return_exceptions=True)

    def arrived(self, queue: Queue) -> list[bytes]:
        """Bodies that lie in *queue*."""
        return sorted(self.broker.bodies(self.vhost)[queue.name])


@pytest.fixture
async def sender(own_broker: Broker, own_vhost: str) -> AsyncIterator[Sender]:
    """One that has declared a service's queue and a caller's."""
    telemetry, repeated = Telemetry(), list[str]()
    telemetry.subscribe(
        lambda event, fields: repeated.append(fields["queue"]) if event in REPEATED else None
    )
    url = own_broker.url_of(own_vhost)
    transport = open_transport(url, process=Process(), clock=Clock(), telemetry=telemetry)
    await transport.start()
    try:
        await transport.declare([ANSWERS, WORK])
        yield Sender(transport, own_broker, own_vhost, repeated)
    finally:
        await transport.stop()


def numbered(number: int) -> list[Message]:
    return [Message(body=b"%02d" % one) for one in range(number)]


async def test_who_may_not_write_to_an_exchange_is_told_and_replies_do_not_hear_of_it(
    sender: Sender,
) -> None:
    """A refusal ends the channel of all that wait on it: replies leave by another."""
    sender.permit(write="^amq[.]default$")
    replies = numbered(20)

    outcomes = await sender.send(*((q, one) for one in replies for q in (ANSWERS, WORK)))

    assert outcomes[::2] == [None] * 20
    assert {type(error) for error in outcomes[1::2]} == {ConfigError}
    assert "does not let this login send to exchange 'gracekit'" in str(outcomes[1])
    assert set(sender.arrived(ANSWERS)) == {one.body for one in replies}
    assert ANSWERS.name not in sender.repeated


async def test_an_exchange_that_is_there_needs_no_right_to_declare_it(sender: Sender) -> None:
    """Who may declare it may delete it: a client uses what a service has made. Where none has,
    nobody reads: a cast says so, a fanout reaches nobody. Replies need neither.
    """
    sender.permit(configure="")

    told = await sender.send((ANSWERS, Message(body=b"a")), (WORK, Message(body=b"b")))
    assert told == [None, None]
    assert sender.arrived(WORK) == [b"b"]

    exchange = f"{{resource, {binary(sender.vhost)}, exchange, {binary('gracekit')}}}"
    sender.broker.eval(f"rabbit_exchange:delete({exchange}, false, {binary(USER)})")
    (told,) = await sender.send((WORK, Message(body=b"c")))
    assert isinstance(told, Undeliverable)
    await sender.transport.publish_fanout("other", Message(body=b"d"))


async def test_a_message_that_is_refused_costs_the_others_a_second_try(sender: Sender) -> None:
    """The broker ends the channel of all of them and does not say whom it meant: they go one by
    one.
    """
    limit = "application:set_env(rabbit, max_message_size, {})"
    sender.broker.eval(limit.format(1000))
    try:
        replies = numbered(20)
        sent = [(ANSWERS, one) for one in (*replies[:10], Message(body=b"x" * 2000), *replies[10:])]

        refused, *told = sorted(await sender.send(*sent), key=lambda error: error is None)

        assert told == [None] * 20
        assert isinstance(refused, ConfigError)
        assert "the broker takes no such message to 'reply_1'" in str(refused)
        assert "max_message_size" in str(refused)
        assert set(sender.arrived(ANSWERS)) == {one.body for one in replies}
    finally:
        sender.broker.eval(limit.format(134_217_728))


async def test_a_topic_that_is_forbidden_is_refused_alone(sender: Sender) -> None:
    """Its exchange is named in the refusal too, and all others may write to it."""
    user, vhost = binary(USER), binary(sender.vhost)
    other = shared_queue("other")
    await sender.transport.declare([other])
    sender.broker.eval(
        f"ok = rabbit_auth_backend_internal:set_topic_permissions({user}, {vhost},"
        f" {binary('gracekit')}, {binary('^work$')}, {binary('.*')}, {user})"
    )
    casts = numbered(20)

    refused, *told = await sender.send((other, Message(body=b"x")), *((WORK, one) for one in casts))

    assert told == [None] * 20
    assert isinstance(refused, ConfigError)
    assert "topic 'other'" in str(refused)
    assert set(sender.arrived(WORK)) == {one.body for one in casts}
    assert sender.arrived(other) == []


async def test_who_waits_longer_than_a_broker_can_count_waits_for_ever(sender: Sender) -> None:
    """RabbitMQ refuses a message that expires in more than ten years."""
    told = await sender.send((WORK, Message(body=b"a", expires_in_s=1e9)))

    assert told == [None]


@pytest.mark.parametrize("queue", [WORK, ANSWERS], ids=["work", "answers"])
async def test_a_full_queue_refuses_and_nothing_is_in_doubt(sender: Sender, queue: Queue) -> None:
    """A nack means that the broker has not kept the message. It is sent again for 2 s, as a quorum
    queue may elect a leader, and not by waiting for room until nobody knows where it is.
    """
    sender.limit(queue)
    kept = list[bytes]()
    for one in numbered(20):
        (told,) = await sender.send((queue, one))
        if told is not None:
            break
        kept.append(one.body)

    assert isinstance(told, DependencyError)
    assert f"queue '{queue.name}' is full" in str(told)
    assert "reject-publish" in str(told)
    assert "nothing was kept" in str(told)
    assert sender.arrived(queue) == kept
    assert set(sender.repeated) == {queue.name}


async def test_a_fanout_that_one_queue_refuses_is_not_sent_to_the_others_again(
    sender: Sender,
) -> None:
    """The broker does not say which of them is full, and the others have the message."""
    full, free = fanout_queue("work", "run-1"), fanout_queue("work", "run-2")
    await sender.transport.declare([full, free])
    sender.limit(full)
    sent = numbered(20)
    for number, one in enumerate(sent, 1):  # noqa: B007 - used behind the loop
        try:
            await sender.transport.publish_fanout("work", one)
        except UnconfirmedError as error:
            told = str(error)
            break

    assert "a queue of the fanout to 'work' is full" in told
    assert sender.arrived(free) == [one.body for one in sent[:number]]
    assert sender.repeated == []
