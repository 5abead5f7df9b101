"""The queues and exchanges of a service on RabbitMQ, and how each profile declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gracekit.rpc.amqp.profiles import (
    ExchangeFlags,
    Profile,
    QueueFlags,
    dead_letter_queue,
    fanout_exchange,
)
from gracekit.rpc.amqp.transport import marks_of
from gracekit.rpc.transport import Queue, directed_queue, shared_queue

Flags = QueueFlags | ExchangeFlags

SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class BrokerEntity:
    """A queue or exchange with a fixed name, used by every run of the service.

    Attributes:
        kind: `queue` or `exchange`.
        flags: Returns the flags of a profile; None if the profile does not declare it.
        is_common: Whether all services of the deployment use it, as the control exchange.
    """

    kind: str
    name: str
    flags: Callable[[Profile], Flags | None] = field(compare=False, repr=False)
    is_common: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, with its entities that have fixed names.

    Attributes:
        hosts: Hosts with a directed queue; on the ops topic also instances.
        is_ops: Whether it is the ops topic, which no worker of oslo.messaging has.
        is_shared: Whether the service reads the queue that all hosts read.
        announced: Its service's queues that two stores must not read.
        away: Other names on record; they may have left queues.
    """

    name: str
    hosts: Sequence[str]
    is_ops: bool = False
    is_shared: bool = True
    announced: Sequence[Queue] = ()
    away: Sequence[str] = ()

    @property
    def queues(self) -> list[Queue]:
        """The queues of requests, without fanout queues, whose names are random."""
        shared = [shared_queue(self.name)] if self.is_shared else []
        return [*shared, *(directed_queue(self.name, host) for host in self.hosts)]

    @property
    def away_queues(self) -> list[Queue]:
        """The queues of the names that are `away`, which may not exist."""
        return [directed_queue(self.name, name) for name in self.away]

    @property
    def dead(self) -> BrokerEntity:
        """The queue of rejected and expired requests."""
        return BrokerEntity("queue", dead_letter_queue(self.name), _dead)


def entities_of(topics: Iterable[Topic], exchange: str, store: str) -> list[BrokerEntity]:
    """All entities with fixed names that a start declares, in the order of the output."""
    return [
        BrokerEntity("exchange", exchange, lambda profile: profile.control, is_common=True),
        *(entity for topic in topics for entity in _entities_of(topic, store)),
    ]


def queue_entity(queue: Queue) -> BrokerEntity:
    """*queue* as a BrokerEntity."""
    return BrokerEntity("queue", queue.name, lambda profile: profile.flags_of(queue))


def _entities_of(topic: Topic, store: str) -> Iterator[BrokerEntity]:
    fanout = BrokerEntity("exchange", fanout_exchange(topic.name), lambda profile: profile.fanout)
    marks = (mark for queue in topic.announced for mark in marks_of(queue, store))
    yield from (*map(queue_entity, topic.queues), fanout, topic.dead, *map(queue_entity, marks))


def _dead(profile: Profile) -> QueueFlags | None:
    return profile.topic if profile.dead_letters else None


def listed(entities: Iterable[BrokerEntity], most: int = SHOWN) -> str:
    """`queue a, exchange b and 2 more`; names at most *most*."""
    names = [str(entity) for entity in entities]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
