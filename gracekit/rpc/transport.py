"""The interface of all transports, which carry bytes between named queues.

A transport never decodes a body, runs no handlers, and forgets settled messages.
Delivery is at least once: the unsettled deliveries of a consumer that dies go back
to the queue, in their old order.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from gracekit.config.choices import ServiceQueues
from gracekit.errors import StoreBrokenError, StoreError
from gracekit.process import Point, Process
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracing.conventions import Messaging


class QueueKind(enum.Enum):
    """The kind of a queue: who reads it, and so who may recover its requests."""

    SHARED = "shared"  # any host of the service
    DIRECTED = "directed"  # one host, or one instance
    FANOUT = "fanout"  # one run; each run has such a queue
    REPLY = "reply"  # one client
    NOTIFICATION = "notification"  # any listener, also oslo.messaging's


# Queues of these kinds belong to the transport that declared them, and end with it.
OWNED: Final = frozenset({QueueKind.FANOUT, QueueKind.REPLY})


class Queue(msgspec.Struct, frozen=True):
    """A queue by its wire name.

    Shared, directed and notification queues outlive their readers. Fanout and reply queues
    end with the transport that declared them.

    Attributes:
        name: `compute`, `compute.node-1`, `compute_fanout_<32 hex>`, `reply_<32 hex>`,
            `compute-notifications.info`.
        kind: Who reads it.
        topic: The topic that it belongs to; empty for reply queues.
    """

    name: str
    kind: QueueKind
    topic: str = ""


def shared_queue(topic: str) -> Queue:
    """The queue that all hosts of a topic read."""
    return Queue(topic, QueueKind.SHARED, topic)


def announced_queues(
    topic: str, ops_topic: str, host: str, *, queues: ServiceQueues
) -> list[Queue]:
    """The queues of a service that two stores must not read.

    Of a service that reads only directed queues, other hosts read the shared queue of the ops
    topic, too. It does not count: requests without a host there only ask any host that lives.
    """
    if queues == "directed":
        return [directed_queue(topic, host)]
    return [shared_queue(topic), shared_queue(ops_topic)]


def directed_queue(topic: str, host: str) -> Queue:
    """The queue that one host (or one instance) of a topic reads."""
    return Queue(f"{topic}.{host}", QueueKind.DIRECTED, topic)


def no_host(name: str | None, *, ops: bool) -> str:
    """What an error says of the host that has no queue; an instance has one on the ops topic only.

    Args:
        name: As prepared.
        ops: Whether the request was for the ops topic.
    """
    if name is None:
        return "" if ops else "; with Service(..., queues='directed') say prepare(host=...)"
    if ops:
        return f"; check the name too: no run has read there as host or instance {name!r}"
    return (
        f"; check the host too: no run has read there as host {name!r}. The name of an instance is "
        "known on the ops topic only; `gracekit config show` says which host a service has"
    )


def fanout_queue(topic: str, run_id: str) -> Queue:
    """The queue of one run's fanout copies; after the run's death another run can remove it."""
    return Queue(f"{topic}_fanout_{run_id}", QueueKind.FANOUT, topic)


REPLY: Final = "reply_"
"""Prefix of the names of reply queues, of gracekit's and of oslo.messaging's clients."""


def is_for_replies(name: str, also: Sequence[str]) -> bool:
    """Whether replies may be sent to a queue of that name.

    A caller could give the name of a service's queue, to which it may have no permission to send,
    and let our server send there.

    Args:
        name: The name in the request.
        also: Patterns of further permitted names.
    """
    return name.startswith(REPLY) or any(fnmatchcase(name, pattern) for pattern in also)


def notification_queue(topic: str, priority: str) -> Queue:
    """The queue of one topic's notifications of one *priority*, in lower case.

    The publisher declares it too, so that it keeps notifications until a reader starts.
    """
    return Queue(f"{topic}.{priority}", QueueKind.NOTIFICATION, topic)


def reply_queue(name: str) -> Queue:
    """The reply queue of one client, by the name that its requests give."""
    return Queue(name, QueueKind.REPLY)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes to send.

    Attributes:
        body: The enveloped message.
        expires_in_s: Seconds after which the message is dropped and counted if no
            consumer has taken it; None for never.
        headers: Short text pairs beside the body.
    """

    body: bytes
    expires_in_s: float | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Settlement(enum.Enum):
    """What the transport should do with a delivery."""

    __hash__ = object.__hash__  # Enum's own is a call into Python, once a message

    ACK = "ack"  # delete it
    GIVE_BACK = "give_back"  # requeue it at its old position
    DEAD_LETTER = "dead_letter"  # keep it for operators, with a reason


_POINTS: Mapping[Settlement, Point] = {
    Settlement.ACK: Point.ACK,
    Settlement.GIVE_BACK: Point.GIVE_BACK,
    Settlement.DEAD_LETTER: Point.DEAD_LETTER,
}

DEPTH_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of `Transport.depth`."""

Settle = Callable[[Settlement, str], Awaitable[None]]
OnDelivery = Callable[["Delivery"], None]


class Delivery(msgspec.Struct, kw_only=True, eq=False):
    """One message delivered to a consumer, which must settle it once.

    A second settlement does nothing. Neither does one after the connection was lost:
    the message is delivered again, and the journal recognises the duplicate.
    Settlements are coroutines. They raise StoreError if the transport cannot do it
    now; the transport itself tries again, so the caller need only report the error.

    Attributes:
        body: The enveloped message, of any size and content.
        queue: The queue that it came from.
        redelivered: Whether it was delivered before without being settled.
        expires_in_s: Seconds that its sender will still wait; None if unknown.
        headers: Short text pairs beside the body.
        dropped: Size in bytes of a body that was too large and was dropped (`body` is empty);
            otherwise 0.
        sent_to: The routing key if it is not the name of the queue, as it must be; otherwise empty.
        on_taken: Called once, when a task owns the body or it is settled; its argument is
            whether the message goes back.
        on_settled: Called once, before the transport settles it.
        ack_at_once: Acks it without a wait; None if the transport has to be waited for.
    """

    body: bytes
    queue: Queue
    redelivered: bool
    expires_in_s: float | None
    headers: Mapping[str, str]
    process: Process
    settle: Settle
    dropped: int = 0
    sent_to: str = ""
    on_taken: Callable[[bool], None] | None = None
    on_settled: Callable[[], None] | None = None
    ack_at_once: Callable[[], None] | None = None
    settled: bool = False

    def taken(self) -> None:
        """Report that a task owns the message now; it may be settled later."""
        self._let_go(goes_back=False)

    def _let_go(self, *, goes_back: bool) -> None:
        on_taken, self.on_taken = self.on_taken, None
        if on_taken is not None:
            on_taken(goes_back)

    def ack(self) -> Coroutine[Any, Any, None]:
        """Have the transport delete the message."""
        return self._settle_once(Settlement.ACK)

    def ack_now(self) -> bool:
        """As `ack`, without a coroutine; False, and nothing is done, where that is not possible."""
        if self.ack_at_once is None:
            return False
        if not self.settled:
            self._begin(Settlement.ACK)
            self.ack_at_once()
            self.process.reach(Point.ACK, "after")
        return True

    def give_back(self) -> Coroutine[Any, Any, None]:
        """Put the message back at its old place in the queue, for any consumer."""
        return self._settle_once(Settlement.GIVE_BACK)

    def dead_letter(self, reason: str) -> Coroutine[Any, Any, None]:
        """Move the message to the dead letters, with *reason* as text."""
        return self._settle_once(Settlement.DEAD_LETTER, reason)

    async def _settle_once(self, how: Settlement, reason: str = "") -> None:
        if self.settled:
            return
        self._begin(how)
        await self.settle(how, reason)
        self.process.reach(_POINTS[how], "after")

    def _begin(self, how: Settlement) -> None:
        self.settled = True
        self._let_go(goes_back=how is Settlement.GIVE_BACK)
        if self.on_settled is not None:
            self.on_settled()
        self.process.reach(_POINTS[how], "before")


async def settle(settlement: Coroutine[Any, Any, None], telemetry: Telemetry) -> None:
    """Settle a delivery; an error is only logged, as the transport settles or delivers it later."""
    try:
        await settlement
    except StoreError as error:
        telemetry.emit("store.error", what="settlement", error=str(error))


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead-lettered message, kept for operators.

    Attributes:
        queue: Name of the queue that it came from.
        body: The body as sent.
        headers: The headers as sent.
        reason: Why the consumer could not process it.
    """

    queue: str
    body: bytes
    headers: Mapping[str, str]
    reason: str


class ReadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why queues cannot be read now.

    Attributes:
        since: Loop time since which they cannot be read.
        why: A sentence for operators.
    """

    since: float
    why: str


class Consumer(Protocol):
    """A running consumer of one or more queues."""

    @property
    def failure(self) -> ReadFailure | None:
        """Why it cannot deliver now, whether or not messages wait; None if it can."""
        ...

    def pause(self) -> None:
        """Pause delivery; messages on their way may still arrive. A cancel ends the pause."""
        ...

    def resume(self) -> None:
        """Deliver again."""
        ...

    async def cancel(self) -> None:
        """Stop delivery; return when the transport has confirmed it (cancel-ok).

        Earlier deliveries are not given back; they must still be settled. May be called
        twice.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """A way to carry messages; a process has one object for each URL.

    `start` and `stop` may each be called twice.
    """

    @property
    def is_connected(self) -> bool | None:
        """Whether its broker is connected now; None if it uses no broker."""
        ...

    @property
    def messaging(self) -> Messaging:
        """Messaging system and exchange, for traces."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether only users with access to files of this machine can send on it."""
        ...

    async def start(self) -> None:
        """Connect.

        Raises:
            DependencyError: the broker or file cannot be reached.
        """
        ...

    async def stop(self) -> None:
        """Disconnect; unsettled deliveries go back to their queues."""
        ...

    def on_broken(self, callback: Callable[[StoreBrokenError], None]) -> None:
        """Call *callback* on the loop, once, when this process can no longer use the transport."""
        ...

    async def declare(self, queues: Sequence[Queue]) -> None:
        """Create queues, so that they take messages before a consumer starts."""
        ...

    async def compare(self, queues: Sequence[Queue], *, store: str | None) -> None:
        """Refuse a start, before it declares anything, if the broker would refuse it later.

        Args:
            queues: The queues that the service will declare.
            store: Identity of our store, as for `announce`; None if it will not be announced.

        Raises:
            ConfigError: some exist already, with other flags than this transport declares.
            DependencyError: the broker gives no answer.
        """
        ...

    async def discard(self, queues: Sequence[Queue]) -> None:
        """Delete queues whose owner is dead, with their messages.

        Raises:
            DependencyError: it is not possible now; the queues expire later.
        """
        ...

    async def publish(self, queue: Queue, message: Message) -> None:
        """Put *message* into *queue*; return when the transport has confirmed it.

        Raises:
            Undeliverable: no such queue was ever declared, or its owner is gone.
        """
        ...

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """Send a copy to every running instance that reads *topic*; there may be none."""
        ...

    async def announce(
        self, queues: Sequence[Queue], *, store: str, label: str
    ) -> list[QueueReader]:
        """Announce, before reading *queues*, which store this process uses.

        Args:
            queues: See `announced_queues`.
            store: Identity of our store.
            label: Names this process, for display.

        Returns:
            Living readers of these queues with another store.
        """
        ...

    async def keep_mark(self, name: str, mark: int) -> int:
        """Store *mark* under *name* beside the queues, if it is the highest so far.

        Returns:
            The highest mark of that name; 0 if the transport cannot store marks.
        """
        ...

    async def directed(self, topics: Sequence[str]) -> list[Queue]:
        """The directed queues of *topics*; empty if the broker cannot list its queues."""
        ...

    async def depth(self, queues: Sequence[Queue]) -> int:
        """How many messages *queues* hold together; a queue that does not exist holds none.

        Waiting messages count, and delivered ones that are not settled. RabbitMQ counts only
        waiting messages: one that it has sent to a consumer does not count, even if it has not
        arrived. For a quorum queue without a leader it reports 0. Expired messages that were not
        removed yet count on RabbitMQ only. The call takes at most about `DEPTH_TIMEOUT_S`.

        Raises:
            DependencyError: the broker or file cannot be asked now.
        """
        ...

    async def waiting(self, queues: Sequence[Queue]) -> tuple[int, float | None]:
        """How many messages no consumer has, and the age of the oldest in seconds.

        The age is None if none waits, or if the transport does not know it. Raises a GracekitError
        if the broker or file cannot be asked now.
        """
        ...

    async def prune(self, queues: Sequence[Queue], *, dry_run: bool = False) -> list[Queue]:
        """Delete those of *queues* that have no reader and no message.

        Returns:
            The queues that were deleted, or with *dry_run* would be.

        Raises:
            ConfigError: the broker cannot delete such queues on the condition that they are empty.
        """
        ...

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        """Declare *queues* and deliver from them, oldest first in each queue.

        Args:
            queues: The queues to read with one consumer.
            on_delivery: Called on the event loop; must not block or raise.
            prefetch: How many deliveries may be unsettled at a time.
        """
        ...
