"""Declare profiles: named sets of flags for all exchanges and queues that we declare.

Declaring an existing queue or exchange with other flags makes the broker close the
channel (406). So all readers of one topic queue, and all publishers to one
exchange, must use the same flags. The `oslo-…` profiles are the flags that
oslo.messaging 18 declares under its own options. Queues with a single reader (its
fanout and its reply queue) may differ between peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from aiormq.channel import Channel

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError
from gracekit.rpc.transport import Queue, QueueKind

EXPIRES_MS: Final = 1_800_000
"""The broker deletes a fanout or reply queue half an hour after its last consumer, as oslo's."""


class QueueFlags(msgspec.Struct, frozen=True, kw_only=True):
    """How one queue is declared."""

    durable: bool
    arguments: Mapping[str, Any] = msgspec.field(default_factory=dict)


class ExchangeFlags(msgspec.Struct, frozen=True, kw_only=True):
    """How one exchange is declared."""

    type: str
    durable: bool
    auto_delete: bool = False


class Declaration(msgspec.Struct, frozen=True):
    """A queue or exchange that a profile declares."""

    name: str
    flags: QueueFlags | ExchangeFlags

    def __str__(self) -> str:
        kind = "queue" if isinstance(self.flags, QueueFlags) else "exchange"
        return f"{kind} {self.name!r}"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How a deployment declares its exchanges and queues.

    Attributes:
        name: Its name in URL and settings.
        exchange_durable: Whether the control exchange is durable.
        fanout_durable: Whether fanout exchanges are durable; in every profile they are
            auto-deleted.
        topic: Flags of shared, directed and notification queues.
        own: Flags of fanout and reply queues.
        dead_letters: Whether rejected and expired requests go to `<topic>_dead`. Notifications
            never do.
    """

    name: str
    exchange_durable: bool = True
    fanout_durable: bool = False
    topic: QueueFlags
    own: QueueFlags
    dead_letters: bool = False

    @property
    def control(self) -> ExchangeFlags:
        """How the control exchange is declared."""
        return ExchangeFlags(type="topic", durable=self.exchange_durable)

    @property
    def fanout(self) -> ExchangeFlags:
        """How a topic's fanout exchange is declared; it is deleted with its last queue."""
        return ExchangeFlags(type="fanout", durable=self.fanout_durable, auto_delete=True)

    def flags_of(self, queue: Queue) -> QueueFlags:
        """How *queue* is declared."""
        if queue.kind in {QueueKind.FANOUT, QueueKind.REPLY}:
            return self.own
        if not self.dead_letters or queue.kind is QueueKind.NOTIFICATION:
            # Listeners of oslo.messaging also declare notification queues, without dead-letter
            # arguments: if we added those, the broker would refuse either them or us.
            return self.topic
        dead = {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": dead_letter_queue(queue.topic),
        }
        return QueueFlags(durable=self.topic.durable, arguments={**self.topic.arguments, **dead})


_CLASSIC: Final = QueueFlags(durable=True)
_TRANSIENT: Final = QueueFlags(durable=False)
_QUORUM: Final = QueueFlags(durable=True, arguments={"x-queue-type": "quorum"})
_OWN_TRANSIENT: Final = QueueFlags(durable=False, arguments={"x-expires": EXPIRES_MS})
_OWN_DURABLE: Final = QueueFlags(durable=True, arguments={"x-expires": EXPIRES_MS})
_OWN_QUORUM: Final = QueueFlags(
    durable=True, arguments={"x-queue-type": "quorum", "x-expires": EXPIRES_MS}
)

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(name="durable", topic=_CLASSIC, own=_OWN_DURABLE, dead_letters=True),
            # A classic durable queue is not available while its node is down.
            Profile(name="quorum", topic=_QUORUM, own=_OWN_QUORUM, dead_letters=True),
            Profile(
                name="oslo-transient", topic=_TRANSIENT, own=_OWN_TRANSIENT, exchange_durable=False
            ),
            Profile(name="oslo-durable", topic=_CLASSIC, own=_OWN_TRANSIENT),
            Profile(name="oslo-durable-all", topic=_CLASSIC, own=_OWN_QUORUM, fanout_durable=True),
            Profile(name="oslo-quorum", topic=_QUORUM, own=_OWN_TRANSIENT),
            Profile(name="oslo-quorum-all", topic=_QUORUM, own=_OWN_QUORUM, fanout_durable=True),
        )
    }
)


def profile_named(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: there is none.
    """
    if name in PROFILES:
        return PROFILES[name]
    raise ConfigError(
        f"declare profile {name!r} is none of {', '.join(PROFILES)}{did_you_mean(name, PROFILES)}"
    )


def dead_letter_queue(topic: str) -> str:
    """The queue that keeps rejected and expired requests of *topic* for operators."""
    return f"{topic}_dead"


def fanout_exchange(topic: str) -> str:
    """The exchange of a topic's fanouts; as in oslo, its name lacks the control exchange's."""
    return f"{topic}_fanout"


class Topology:
    """Declares exchanges and queues with a profile's flags.

    Args:
        profile: The flags.
        exchange: Name of the control exchange.

    Attributes:
        control: The control exchange.
    """

    def __init__(self, profile: Profile, exchange: str) -> None:
        self.profile: Final = profile
        self.control: Final = Declaration(exchange, profile.control)

    def fanout(self, topic: str) -> Declaration:
        """A topic's fanout exchange; the broker deletes it with its last queue."""
        return Declaration(fanout_exchange(topic), self.profile.fanout)

    def exchange_of(self, queue: Queue) -> Declaration | None:
        """The exchange that *queue* is bound to; None for the default one, which always exists."""
        match queue.kind:
            case QueueKind.SHARED | QueueKind.DIRECTED | QueueKind.NOTIFICATION:
                return self.control
            case QueueKind.FANOUT:
                return self.fanout(queue.topic)
            case QueueKind.REPLY:
                return None

    def declarations(self, queue: Queue) -> list[Declaration]:
        """What must exist for *queue*: its exchange, its dead-letter queue if any, and itself."""
        exchange = self.exchange_of(queue)
        return [*([] if exchange is None else [exchange]), *self._queues(queue)]

    def _queues(self, queue: Queue) -> Iterator[Declaration]:
        if self.profile.dead_letters and queue.kind in {QueueKind.SHARED, QueueKind.DIRECTED}:
            yield Declaration(dead_letter_queue(queue.topic), self.profile.topic)
        yield Declaration(queue.name, self.profile.flags_of(queue))

    async def declare(
        self, channel: Channel, declaration: Declaration, *, passive: bool = False
    ) -> None:
        """Declare one queue or exchange; if *passive*, only ask whether it exists."""
        flags = declaration.flags
        if isinstance(flags, QueueFlags):
            await channel.queue_declare(
                declaration.name,
                durable=flags.durable,
                arguments=dict(flags.arguments) or None,
                passive=passive,
            )
        else:
            await channel.exchange_declare(
                declaration.name,
                exchange_type=flags.type,
                durable=flags.durable,
                auto_delete=flags.auto_delete,
                passive=passive,
            )

    async def declare_queue(self, channel: Channel, queue: Queue) -> None:
        """Declare *queue*, its dead-letter queue if any, and its binding."""
        for one in self._queues(queue):
            await self.declare(channel, one)
        await self.bind(channel, queue)

    async def bind(self, channel: Channel, queue: Queue) -> None:
        """Bind the existing *queue* to its exchange, which is declared first."""
        exchange = self.exchange_of(queue)
        if exchange is not None:
            await self.declare(channel, exchange)
            key = queue.topic if queue.kind is QueueKind.FANOUT else queue.name
            await channel.queue_bind(queue.name, exchange.name, routing_key=key)
