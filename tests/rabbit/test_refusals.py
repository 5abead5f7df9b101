"""What a broker says when it lets nobody in, and whether time can mend it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Message, reply_queue, shared_queue
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
    """
    A limit falls and a vhost starts: whoever supervises us must try again. The broker's own words
    say which it is, and name no user.
    """
    closed(way)

    with pytest.raises(DependencyError, match=said) as refused:
        await start(own_broker.url_of(own_vhost))

    assert f"lets nobody into vhost '{own_vhost}' now" in str(refused.value)
    assert USER not in str(refused.value)


@pytest.mark.parametrize(
    ("way", "said"),
    [("missing", "vhost test-[0-9]+ not found"), ("no permission", "refused; make")],
)
async def test_a_vhost_that_is_not_ours_is_a_matter_of_configuration(
    own_broker: Broker, own_vhost: str, closed, way: str, said: str
) -> None:
    """
    Only somebody who makes it or lets us in can mend that; the broker's own words tell which.
    """
    closed(way)

    with pytest.raises(ConfigError, match=said) as refused:
        await start(own_broker.url_of(own_vhost))

    assert f"refused vhost '{own_vhost}'" in str(refused.value)
    assert USER not in str(refused.value)


@pytest.mark.parametrize("frames", ["own", "plain"])
async def test_who_may_not_write_to_an_exchange_is_told_and_others_are_sent_again(
    own_broker: Broker, own_vhost: str, frames: str
) -> None:
    """
    A refusal ends the channel of all that wait on it: replies, which it does not mean, arrive.
    """
    url = f"{own_broker.url_of(own_vhost)}?frames={frames}"
    transport = open_transport(url, process=Process(), clock=Clock())
    await transport.start()
    try:
        answers, work = reply_queue("reply_1"), shared_queue("work")
        await transport.declare([answers, work])
        user, everything = binary(USER), binary(".*")
        own_broker.eval(
            f"ok = rabbit_auth_backend_internal:set_permissions({user}, {binary(own_vhost)},"
            f" {everything}, {binary('^amq[.]default$')}, {everything}, {user})"
        )
        replies = [Message(body=b"%d" % number) for number in range(20)]
        sending = [
            asyncio.create_task(transport.publish(queue, message))
            for message in replies
            for queue in (answers, work)
        ]

        outcomes = await asyncio.gather(*sending, return_exceptions=True)

        assert outcomes[::2] == [None] * 20
        assert {type(error) for error in outcomes[1::2]} == {ConfigError}
        assert "exchange 'gracekit' cannot be used" in str(outcomes[1])
        arrived = set(own_broker.bodies(own_vhost)[answers.name])
        assert arrived == {message.body for message in replies}
    finally:
        await transport.stop()
