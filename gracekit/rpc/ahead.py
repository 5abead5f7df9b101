"""Asking ahead: whether new requests are taken, before one is sent that would wait unread.

One ops server is asked, whichever takes the question. If its intake is closed
all are asked, because a sibling may read the same queue. Only answers count:
where nobody answers in time, or nobody understands, the request is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.errors import Draining, Undeliverable
from gracekit.rpc.message import CONTROL_NAMESPACE, STATE_VERB, ReplyAddress, Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import Message, Transport, directed_queue, shared_queue

ASK_S: Final = 2.0
"""The question takes at most this long, and at most half of what the request may take."""
SIBLINGS_S: Final = 0.5
"""After a first refusal, others that read the same queue are listened to for so long."""


async def check_open(
    transport: Transport,
    replies: Replies,
    clock: Clock,
    *,
    ops_topic: str,
    host: str | None,
    within_s: float,
) -> None:
    """Ask whether new requests are taken.

    Args:
        transport: Where to ask.
        replies: Hears the answers.
        clock: Draws ids.
        ops_topic: Of the service.
        host: Of the one host that is meant; None for any.
        within_s: Seconds that the request may take with all this.

    Raises:
        Draining: whoever answered has closed its intake.
    """
    closed: dict[str, str] = {}
    limit_s = min(ASK_S, within_s / 2)
    address, heard = await replies.hear()
    try:
        async with asyncio.timeout(limit_s):
            queue = directed_queue(ops_topic, host) if host else shared_queue(ops_topic)
            await transport.publish(queue, _question(clock, address, limit_s))
            if _is_no_reason((await heard.get()).result, closed, host):
                return
            async with asyncio.timeout(SIBLINGS_S):
                await transport.publish_fanout(ops_topic, _question(clock, address, SIBLINGS_S))
                while not _is_no_reason((await heard.get()).result, closed, host):
                    pass
                return
    except (TimeoutError, Undeliverable):
        pass  # nobody is there to answer, or nobody else
    finally:
        replies.forget(address)
    if closed:
        listed = ", ".join(f"{instance} ({state})" for instance, state in sorted(closed.items()))
        raise Draining(
            f"new requests are not taken by {listed}, and nothing was sent: "
            "ask another host, or again when it is back"
        )


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
    """Whether *answer* leaves no reason not to send; who is closed is noted instead."""
    match answer:
        case {"instance": str(), "host": str(other)} if host is not None and other != host:
            return False  # it reads another queue
        case {"open": False, "instance": str(instance), "state": str(state)}:
            closed[instance[:100]] = state[:20]
            return False
    return True
