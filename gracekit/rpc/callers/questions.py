"""Questions to the ops servers of a service.

`fail_fast` asks whether new requests are accepted, as one that is sent may wait unread. A delayed
cast asks whether the service knows of delays. Callers ask what became of their requests.

A question is asked of one ops server, the one that takes it. If that does not settle it, all of
them are asked, because siblings read the same queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.errors import (
    Draining,
    NoAnswerError,
    RpcError,
    Undeliverable,
    UnsupportedVersionError,
)
from gracekit.rpc.message import (
    CONTROL_NAMESPACE,
    DELAY,
    STATE_VERB,
    JsonObject,
    Reply,
    Request,
)
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import Message, Transport, directed_queue, shared_queue

ASK_S: Final = 2.0
"""Seconds that a question may take; at most half of a request's timeout before that request."""
SIBLINGS_S: Final = 0.5
"""Seconds to wait for the siblings' answers after a first one that did not settle it."""


class OpenQuestion:
    """One question, which may be sent to several servers, and their answers."""

    def __init__(
        self,
        transport: Transport,
        heard: asyncio.Queue[Reply | None],
        request: Request,
        *,
        ops_topic: str,
    ) -> None:
        self._transport = transport
        self._heard = heard
        self._request = request
        self._topic = ops_topic

    async def send(self, host: str | None) -> None:
        """Send it to any server, or to one of *host*."""
        queue = directed_queue(self._topic, host) if host else shared_queue(self._topic)
        await self._transport.publish(queue, self._message())

    async def send_to_all(self) -> None:
        """Send it to every server that runs now."""
        await self._transport.publish_fanout(self._topic, self._message())

    def _message(self) -> Message:
        return Message(body=encode_request(self._request), expires_in_s=ASK_S)

    async def answer(self) -> Reply:
        """The next answer.

        Raises:
            RpcError: the client was stopped.
        """
        if (reply := await self._heard.get()) is None:
            raise RpcError(
                "the client was stopped before its question was answered, and no request was sent: "
                "ask again by another client"
            )
        return reply


class Questions:
    """Asks the ops servers of one service.

    Args:
        transport: Carries the questions.
        replies: Receives the answers.
        clock: Makes ids.
        ops_topic: The service's ops topic.
    """

    def __init__(
        self, transport: Transport, replies: Replies, clock: Clock, *, ops_topic: str
    ) -> None:
        self.ops_topic = ops_topic
        self._transport = transport
        self._replies = replies
        self._clock = clock

    @contextlib.asynccontextmanager
    async def asking(
        self,
        verb: str = STATE_VERB,
        args: JsonObject | None = None,
        *,
        namespace: str = CONTROL_NAMESPACE,
        context: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[OpenQuestion]:
        """One question, not yet sent; its answers are heard inside of the block."""
        address, heard = await self._replies.hear()
        request = Request(
            request_id=self._clock.new_id(),
            method=verb,
            args=args or {},
            namespace=namespace,
            context=context or {},
            reply=address,
        )
        try:
            yield OpenQuestion(self._transport, heard, request, ops_topic=self.ops_topic)
        finally:
            self._replies.forget(address)

    async def check_open(self, host: str | None, *, within_s: float) -> None:
        """Ask whether new requests are accepted; no answer in time counts as yes.

        Args:
            host: The host to ask about; None for any.
            within_s: Seconds that the request may take, including this question.

        Raises:
            Draining: every server that answered has closed its intake.
            RpcError: the client was stopped meanwhile.
        """
        closed: dict[str, str] = {}
        try:
            async with asyncio.timeout(min(ASK_S, within_s / 2)), self.asking() as asked:
                await asked.send(host)
                if _is_no_reason((await asked.answer()).result, closed, host):
                    return
                async with asyncio.timeout(SIBLINGS_S):
                    await asked.send_to_all()
                    while not _is_no_reason((await asked.answer()).result, closed, host):
                        pass
                    return
        except (TimeoutError, Undeliverable):
            pass  # no server answered, or no further one
        if closed:
            listed = ", ".join(f"{name} ({state})" for name, state in sorted(closed.items()))
            raise Draining(
                f"new requests are not taken by {listed}, and nothing was sent: "
                "ask another host, or again when it is back"
            )

    async def check_delays(self, host: str | None) -> None:
        """Ask whether the service knows of delays.

        Raises:
            NoAnswerError: nobody answers.
            UnsupportedVersionError: it does not.
            RpcError: the client was stopped meanwhile.
        """
        topic = f"{self.ops_topic}.{host}" if host else self.ops_topic
        try:
            async with asyncio.timeout(ASK_S), self.asking() as asked:
                await asked.send(host)
                answer = (await asked.answer()).result
        except (TimeoutError, Undeliverable) as error:
            raise NoAnswerError(
                f"no server of {topic!r} has said within {ASK_S:g} s that it knows of delays, and "
                "nothing was sent: start the service, or send it without delay"
            ) from error
        if not (isinstance(answer, dict) and DELAY in answer.get("features", ())):
            raise UnsupportedVersionError(
                f"the service that reads {topic!r} does not know of delays and would begin at "
                "once, so nothing was sent: upgrade it, or send it without delay"
            )


def _is_no_reason(answer: Any, closed: dict[str, str], host: str | None) -> bool:
    """Whether to send after *answer*; a server that refuses is added to *closed*."""
    match answer:
        case {"instance": str(), "host": str(other)} if host is not None and other != host:
            return False  # that server reads another queue
        case {"open": False, "instance": str(instance), "state": str(state)}:
            closed[instance[:100]] = state[:20]
            return False
    return True
