"""Queries a broker for existing queues and exchanges and their flags. It creates nothing.

All queries together are bounded in time. Passive declares find out what exists; only that is then
compared. `answers` explains why the comparison cannot create anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError
from pamqp.commands import Queue as QueueFrames

from gracekit.clock import Clock
from gracekit.doctor.rabbit_entities import (
    EXCHANGE_GUARD,
    QUEUE_GUARD,
    BrokerAnswer,
    BrokerEntity,
    Fit,
    Flags,
    read_refusal,
)
from gracekit.doctor.rabbit_version import is_accepted, read_version
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.rpc.amqp.amqp_transport import find_foreign
from gracekit.rpc.amqp.bounds import bounded
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import PROFILES, ExchangeFlags, Profile
from gracekit.rpc.amqp.url import Broker, Host
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.rpc.transport import Queue
from gracekit.telemetry.catalogue import LOGGER
from gracekit.telemetry.telemetry import Telemetry

CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0
TOTAL_S: Final = 30.0
"""Seconds for all queries; on a slow connection some stay unanswered."""

BrokerAnswers = dict[str, BrokerAnswer]
"""By profile: how one entity compares with what the profile declares."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the URL.

    Attributes:
        error: Why the connection failed; None if it did not.
        product: The product that it reports: `RabbitMQ`.
        version: `3.10.8`; empty if it reports none.
    """

    host: Host
    error: GracekitError | None = None
    product: str = ""
    version: str = ""


class BrokerReport(msgspec.Struct, kw_only=True):
    """The answers of a broker, which may be incomplete.

    Attributes:
        nodes: The hosts of the URL.
        found: For each name, whether it exists.
        looked: Whether `found` is complete.
        compared: Whether `fits` is complete.
        fits: For each existing entity, how it compares with our profile, and with all others if
            ours cannot be used.
        foreign: Readers of a shared queue with another store; None if that was not queried.
        away: The answers about the queues of other hosts on record.
        trouble: Why the answers are incomplete; None if they are complete.
    """

    nodes: Sequence[Node]
    found: dict[BrokerEntity, BrokerAnswer] = msgspec.field(default_factory=dict)
    looked: bool = False
    compared: bool = False
    fits: dict[BrokerEntity, BrokerAnswers] = msgspec.field(default_factory=dict)
    foreign: list[QueueReader] | None = None
    away: dict[BrokerEntity, BrokerAnswer] = msgspec.field(default_factory=dict)
    trouble: GracekitError | None = None

    @property
    def newest(self) -> Node:
        """The answering node with the newest version: in an upgrade it refuses most."""
        answered = [node for node in self.nodes if node.error is None]
        return max(answered, key=lambda node: read_version(node.version))


async def inquire(
    broker: Broker,
    entities: Sequence[BrokerEntity],
    shared: Sequence[Queue],
    store: str | None,
    *,
    away: Sequence[BrokerEntity] = (),
) -> BrokerReport:
    """Connect to all hosts, and query the first that answers.

    Args:
        broker: The broker.
        entities: The entities to query.
        shared: Shared queues whose readers are to be checked.
        store: Identity of our store; None to skip the check of readers.
        away: Queues of other hosts, of which only the messages are counted.
    """
    with _quiet():
        links = [_link(broker, host) for host in broker.hosts]
        nodes = await asyncio.gather(*map(_connect, links, broker.hosts))
        report = BrokerReport(nodes=nodes)
        try:
            for link, node in zip(links, nodes, strict=True):
                if node.error is None and not isinstance(link, GracekitError):
                    inspector = BrokerInspector(link, broker)
                    async with _answered(report):
                        await _ask(report, inspector, broker.profile, entities)
                        if store is not None:
                            report.foreign = await _foreign(inspector, shared, store)
                        for entity in away:
                            report.away[entity] = await inspector.look(entity)
                    break
        finally:
            opened = [link for link in links if isinstance(link, Link)]
            await asyncio.gather(*(link.stop() for link in opened))
    return report


def _link(broker: Broker, host: Host) -> Link | GracekitError:
    one = msgspec.structs.replace(
        broker, hosts=(host,), connect_timeout_s=min(CONNECT_S, broker.connect_timeout_s)
    )
    try:
        return Link(one, purpose="look", label="gracekit", clock=Clock(), telemetry=Telemetry())
    except ConfigError as error:  # its certificates
        return error


async def _connect(link: Link | GracekitError, host: Host) -> Node:
    if not isinstance(link, Link):
        return Node(host=host, error=link)
    try:
        await link.start()
    except GracekitError as error:
        return Node(host=host, error=error)
    product, version = (str(link.server.get(name, "")) for name in ("product", "version"))
    return Node(host=host, product=product, version=version)


@contextlib.asynccontextmanager
async def _answered(report: BrokerReport) -> AsyncIterator[None]:
    """Bound the queries in it in time, and record in *report* why some have no answer."""
    try:
        async with asyncio.timeout(TOTAL_S):
            yield
    except TimeoutError:
        report.trouble = DependencyError(f"not all was asked within {TOTAL_S:g} s")
    except GracekitError as error:
        report.trouble = error


async def _ask(
    report: BrokerReport,
    inspector: BrokerInspector,
    ours: Profile,
    entities: Sequence[BrokerEntity],
) -> None:
    for entity in entities:
        report.found[entity] = await inspector.look(entity)
    report.looked = True
    await _compare(report, inspector, ours)
    report.compared = True


async def _foreign(
    inspector: BrokerInspector, shared: Sequence[Queue], store: str
) -> list[QueueReader]:
    found = await asyncio.gather(
        *(find_foreign(queue, store, inspector.readers_of) for queue in shared)
    )
    return [reader for readers in found for reader in readers]


async def _compare(report: BrokerReport, inspector: BrokerInspector, ours: Profile) -> None:
    """Compare with our profile, and with others only if needed: the broker logs each refusal."""
    existing = [entity for entity, answer in report.found.items() if answer.fit is Fit.FITS]
    for entity in existing:
        report.fits[entity] = {ours.name: await inspector.compare(entity, entity.flags(ours))}
    differs = any(answers[ours.name].fit is Fit.DIFFERS for answers in report.fits.values())
    if differs or not is_accepted(ours, read_version(report.newest.version)):
        for entity in existing:
            report.fits[entity] |= await _compare_others(entity, report.fits[entity], inspector)


async def _compare_others(
    entity: BrokerEntity, known: BrokerAnswers, inspector: BrokerInspector
) -> BrokerAnswers:
    """Compare with all other profiles; those that declare *entity* alike share one query."""
    asked = [(entity.flags(PROFILES[name]), answer) for name, answer in known.items()]
    answers: BrokerAnswers = {}
    for name, profile in PROFILES.items():
        flags = entity.flags(profile)
        answer = next((answer for one, answer in asked if one == flags), None)
        if answer is None:
            answer = await inspector.compare(entity, flags)
            asked.append((flags, answer))
        answers[name] = answer
    return answers


class BrokerInspector:
    """Sends queries, each on a new channel, because a refusal closes the channel.

    Args:
        link: A connection.
        broker: Its broker; the names of its users are removed from answers.
    """

    def __init__(self, link: Link, broker: Broker) -> None:
        self._link = link
        self._users = {host.user for host in broker.hosts}
        self._answer_s = min(ANSWER_S, broker.connect_timeout_s)

    async def look(self, entity: BrokerEntity) -> BrokerAnswer:
        """Whether *entity* exists; if so, FITS."""

        async def ask(channel: Channel) -> BrokerAnswer:
            if entity.kind == "exchange":
                await channel.exchange_declare(entity.name, passive=True)
                return BrokerAnswer(fit=Fit.FITS)
            return _counted(await channel.queue_declare(entity.name, passive=True))

        return await self._ask(ask, str(entity))

    async def compare(self, entity: BrokerEntity, flags: Flags | None) -> BrokerAnswer:
        """How *entity* compares with *flags*; FITS if *flags* is None."""

        async def ask(channel: Channel) -> BrokerAnswer:
            if isinstance(flags, ExchangeFlags):
                await channel.exchange_declare(
                    entity.name,
                    exchange_type=flags.type,
                    durable=flags.durable,
                    auto_delete=flags.auto_delete,
                    arguments=dict(EXCHANGE_GUARD),
                )
                return BrokerAnswer(fit=Fit.FITS)
            assert flags is not None
            arguments = {**flags.arguments, **QUEUE_GUARD}
            return _counted(
                await channel.queue_declare(entity.name, durable=flags.durable, arguments=arguments)
            )

        return BrokerAnswer(fit=Fit.FITS) if flags is None else await self._ask(ask, str(entity))

    async def readers_of(self, name: str) -> int:
        """The number of consumers of a queue; 0 if it does not exist."""
        return (await self.look(BrokerEntity("queue", name, lambda _: None))).consumers

    async def _ask(
        self, ask: Callable[[Channel], Awaitable[BrokerAnswer]], what: str
    ) -> BrokerAnswer:
        """Send a query, and interpret a refusal.

        Raises:
            DependencyError: no answer in time, or the connection was lost.
        """

        async def on_a_channel() -> BrokerAnswer:
            channel = await self._link.channel()
            answer = await ask(channel)
            await channel.close()
            return answer

        try:
            return await bounded(on_a_channel(), self._answer_s, f"question about {what}")
        except AMQPError as error:
            return read_refusal(self._hide(str(error.args[-1]) if error.args else str(error)))

    def _hide(self, text: str) -> str:
        for user in self._users:
            text = text.replace(f"user '{user}'", "the user")
        return text


def _counted(answer: QueueFrames.DeclareOk) -> BrokerAnswer:
    return BrokerAnswer(
        fit=Fit.FITS, messages=answer.message_count or 0, consumers=answer.consumer_count or 0
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log lines of client and link, as their errors become findings."""
    loggers = [logging.getLogger(name) for name in ("aiormq", LOGGER)]
    before = [(logger, logger.propagate) for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in before:
            logger.removeHandler(silence)
            logger.propagate = propagate
