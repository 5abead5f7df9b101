"""Compares what exists on a broker with what we would declare, before anything is declared.

A start declares a dozen queues and exchanges, one after the other. If RabbitMQ refused
one of them in the middle, those before it would stay, with the flags of the wrong
profile, and would block the start with the right one. So a start first compares all
that exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity, ChannelPreconditionFailed

from gracekit.errors import ConfigError, DependencyError
from gracekit.rpc.amqp.bounds import bounded, close_channel, said
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import Declaration, Topology
from gracekit.rpc.transport import Queue

ANSWER_S: Final = 10.0


class ExistingEntities:
    """The queues and exchanges that exist already, of those that some queues need.

    Args:
        link: The connection to ask on.
        topology: Says what we would declare.
    """

    def __init__(self, link: Link, topology: Topology) -> None:
        self._link = link
        self._topology = topology
        self._channel: Channel | None = None

    async def compare(self, queues: Sequence[Queue]) -> None:
        """Compare what exists of *queues*, their dead-letter queues and their exchanges.

        Nothing is created, unless somebody deletes an entity between our two questions about it.

        Raises:
            ConfigError: some have other flags than our profile declares.
            DependencyError: the broker gives no answer.
        """
        needed = [one for queue in queues for one in self._topology.declarations(queue)]
        differing: dict[str, str] = {}
        try:
            for name, declaration in {str(one): one for one in needed}.items():
                if await self._exists(declaration):
                    difference = await self._difference(declaration)
                    if difference:
                        differing[name] = difference
        finally:
            await self._close()
        if differing:
            raise self._refusal(differing)

    async def _exists(self, declaration: Declaration) -> bool:
        try:
            await self._ask(declaration, passive=True)
        except ChannelNotFoundEntity:  # or its node is down: then the declaration fails later
            return False
        except AMQPError as error:
            raise DependencyError(f"question about {declaration}: {said(error)}") from error
        return True

    async def _difference(self, declaration: Declaration) -> str:
        """The broker's refusal of other flags; empty if there is none.

        Any other error comes again when the entity is declared, and is explained there.
        """
        try:
            await self._ask(declaration, passive=False)
        except ChannelPreconditionFailed as error:
            return said(error)
        except AMQPError:
            pass
        return ""

    async def _ask(self, declaration: Declaration, *, passive: bool) -> None:
        if self._channel is None:
            self._channel = await bounded(self._link.channel(), ANSWER_S, "opening of a channel")
        asked = self._topology.declare(self._channel, declaration, passive=passive)
        try:
            await bounded(asked, ANSWER_S, f"question about {declaration}")
        except AMQPError:  # a refusal closes the channel
            await self._close()
            raise

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await close_channel(channel, ANSWER_S)

    def _refusal(self, differing: Mapping[str, str]) -> ConfigError:
        names = [*differing]
        listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
        exist, them = ("exist", "these") if names[1:] else ("exists", "it")
        return ConfigError(
            f"{listed} {exist} with other flags than profile {self._topology.profile.name!r} "
            f"declares: {next(iter(differing.values()))}; nothing was declared. Choose the profile "
            f"that fits (`gracekit doctor` names it), or delete {them} once nobody uses {them}"
        )
