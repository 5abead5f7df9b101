"""What every transport does: carry bytes between named queues, and nothing more.

A transport never decodes a body, never runs a handler and remembers nothing of
what was settled. Delivery is at least once: a consumer that dies gives its
unsettled deliveries back, in their old order.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from gracekit.errors import StoreBrokenError
from gracekit.process import Point, Process
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.tracing.conventions import Messaging


class QueueKind(enum.Enum):
    """Who reads a queue, and therefore who may run its requests later."""

    SHARED = "shared"  # any host of the service
    DIRECTED = "directed"  # one host, or one instance
    FANOUT = "fanout"  # every running instance has its own copy
    REPLY = "reply"  # one client
    NOTIFICATION = "notification"  # whoever wants to know, oslo.messaging's listeners too


# They belong to the transport that declared them, and go with it.
OWNED: Final = frozenset({QueueKind.FANOUT, QueueKind.REPLY})


@dataclass(frozen=True, slots=True)
class Queue:
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


def directed_queue(topic: str, host: str) -> Queue:
    """The queue that one host (or one instance) of a topic reads."""
    return Queue(f"{topic}.{host}", QueueKind.DIRECTED, topic)


def fanout_queue(topic: str, run_id: str) -> Queue:
    """The queue of one run's copies; who knows that the run is dead can remove it."""
    return Queue(f"{topic}_fanout_{run_id}", QueueKind.FANOUT, topic)


REPLY: Final = "reply_"
"""How names of reply queues begin: of our clients, and of oslo.messaging's."""


def is_for_replies(name: str, also: Sequence[str]) -> bool:
    """Whether answers may go to a queue of that name.

    Anything else may be the queue of a service, which whoever names it may not be allowed to
    send to.

    Args:
        name: From the wire.
        also: Patterns of further names.
    """
    return name.startswith(REPLY) or any(fnmatchcase(name, pattern) for pattern in also)


def notification_queue(topic: str, priority: str) -> Queue:
    """The queue of one topic's notifications of one *priority*, in lower case.

    Their publisher declares it, so that they wait there for readers yet to come.
    """
    return Queue(f"{topic}.{priority}", QueueKind.NOTIFICATION, topic)


def reply_queue(name: str) -> Queue:
    """The queue that one client reads, under the name that it sent along."""
    return Queue(name, QueueKind.REPLY)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes to send.

    Attributes:
        body: The enveloped message.
        expires_in_s: Seconds after which a message that nobody has taken is
            dropped and counted; None for never.
        headers: Short text pairs beside the body.
    """

    body: bytes
    expires_in_s: float | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Settlement(enum.Enum):
    """What a consumer tells the transport about one delivery."""

    __hash__ = object.__hash__  # Enum's own is a call into Python, once a message

    ACK = "ack"  # forget it
    GIVE_BACK = "give_back"  # put it back where it was
    DEAD_LETTER = "dead_letter"  # keep it aside, with a reason


_POINTS: Mapping[Settlement, Point] = {
    Settlement.ACK: Point.ACK,
    Settlement.GIVE_BACK: Point.GIVE_BACK,
    Settlement.DEAD_LETTER: Point.DEAD_LETTER,
}

DEPTH_TIMEOUT_S: Final = 5.0
"""For a transport to count what its queues hold."""

Settle = Callable[[Settlement, str], Awaitable[None]]
OnDelivery = Callable[["Delivery"], None]


class Delivery(msgspec.Struct, kw_only=True, eq=False):
    """One message in a consumer's hands, to be settled exactly once.

    A second settlement, or one on a connection that is gone, does nothing:
    the message is then delivered again and the journal's dedupe covers it.
    Each is a coroutine, and raises StoreError where the transport could not do
    it now; it is the transport that tries again, so the caller only tells it.

    Attributes:
        body: The enveloped message, of any size and content.
        queue: Where it came from.
        redelivered: It was delivered before and not settled.
        expires_in_s: Seconds that its sender will still wait; None if unknown.
        headers: Short text pairs beside the body.
        dropped: Bytes of a body that was too large to be kept: it is empty here. 0 of all others.
        sent_to: The address that a stray bears, in the place of its queue's; empty of all others.
        on_taken: Called once, when the body is a task's own, or of no interest any more; with
            whether it goes back.
        on_settled: Called once, before the transport hears of it.
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
    settled: bool = False

    def taken(self) -> None:
        """Say that it is a task's now, whenever it will be settled."""
        self._let_go(goes_back=False)

    def _let_go(self, *, goes_back: bool) -> None:
        on_taken, self.on_taken = self.on_taken, None
        if on_taken is not None:
            on_taken(goes_back)

    def ack(self) -> Coroutine[Any, Any, None]:
        """Tell the transport that it may forget the message."""
        return self._settle_once(Settlement.ACK)

    def give_back(self) -> Coroutine[Any, Any, None]:
        """Put the message back at its old place in the queue, for any consumer."""
        return self._settle_once(Settlement.GIVE_BACK)

    def dead_letter(self, reason: str) -> Coroutine[Any, Any, None]:
        """Keep the message aside for people, with *reason* as text."""
        return self._settle_once(Settlement.DEAD_LETTER, reason)

    async def _settle_once(self, how: Settlement, reason: str = "") -> None:
        if self.settled:
            return
        self.settled = True
        self._let_go(goes_back=how is Settlement.GIVE_BACK)
        if self.on_settled is not None:
            self.on_settled()
        self.process.reach(_POINTS[how], "before")
        await self.settle(how, reason)
        self.process.reach(_POINTS[how], "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message kept aside for people.

    Attributes:
        queue: Name of the queue that it was taken from.
        body: As it was sent.
        headers: As they were sent.
        reason: Why its consumer could not use it.
    """

    queue: str
    body: bytes
    headers: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailure:
    """Why queues cannot be read now.

    Attributes:
        since: Loop time from which on they could not.
        why: A sentence for people.
    """

    since: float
    why: str


class Consumer(Protocol):
    """A running subscription."""

    @property
    def failure(self) -> ReadFailure | None:
        """Why it delivers nothing now, whatever is in its queues; None if it would."""
        ...

    def pause(self) -> None:
        """Deliver nothing more for now; what is on its way may still come. A cancel ends it."""
        ...

    def resume(self) -> None:
        """Deliver again."""
        ...

    async def cancel(self) -> None:
        """Stop delivery; returns when the transport has confirmed it (cancel-ok).

        Deliveries made before that moment stay with the consumer, who settles
        them. May be called twice.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """A way to carry messages. One object a process and URL; both calls of
    `start` and `stop` may be repeated, and `stop` gives back what is unsettled.
    """

    @property
    def is_connected(self) -> bool | None:
        """Whether its broker is connected now; None if it uses no broker."""
        ...

    @property
    def messaging(self) -> Messaging:
        """Its system and exchange, as traces name them."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether only who may use the files of this machine can send by it."""
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
        """Make queues exist, so that they take messages before anybody reads them."""
        ...

    async def discard(self, queues: Sequence[Queue]) -> None:
        """Remove queues whose owner is dead, whatever is in them.

        Raises:
            DependencyError: not now; they go by themselves some day.
        """
        ...

    async def publish(self, queue: Queue, message: Message) -> None:
        """Put *message* into *queue*; returns when it is safe there.

        Raises:
            Undeliverable: no such queue was ever declared, or its owner is gone.
        """
        ...

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """Give every running instance that reads *topic* its own copy; possibly nobody."""
        ...

    async def announce(
        self, queues: Sequence[Queue], *, store: str, label: str
    ) -> list[QueueReader]:
        """Say, before reading shared *queues*, in which store their deliveries are kept.

        Args:
            queues: Shared queues.
            store: Identity of the store.
            label: Who says so, for people.

        Returns:
            Living readers of these queues that have announced another store.
        """
        ...

    async def keep_mark(self, name: str, mark: int) -> int:
        """Keep *mark* under *name* beside the queues if it is the highest so far.

        Returns:
            The highest of that name; 0 where nothing is kept.
        """
        ...

    async def directed(self, topics: Sequence[str]) -> list[Queue]:
        """The directed queues of *topics*; none where a broker does not list its queues."""
        ...

    async def depth(self, queues: Sequence[Queue]) -> int:
        """How many messages *queues* hold in all; a queue that does not exist holds none.

        Those that wait, and those in consumers' hands that are not settled yet. RabbitMQ reports
        the waiting ones alone: a message that it has sent to a consumer is not counted, even if
        it has not arrived there. And of a quorum queue without a leader it reports 0.

        Expired messages that were not removed yet count on RabbitMQ only. The call takes about
        `DEPTH_TIMEOUT_S` at most.

        Raises:
            DependencyError: the broker or file cannot be asked now.
        """
        ...

    async def prune(self, queues: Sequence[Queue], *, dry_run: bool = False) -> list[Queue]:
        """Remove those of *queues* that nobody reads and that hold no message.

        Returns:
            What was removed, or would be.

        Raises:
            ConfigError: the broker cannot remove such queues only if they are empty.
        """
        ...

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        """Declare *queues* and deliver from them, oldest first in each queue.

        Args:
            queues: Queues to read with one consumer.
            on_delivery: Called on the event loop; must not block, must not raise.
            prefetch: Deliveries that may be unsettled at one time.
        """
        ...
