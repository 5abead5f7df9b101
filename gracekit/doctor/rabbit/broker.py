"""Asks a broker what is there, and how it is declared. Makes nothing, and is bounded in time.

First it is asked passively what exists, and only that is then compared; see `answers` for why
this makes nothing, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError
from pamqp.commands import Queue as QueueFrames

from gracekit.clock import Clock
from gracekit.doctor.rabbit.answers import EXCHANGE_GUARD, QUEUE_GUARD, Answer, Fit, read_refusal
from gracekit.doctor.rabbit.things import Flags, Thing
from gracekit.doctor.rabbit.versions import is_accepted, read_version
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.rpc.amqp.bounds import bounded
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import PROFILES, ExchangeFlags, Profile
from gracekit.rpc.amqp.transport import find_foreign
from gracekit.rpc.amqp.url import Broker, Host
from gracekit.rpc.readers import Reader
from gracekit.rpc.transport import Queue
from gracekit.telemetry.catalogue import LOGGER
from gracekit.telemetry.telemetry import Telemetry

CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0
TOTAL_S: Final = 30.0
"""Of all questions; a broker far away is then looked at in part."""

Answers = dict[str, Answer]
"""How one thing compares with what each profile declares, by the profile's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host of the URL.

    Attributes:
        error: Why there is no connection; None if there was one.
        product: As it calls itself: `RabbitMQ`.
        version: `3.10.8`; empty where it does not say.
    """

    host: Host
    error: GracekitError | None = None
    product: str = ""
    version: str = ""


@dataclass(slots=True, kw_only=True)
class Picture:
    """What a broker has said, as far as it came.

    Attributes:
        nodes: As the URL names them.
        found: What there is under each name.
        looked: Whether `found` has all names.
        compared: Whether `fits` is complete.
        fits: For what exists: how it compares with our profile, and with all others where
            ours will not do.
        foreign: Who reads a shared queue into another store; None if that was not asked.
        trouble: Why not all was asked.
    """

    nodes: Sequence[Node]
    found: dict[Thing, Answer] = field(default_factory=dict)
    looked: bool = False
    compared: bool = False
    fits: dict[Thing, Answers] = field(default_factory=dict)
    foreign: list[Reader] | None = None
    trouble: GracekitError | None = None

    @property
    def newest(self) -> Node:
        """Of the nodes that answered, in the midst of an upgrade the one that refuses most."""
        answered = [node for node in self.nodes if node.error is None]
        return max(answered, key=lambda node: read_version(node.version))


async def inquire(
    broker: Broker, things: Sequence[Thing], shared: Sequence[Queue], store: str | None
) -> Picture:
    """Ask all that is to be known.

    Args:
        broker: Where.
        things: What to ask about.
        shared: Queues whose readers are to be judged.
        store: Identity of the store into which we would read them; None if nobody is to be
            judged by it.
    """
    with _quiet():
        links = [_link(broker, host) for host in broker.hosts]
        nodes = await asyncio.gather(*map(_connect, links, broker.hosts))
        picture = Picture(nodes=nodes)
        try:
            for link, node in zip(links, nodes, strict=True):
                if node.error is None and not isinstance(link, GracekitError):
                    await _ask(picture, Desk(link, broker), broker, things, shared, store)
                    break
        finally:
            opened = [link for link in links if isinstance(link, Link)]
            await asyncio.gather(*(link.stop() for link in opened))
    return picture


def _link(broker: Broker, host: Host) -> Link | GracekitError:
    one = replace(broker, hosts=(host,), connect_timeout_s=min(CONNECT_S, broker.connect_timeout_s))
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


async def _ask(
    picture: Picture,
    desk: Desk,
    broker: Broker,
    things: Sequence[Thing],
    shared: Sequence[Queue],
    store: str | None,
) -> None:
    try:
        async with asyncio.timeout(TOTAL_S):
            for thing in things:
                picture.found[thing] = await desk.look(thing)
            picture.looked = True
            await _compare(picture, desk, broker.profile)
            picture.compared = True
            if store is not None:
                picture.foreign = await _foreign(desk, shared, store)
    except TimeoutError:
        picture.trouble = DependencyError(f"not all was asked within {TOTAL_S:g} s")
    except GracekitError as error:
        picture.trouble = error


async def _foreign(desk: Desk, shared: Sequence[Queue], store: str) -> list[Reader]:
    found = await asyncio.gather(*(find_foreign(queue, store, desk.readers_of) for queue in shared))
    return [reader for readers in found for reader in readers]


async def _compare(picture: Picture, desk: Desk, ours: Profile) -> None:
    """With our profile, and with the others only if one is to be chosen: the broker logs it all."""
    existing = [thing for thing, answer in picture.found.items() if answer.fit is Fit.FITS]
    for thing in existing:
        picture.fits[thing] = {ours.name: await desk.compare(thing, thing.flags(ours))}
    differs = any(answers[ours.name].fit is Fit.DIFFERS for answers in picture.fits.values())
    if differs or not is_accepted(ours, read_version(picture.newest.version)):
        for thing in existing:
            picture.fits[thing] |= await _compare_others(thing, picture.fits[thing], desk)


async def _compare_others(thing: Thing, known: Answers, desk: Desk) -> Answers:
    """Profiles that declare *thing* alike are one question."""
    asked = [(thing.flags(PROFILES[name]), answer) for name, answer in known.items()]
    answers: Answers = {}
    for name, profile in PROFILES.items():
        flags = thing.flags(profile)
        answer = next((answer for one, answer in asked if one == flags), None)
        if answer is None:
            answer = await desk.compare(thing, flags)
            asked.append((flags, answer))
        answers[name] = answer
    return answers


class Desk:
    """Where questions are asked, each on a channel of its own, which a refusal closes.

    Args:
        link: A connection.
        broker: What was connected to; its users are in no answer.
    """

    def __init__(self, link: Link, broker: Broker) -> None:
        self._link = link
        self._users = {host.user for host in broker.hosts}
        self._answer_s = min(ANSWER_S, broker.connect_timeout_s)

    async def look(self, thing: Thing) -> Answer:
        """Whether *thing* exists; if so, FITS."""

        async def ask(channel: Channel) -> Answer:
            if thing.kind == "exchange":
                await channel.exchange_declare(thing.name, passive=True)
                return Answer(fit=Fit.FITS)
            return _counted(await channel.queue_declare(thing.name, passive=True))

        return await self._ask(ask, str(thing))

    async def compare(self, thing: Thing, flags: Flags | None) -> Answer:
        """How *thing* compares with *flags*; what is not declared at all fits."""

        async def ask(channel: Channel) -> Answer:
            if isinstance(flags, ExchangeFlags):
                await channel.exchange_declare(
                    thing.name,
                    exchange_type=flags.type,
                    durable=flags.durable,
                    auto_delete=flags.auto_delete,
                    arguments=dict(EXCHANGE_GUARD),
                )
                return Answer(fit=Fit.FITS)
            assert flags is not None
            arguments = {**flags.arguments, **QUEUE_GUARD}
            return _counted(
                await channel.queue_declare(thing.name, durable=flags.durable, arguments=arguments)
            )

        return Answer(fit=Fit.FITS) if flags is None else await self._ask(ask, str(thing))

    async def readers_of(self, name: str) -> int:
        """How many consumers the queue of that name has; 0 where there is none."""
        return (await self.look(Thing("queue", name, lambda _: None))).consumers

    async def _ask(self, ask: Callable[[Channel], Awaitable[Answer]], what: str) -> Answer:
        """Ask, and read a refusal.

        Raises:
            DependencyError: no answer in time, or the connection was lost.
        """

        async def on_a_channel() -> Answer:
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


def _counted(answer: QueueFrames.DeclareOk) -> Answer:
    return Answer(
        fit=Fit.FITS, messages=answer.message_count or 0, consumers=answer.consumer_count or 0
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of the client and the link: what they would say is a finding."""
    loggers = [logging.getLogger(name) for name in ("aiormq", "aio_pika", LOGGER)]
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
