"""Questions to the ops servers of a service, before a request is sent.

`fail_fast` asks whether new requests are accepted, as one that is sent may wait unread. A delayed
cast asks whether the service knows of delays.

The client asks one ops server, the one that takes the question. If its intake is
closed, the client asks all of them, because a sibling may read the same queue.
If no server answers in time, or none understands the question, the request is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.errors import (
    Draining,
    NoAnswerError,
    RpcError,
    Undeliverable,
    UnsupportedVersionError,
)
from gracekit.rpc.message import CONTROL_NAMESPACE, DELAY, STATE_VERB, Reply, ReplyAddress, Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import Message, Transport, directed_queue, shared_queue

ASK_S: Final = 2.0
"""Seconds that the question may take; at most half of the request's timeout."""
SIBLINGS_S: Final = 0.5
"""Seconds to wait for the siblings' answers after a first refusal."""


async def check_open(
    transport: Transport,
    replies: Replies,
    clock: Clock,
    *,
    ops_topic: str,
    host: str | None,
    within_s: float,
) -> None:
    """Ask whether new requests are accepted.

    Args:
        transport: Carries the question.
        replies: Receives the answers.
        clock: Makes ids.
        ops_topic: The service's ops topic.
        host: The host to ask about; None for any.
        within_s: Seconds that the request may take, including this question.

    Raises:
        Draining: every server that answered has closed its intake.
        RpcError: the client was stopped meanwhile.
    """
    closed: dict[str, str] = {}
    limit_s = min(ASK_S, within_s / 2)
    address: ReplyAddress | None = None
    try:
        async with asyncio.timeout(limit_s):
            address, heard = await replies.hear()
            queue = directed_queue(ops_topic, host) if host else shared_queue(ops_topic)
            await transport.publish(queue, _question(clock, address, limit_s))
            if _is_no_reason(await _answer(heard), closed, host):
                return
            async with asyncio.timeout(SIBLINGS_S):
                await transport.publish_fanout(ops_topic, _question(clock, address, SIBLINGS_S))
                while not _is_no_reason(await _answer(heard), closed, host):
                    pass
                return
    except (TimeoutError, Undeliverable):
        pass  # no server answered, or no further one
    finally:
        if address is not None:
            replies.forget(address)
    if closed:
        listed = ", ".join(f"{instance} ({state})" for instance, state in sorted(closed.items()))
        raise Draining(
            f"new requests are not taken by {listed}, and nothing was sent: "
            "ask another host, or again when it is back"
        )


async def check_delays(
    transport: Transport, replies: Replies, clock: Clock, *, ops_topic: str, host: str | None
) -> None:
    """Ask whether the service knows of delays.

    Raises:
        NoAnswerError: nobody answers.
        UnsupportedVersionError: it does not.
        RpcError: the client was stopped meanwhile.
    """
    address: ReplyAddress | None = None
    queue = directed_queue(ops_topic, host) if host else shared_queue(ops_topic)
    try:
        async with asyncio.timeout(ASK_S):
            address, heard = await replies.hear()
            await transport.publish(queue, _question(clock, address, ASK_S))
            answer = await _answer(heard)
    except (TimeoutError, Undeliverable) as error:
        raise NoAnswerError(
            f"no server of {queue.name!r} has said within {ASK_S:g} s that it knows of delays, and "
            "nothing was sent: start the service, or send it without delay"
        ) from error
    finally:
        if address is not None:
            replies.forget(address)
    if not (isinstance(answer, dict) and DELAY in answer.get("features", ())):
        raise UnsupportedVersionError(
            f"the service that reads {queue.name!r} does not know of delays and would begin at "
            "once, so nothing was sent: upgrade it, or send it without delay"
        )


async def _answer(heard: asyncio.Queue[Reply | None]) -> Any:
    reply = await heard.get()
    if reply is None:
        raise RpcError("the client was stopped, and nothing was sent: call again by another client")
    return reply.result


def _question(clock: Clock, address: ReplyAddress, expires_in_s: float) -> Message:
    request = Request(
        request_id=clock.new_id(),
        method=STATE_VERB,
        args={},
        namespace=CONTROL_NAMESPACE,
        reply=address,
    )
    return Message(body=encode_request(request), expires_in_s=expires_in_s)


def _is_no_reason(answer: Any, closed: dict[str, str], host: str | None) -> bool:
    """Whether to send after *answer*; a server that refuses is added to *closed*."""
    match answer:
        case {"instance": str(), "host": str(other)} if host is not None and other != host:
            return False  # that server reads another queue
        case {"open": False, "instance": str(instance), "state": str(state)}:
            closed[instance[:100]] = state[:20]
            return False
    return True
