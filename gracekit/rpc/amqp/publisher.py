"""Publishing: confirmed, mandatory and with a timeout, on a connection that has no consumers.

During a memory or disk alarm a broker stops reading from connections that publish. So acks
and cancels, which a drain needs, go by the other connection. If a confirm was lost,
the message is sent again with the same request id, and the receiver's journal
recognises the duplicate.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelPreconditionFailed,
)

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, UnconfirmedError, Undeliverable
from gracekit.rpc.amqp.bounds import said
from gracekit.rpc.amqp.channels import MessageChannel, NackedError, ReturnedError
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.outlet import Outlet
from gracekit.rpc.amqp.profiles import Declaration, Topology
from gracekit.rpc.transport import Message, Queue, QueueKind
from gracekit.telemetry.telemetry import Telemetry

LONGEST_NAME: Final = 255
"""Bytes of the longest queue name that AMQP can carry."""
REPLY_AGAIN_FOR_S: Final = 4.0
"""Seconds for which a reply to a missing queue is retried: its caller may be reconnecting, with
pauses of up to 3.6 s (`backoff.CONNECTION`)."""
GONE_FOR_S: Final = 60.0
"""Seconds for which a reply queue found missing gets one try for each reply, without retries."""
_MOST_GONE: Final = 1000

_REFUSED: Final = (ChannelPreconditionFailed, ChannelAccessRefused)
_PASSING: Final = (AMQPError, DependencyError, NackedError)
"""After these errors a message is sent again, unless the broker refused it."""
_OVERFLOW: Final = "a policy or x-max-length limits it, with the overflow reject-publish"
_LOGINS: Final = (
    "use the login of a client to send requests, and give that of a service the permissions for "
    "answers and notifications (docs/rabbitmq.md has both)"
)
_OF_THE_EXCHANGE: Final = re.compile("(access to|internal) exchange '")
"""The text of refusals that concern an exchange and so all messages to it. Other refusals concern
one message, and do not say which."""


class Publisher:
    """Publishes the messages of one transport.

    Args:
        link: The connection to publish on.
        topology: Names and flags of the exchanges.
        timeout_s: Timeout of one publish in seconds, including reconnections.
    """

    def __init__(
        self,
        link: Link,
        topology: Topology,
        *,
        timeout_s: float,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._link = link
        self._topology = topology
        self._is_quorum = "x-queue-type" in topology.profile.topic.arguments
        self._timeout_s = timeout_s
        self._clock = clock
        self._telemetry = telemetry
        self._outlets: dict[str, Outlet] = {}  # by exchange
        self._stopped = False
        self._under_way: set[asyncio.Timeout] = set()
        self._gone: dict[str, float] = {}  # missing reply queues, and until when not to retry

    def stop(self) -> None:
        """Refuse further publishes; those under way fail at once."""
        self._stopped = True
        for bound in self._under_way:
            if not bound.expired():
                bound.reschedule(0.0)
        for outlet in self._outlets.values():
            outlet.stop()

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`."""
        if len(queue.name.encode()) > LONGEST_NAME:
            raise Undeliverable(f"no queue has a name as long as {queue.name[:50]!r}...")
        try:
            if queue.kind is QueueKind.REPLY:
                await self._reply(queue.name, message)
            elif queue.kind is QueueKind.FANOUT:  # one reader owns it
                await self._send(self._to_queues, queue.name, message)
            else:
                await self._send(self._to_services, queue.name, message)
        except ReturnedError:
            raise self._undeliverable(queue.name) from None
        except NackedError:
            raise DependencyError(
                f"queue {queue.name!r} is full, and the broker refused the message "
                f"({_OVERFLOW}); nothing was kept: send it again when its readers have made room"
            ) from None

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        outlet = self._outlet(self._topology.fanout(topic))
        try:
            await self._send(outlet, topic, message, mandatory=False)
        except ReturnedError:  # without an exchange there are no listeners
            pass
        except NackedError:
            raise UnconfirmedError(
                f"a queue of the fanout to {topic!r} is full ({_OVERFLOW}); other hosts have it"
            ) from None

    @property
    def _to_services(self) -> Outlet:
        return self._outlet(self._topology.control)

    @property
    def _to_queues(self) -> Outlet:
        """The outlet to the default exchange, which always exists."""
        return self._outlet(None)

    def _outlet(self, exchange: Declaration | None) -> Outlet:
        name = "" if exchange is None else exchange.name
        outlet = self._outlets.get(name)
        if outlet is None:
            outlet = self._outlets[name] = Outlet(
                self._link, self._topology, exchange, self._clock, self._telemetry, self._timeout_s
            )
        return outlet

    async def _reply(self, name: str, message: Message) -> None:
        """Publish to a caller's reply queue on the default exchange; the queue may be gone."""
        now = self._clock.loop()
        patient = self._gone.get(name, 0.0) <= now
        until = now + REPLY_AGAIN_FOR_S if patient else now
        while True:
            try:
                await self._send(self._to_queues, name, message)
            except ReturnedError:
                if self._clock.loop() >= until:
                    self._remember_gone(name)
                    raise self._undeliverable(name) from None
                await asyncio.sleep(backoff.PUBLISH_S)
            else:
                self._gone.pop(name, None)
                return

    def _remember_gone(self, name: str) -> None:
        self._gone[name] = self._clock.loop() + GONE_FOR_S
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    async def _send(
        self, outlet: Outlet, key: str, message: Message, *, mandatory: bool = True
    ) -> None:
        """Publish a message, again if needed, until the broker confirms it.

        Raises:
            ReturnedError: no queue takes it.
            NackedError: its queue is full.
            ConfigError: the broker refuses it, or the exchange exists with other flags.
            UnconfirmedError: no confirm in time; the message may be in the queue or not.
            DependencyError: no connection in time; nothing was sent.
        """
        until = self._clock.loop() + self._timeout_s
        channel = None if self._stopped else outlet.ready_channel
        sent = False  # whether the broker may have kept it
        if channel is not None:
            # The fast path of nearly every message. The outlet's watcher bounds the wait, as a
            # timer for each message would cost 4 us.
            try:
                publishing = channel.publish(outlet.exchange, key, message, mandatory=mandatory)
                await outlet.wait_confirm(publishing, key)
            except TimeoutError:
                raise self._not_in_time(key, sent=True) from None
            except _PASSING as error:
                sent = not isinstance(error, NackedError)
                outlet = await self._after_failure(error, outlet, channel, key)
            else:
                return
        await self._send_patiently(
            outlet, key, message, mandatory=mandatory, sent=sent, until=until
        )

    async def _send_patiently(
        self,
        outlet: Outlet,
        key: str,
        message: Message,
        *,
        mandatory: bool,
        sent: bool,
        until: float,
    ) -> None:
        """Publish repeatedly until the message is confirmed, or loop time *until* is reached."""
        bound = asyncio.timeout_at(until)
        self._under_way.add(bound)
        try:
            async with bound:
                while not self._stopped:
                    channel: MessageChannel | None = None
                    before = sent
                    try:
                        async with outlet.lock:
                            channel = await outlet.channel()
                            await self._link.wait_unblocked()  # or each try would add a duplicate
                            await channel.wait_room()
                            publishing = channel.publish(
                                outlet.exchange, key, message, mandatory=mandatory
                            )
                            sent = True
                            if outlet.is_apart:
                                await outlet.wait_word(channel, publishing)
                        await outlet.wait_confirm(publishing, key)
                    except _PASSING as error:
                        sent = before if isinstance(error, NackedError) else sent
                        outlet = await self._after_failure(error, outlet, channel, key)
                    else:
                        return
            raise self._not_in_time(key, sent=sent)
        except (TimeoutError, NackedError) as error:
            if isinstance(error, NackedError) and not sent:
                raise
            raise self._not_in_time(key, sent=sent) from None
        finally:
            self._under_way.discard(bound)

    async def _after_failure(
        self, error: Exception, outlet: Outlet, channel: MessageChannel | None, key: str
    ) -> Outlet:
        """Pause if waiting may help; return the outlet for the next try.

        Raises:
            ConfigError: trying again is useless, as the broker refused this message or all
                messages to this exchange.
        """
        if isinstance(error, NackedError):
            is_fanout = outlet.exchange not in {"", self._topology.control.name}  # others have it
            if outlet.nacked(channel, key) or (is_fanout and not self._is_quorum):
                raise error
        else:
            outlet.forget(channel)
        if isinstance(error, _REFUSED):
            if channel is None or _OF_THE_EXCHANGE.search(said(error)):
                raise self._refused(outlet.exchange, error) from error
            if outlet.is_apart:
                raise self._refused(outlet.exchange, error, key) from error
        self._telemetry.emit("publish.repeated", queue=key, error=said(error))
        if isinstance(error, _REFUSED):
            return outlet.apart
        await asyncio.sleep(self._clock.jitter(backoff.PUBLISH_S))
        return outlet.shared

    def _not_in_time(self, key: str, *, sent: bool) -> UnconfirmedError | DependencyError:
        bound = (
            "before the transport was stopped" if self._stopped else f"within {self._timeout_s:g} s"
        )
        if sent:
            return UnconfirmedError(
                f"the broker did not confirm a message to {key!r} {bound}: it may be in the queue, "
                "or not; send it again under the same request id"
            )
        if self._link.is_up:
            return DependencyError(
                f"the broker took no message {bound}, and nothing was sent to {key!r}: it is "
                "connected and stands still, or a memory or disk alarm blocks it "
                "(rabbitmq-diagnostics alarms); send it again when it goes on"
            )
        return DependencyError(
            f"there was no connection to the broker {bound}, and nothing was sent to {key!r}; "
            "send it again when the broker is back"
        )

    def _refused(self, exchange: str, error: AMQPError, key: str | None = None) -> ConfigError:
        """The error of all messages to *exchange*, or only of those to *key*."""
        to = f"exchange {exchange!r}" if key is None else f"{key!r} on exchange {exchange!r}"
        if isinstance(error, ChannelAccessRefused):
            return ConfigError(
                f"the broker does not let this login send to {to}: {said(error)}; {_LOGINS}"
            )
        if key is not None:
            return ConfigError(
                f"the broker takes no such message to {to}: {said(error)}; see the broker's limits "
                "(max_message_size)"
            )
        return ConfigError(
            f"exchange {exchange!r} cannot be used with profile "
            f"{self._topology.profile.name!r}: {said(error)}; choose the profile and the exchange "
            "that the service's peers use, and see the user's permissions"
        )

    def _undeliverable(self, queue: str) -> Undeliverable:
        return Undeliverable(
            f"no service ever declared queue {queue!r} on exchange {self._topology.control.name!r} "
            f"here, or its owner is gone; start the service once or check the topic, and on both "
            f"sides GRACEKIT_EXCHANGE and the URL's vhost"
        )
