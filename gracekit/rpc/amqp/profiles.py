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
    exchange_durable: bool
    fanout_durable: bool
    topic: QueueFlags
    own: QueueFlags
    dead_letters: bool

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
            Profile(
                name="durable",
                exchange_durable=True,
                fanout_durable=False,
                topic=_CLASSIC,
                own=_OWN_DURABLE,
                dead_letters=True,
            ),
            Profile(
                name="quorum",
                exchange_durable=True,
                fanout_durable=False,
                topic=_QUORUM,
                # A classic durable queue is not available while its node is down.
                own=_OWN_QUORUM,
                dead_letters=True,
            ),
            Profile(
                name="oslo-transient",
                exchange_durable=False,
                fanout_durable=False,
                topic=_TRANSIENT,
                own=_OWN_TRANSIENT,
                dead_letters=False,
            ),
            Profile(
                name="oslo-durable",
                exchange_durable=True,
                fanout_durable=False,
                topic=_CLASSIC,
                own=_OWN_TRANSIENT,
                dead_letters=False,
            ),
            Profile(
                name="oslo-durable-all",
                exchange_durable=True,
                fanout_durable=True,
                topic=_CLASSIC,
                own=_OWN_QUORUM,
                dead_letters=False,
            ),
            Profile(
                name="oslo-quorum",
                exchange_durable=True,
                fanout_durable=False,
                topic=_QUORUM,
                own=_OWN_TRANSIENT,
                dead_letters=False,
            ),
            Profile(
                name="oslo-quorum-all",
                exchange_durable=True,
                fanout_durable=True,
                topic=_QUORUM,
                own=_OWN_QUORUM,
                dead_letters=False,
            ),
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
    """

    def __init__(self, profile: Profile, exchange: str) -> None:
        self.profile: Final = profile
        self.exchange: Final = exchange

    def declarations(self, queue: Queue) -> Iterator[Declaration]:
        """What must exist for *queue*: its exchange, its dead-letter queue if any, and itself."""
        match queue.kind:
            case QueueKind.SHARED | QueueKind.DIRECTED | QueueKind.NOTIFICATION:
                yield Declaration(self.exchange, self.profile.control)
            case QueueKind.FANOUT:
                yield Declaration(fanout_exchange(queue.topic), self.profile.fanout)
            case QueueKind.REPLY:
                pass  # the default exchange always exists
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
        if self.profile.dead_letters and queue.kind in {QueueKind.SHARED, QueueKind.DIRECTED}:
            dead = Declaration(dead_letter_queue(queue.topic), self.profile.topic)
            await self.declare(channel, dead)
        await self.declare(channel, Declaration(queue.name, self.profile.flags_of(queue)))
        await self.bind(channel, queue)

    def exchange_of(self, queue: Queue) -> str:
        """The exchange that *queue* is bound to; empty for the default one, which always exists."""
        match queue.kind:
            case QueueKind.SHARED | QueueKind.DIRECTED | QueueKind.NOTIFICATION:
                return self.exchange
            case QueueKind.FANOUT:
                return fanout_exchange(queue.topic)
            case QueueKind.REPLY:
                return ""

    async def bind(self, channel: Channel, queue: Queue) -> None:
        """Bind the existing *queue* to its exchange, which is declared first."""
        match queue.kind:
            case QueueKind.SHARED | QueueKind.DIRECTED | QueueKind.NOTIFICATION:
                await self.declare_control_exchange(channel)
                await channel.queue_bind(queue.name, self.exchange, routing_key=queue.name)
            case QueueKind.FANOUT:
                await self.declare_fanout_exchange(channel, queue.topic)
                await channel.queue_bind(
                    queue.name, fanout_exchange(queue.topic), routing_key=queue.topic
                )
            case QueueKind.REPLY:
                pass  # every queue is bound to the default exchange

    async def declare_control_exchange(self, channel: Channel) -> None:
        """Declare the control exchange."""
        await self.declare(channel, Declaration(self.exchange, self.profile.control))

    async def declare_fanout_exchange(self, channel: Channel, topic: str) -> None:
        """Declare a topic's fanout exchange; the broker deletes it with its last queue."""
        await self.declare(channel, Declaration(fanout_exchange(topic), self.profile.fanout))
