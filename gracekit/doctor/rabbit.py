"""Checks of a transport on RabbitMQ: the connection, and what the broker answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from gracekit.config.oslo import DURABLE_OPTIONS
from gracekit.config.settings import Settings
from gracekit.config.urls import is_loopback
from gracekit.doctor import rabbit_version
from gracekit.doctor.finding import Finding, Level, fail, ok, skip, told, warn
from gracekit.doctor.queue_file import judge
from gracekit.doctor.rabbit_broker import BrokerReport, Node, inquire
from gracekit.doctor.rabbit_entities import (
    BrokerAnswer,
    BrokerEntity,
    Fit,
    Topic,
    check_profile,
    entities_of,
    fitting,
    listed,
    queue_entity,
)
from gracekit.doctor.store_runs import Runs
from gracekit.errors import ConfigError, GracekitError
from gracekit.exits import ExitCode
from gracekit.rpc.amqp.url import TLS_PORT, Broker, read_url
from gracekit.rpc.transport import announced_queues, directed_queue
from gracekit.service import Service
from gracekit.store.location import StoreLocation

STOPPED: Final = "see the broker's log, and run doctor again"
ALLOW: Final = (
    "give the user configure, write and read on what the service declares "
    "(rabbitmqctl set_permissions)"
)
WAKE: Final = (
    "start a run with that `host` (or `instance`), which reads the queue and runs what waits; if "
    "the host does not come back: docs/operating.md, Remove what old hosts have left"
)
MOST_AWAY: Final = 50
"""Of so many other names on record, the newest, the queues are asked about."""
_UNKNOWN: Final = BrokerAnswer(fit=Fit.UNCLEAR)
_IN_URL: Final = frozenset({"profile", *DURABLE_OPTIONS})
UNREACHABLE: Final = (
    "see that the broker runs there and that host, port and firewall are right; a TLS port "
    f"({TLS_PORT} by default) wants amqps://"
)
MEND: Final = "mend GRACEKIT_TRANSPORT_URL"


def topics_of(settings: Settings, runs: Runs, service: Service | None) -> list[Topic]:
    """The two topics of *service*; if it is None, the topics of the runs on record."""
    if service is not None:
        pairs = {(service.topic, settings.ops_topic_of(service.topic))}
    else:
        pairs = {(run.topic, run.ops_topic) for run in runs.all}
    instances = {settings.instance or f"{settings.host}-0", *(one.instance for one in runs.living)}
    named = list(dict.fromkeys([settings.host, *sorted(instances)]))
    host, queues = settings.host, "all" if service is None else service.queues
    return [
        topic
        for main, ops in sorted(pairs)
        for topic in (
            Topic(
                name=main,
                hosts=[host],
                is_shared=queues == "all",
                announced=announced_queues(main, ops, host, queues=queues),
                away=_away(runs, main, [host]),
            ),
            Topic(name=ops, hosts=named, away=_away(runs, ops, named), is_ops=True),
        )
    ]


def _away(runs: Runs, topic: str, named: Sequence[str]) -> list[str]:
    """The other hosts on record with a queue of *topic*, on the ops topic also instances."""
    names = dict.fromkeys(
        name
        for run in runs.all  # newest first
        for name in {run.topic: (run.host,), run.ops_topic: (run.host, run.instance)}.get(topic, ())
    )
    return [name for name in names if name not in named]


class ConnectionChecks:
    """Checks of the connection to the broker of *settings*; each method is a check.

    Args:
        settings: Our settings.
        runs: The runs of the store.
        service: None if it was not named.
        store: Identity of the store; None if it is in no file, or does not exist yet.

    Attributes:
        broker: None if the URL is wrong.
        checks: The checks of its answers; None if no node accepted the login.
    """

    def __init__(
        self, settings: Settings, runs: Runs, service: Service | None, *, store: str | None
    ) -> None:
        self.broker: Broker | None = None
        self.checks: BrokerChecks | None = None
        self._settings = settings
        self._service = service
        self._topics = topics_of(settings, runs, service)
        self._store = "" if store is None else store

    def check_url(self) -> Iterator[Finding]:
        """Check the transport URL."""
        settings = self._settings
        try:
            self.broker = broker = read_url(
                settings.transport_url, exchange=settings.exchange, profile=settings.declare_profile
            )
        except ConfigError as error:
            yield from told_with("URL", error)
            return
        yield ok(
            "URL",
            f"{broker.shown}: vhost {broker.vhost}, exchange {broker.exchange}, profile "
            f"{broker.profile.name}",
        )
        yield check_tls(broker)

    def check_nodes(self) -> Iterator[Finding]:
        """Connect to each host, and query the first that answers."""
        if self.broker is None:
            return
        report = asyncio.run(
            inquire(
                self.broker,
                entities_of(self._topics, self.broker.exchange, self._store),
                [queue for topic in self._topics for queue in topic.announced],
                None if StoreLocation(self._settings).path is None else self._store,
                away=[
                    queue_entity(queue)
                    for topic in self._topics
                    for queue in topic.away_queues[:MOST_AWAY]
                ],
            )
        )
        some = any(node.error is None for node in report.nodes)
        for node in report.nodes:
            yield from check_node(node, others=some)
        if some:
            self.checks = BrokerChecks(
                self._settings, self._service, self.broker, self._topics, report
            )


class BrokerChecks:
    """Checks of a broker's answers; each method named `check_` is a check.

    Args:
        settings: Our settings.
        service: None if it was not named.
        broker: The broker.
        topics: The known topics of our service.
        report: The answers, which may be incomplete.
    """

    def __init__(
        self,
        settings: Settings,
        service: Service | None,
        broker: Broker,
        topics: Sequence[Topic],
        report: BrokerReport,
    ) -> None:
        self._settings = settings
        self._service = service
        self._in_url = not _IN_URL.isdisjoint(
            dict(parse_qsl(urlsplit(settings.transport_url).query, keep_blank_values=True))
        )
        self._profile = broker.profile
        self._topics = topics
        self._report = report
        self._version = rabbit_version.read_version(report.newest.version)

    def check_versions(self) -> Iterator[Finding]:
        """Check product and version, and whether the broker accepts transient queues."""
        node = self._report.newest
        found = rabbit_version.check_version(node.product, node.version)
        yield found
        if found.level is not Level.SKIP:
            yield rabbit_version.check_transient(
                self._profile,
                node.version,
                fitting=fitting(self._report.fits) if self._report.compared else (),
                permitted=self._has_transient(),
            )

    def _has_transient(self) -> bool:
        """Whether a transient queue exists as our profile declares it."""
        return any(
            entity.kind == "queue"
            and (flags := entity.flags(self._profile)) is not None
            and not flags.durable
            and answers[self._profile.name].fit is Fit.FITS
            for entity, answers in self._report.fits.items()
        )

    def check_answers(self) -> Iterator[Finding]:
        """Report entities that the broker would not compare, and queries without answers."""
        if self._report.trouble is not None:
            yield fail("broker", str(self._report.trouble), STOPPED, ExitCode.DEPENDENCY)
        forbidden = self._entities(Fit.FORBIDDEN)
        if forbidden:
            yield fail("permissions", f"the user may not declare {listed(forbidden)}", ALLOW)
        locked = self._entities(Fit.LOCKED)
        if locked:
            yield fail(
                "exclusive",
                f"{listed(locked)}: exclusive to another connection",
                "end the program that declared it so, or use another topic",
            )
        for entity in self._entities(Fit.DOWN):
            yield fail(
                "queue", self._said(entity), "bring the broker's node back", ExitCode.DEPENDENCY
            )
        for entity in (*self._entities(Fit.DENIED), *self._entities(Fit.UNCLEAR)):
            yield fail("answer", f"{entity}: {self._said(entity)}", "see the broker's log")

    def _entities(self, fit: Fit) -> list[BrokerEntity]:
        found, fits = self._report.found, self._report.fits
        return [
            entity
            for entity, answer in found.items()
            if fit in {answer.fit, *(one.fit for one in fits.get(entity, {}).values())}
        ]

    def _said(self, entity: BrokerEntity) -> str:
        answers = (self._report.found[entity], *self._report.fits.get(entity, {}).values())
        return next((answer.said for answer in answers if answer.said), "")

    def check_profile(self) -> Finding:
        """Check which profile fits the existing entities."""
        if not self._report.compared:
            return skip("profile", "not all that exists was compared, see above")
        found = check_profile(
            self._profile.name,
            self._report.fits,
            found=self._report.found,
            accepted=rabbit_version.accepted(self._version),
            in_url=self._in_url,
        )
        if found.level is Level.OK and not self._topics:
            return skip("profile", "no topic is known to be ours", "name the MODULE:ATTR")
        new = [topic.name for topic in self._topics if not topic.is_ops and self._is_new(topic)]
        if found.level is Level.OK and self._report.fits and new:
            seen = f"{found.seen}; no queue of topic {', '.join(new)} exists yet"
            return msgspec.structs.replace(found, seen=seen)
        return found

    def _is_new(self, topic: Topic) -> bool:
        """Whether none of its queues exists."""
        return all(self._is_missing(queue_entity(queue)) for queue in topic.queues)

    def check_exchange(self) -> Iterator[Finding]:
        """Warn if the topic's queues exist without our control exchange: others use another one."""
        if not self._report.looked:
            return
        found = self._report.found
        exchange = next((entity for entity in found if entity.is_common), None)
        queues = [
            entity
            for topic in self._topics
            for entity in map(queue_entity, topic.queues)
            if not topic.is_ops and entity in found and found[entity].fit is Fit.FITS
        ]
        if queues and exchange is not None and self._is_missing(exchange):
            verb = "exist" if queues[1:] else "exists"
            yield warn(
                "control exchange",
                f"{listed(queues)} {verb}, and exchange {exchange.name}, which the start would "
                "make, does not: programs that use these queues send by another exchange, and "
                "what they send to a queue that only this service has made does not arrive",
                "set GRACEKIT_EXCHANGE, or exchange= in the URL, to their control_exchange "
                "(rabbitmqctl list_bindings shows it); if somebody has deleted the exchange, the "
                "start makes it again",
            )

    def check_delivery_limit(self) -> Iterator[Finding]:
        """Check for quorum queues that drop messages after too many deliveries."""
        return rabbit_version.check_delivery_limit(self._profile, self._version)

    def check_consumer_timeout(self) -> Iterator[Finding]:
        """Check methods that are acked at their end against the broker's consumer_timeout."""
        if self._service is not None:
            methods = self._service.methods
            yield from rabbit_version.check_consumer_timeout(self._profile, self._version, methods)

    def check_waiting(self) -> Iterator[Finding]:
        """Report the requests that no consumer has taken, also those to other hosts."""
        if not self._report.looked or not self._topics:
            return
        queues = [queue_entity(queue) for topic in self._topics for queue in topic.queues]
        counts = [(self._messages(entity), entity.name) for entity in queues]
        waiting = [f"{number} in {name}" for number, name in counts if number]
        away = [
            (answer.messages, entity.name, not answer.consumers)
            for entity, answer in self._report.away.items()
            if answer.messages
        ]
        waiting += [
            f"{number} in {name}{' (nobody reads it)' if unread else ''}"
            for number, name, unread in away
        ]
        seen = (", ".join(waiting) or "no message waits") + self._not_asked()
        if any(unread for _, _, unread in away):
            yield warn("waiting", seen, WAKE)
        else:
            yield ok("waiting", seen)

    def _not_asked(self) -> str:
        names = max(len(topic.away) for topic in self._topics) - MOST_AWAY
        return f"; older names on record not asked about: {names}" if names > 0 else ""

    def check_directed(self) -> Iterator[Finding]:
        """Report the queue of requests to this host, which an earlier worker may have had."""
        if not self._report.looked:
            return
        for topic in self._topics:
            first, queue = topic.queues[0], directed_queue(topic.name, self._settings.host)
            if topic.is_ops or self._is_missing(queue_entity(first)):
                continue
            name = queue.name
            if not self._is_missing(queue_entity(queue)):
                yield ok("directed queue", f"requests to this host come by {name}")
                continue
            seen = (
                f"{topic.name} exists, and {name}, the queue of requests to this host, does not: "
                "no worker has run here, or under another host name"
            )
            if self._settings.origin("host") == "default" and not self._profile.dead_letters:
                yield warn(
                    "directed queue",
                    seen,
                    "if an oslo.messaging worker ran on this host, set GRACEKIT_HOST to its "
                    f"server= name: requests to that name wait in {topic.name}.NAME, and nobody "
                    "would read them; on a new host there is nothing to do",
                )
            else:
                yield ok("directed queue", f"{seen}; the start makes it")

    def _is_missing(self, entity: BrokerEntity) -> bool:
        return self._report.found.get(entity, _UNKNOWN).fit is Fit.MISSING

    def check_dead_letters(self) -> Iterator[Finding]:
        """Report rejected and expired requests."""
        if not self._report.looked or not self._topics:
            return
        counts = [(self._messages(topic.dead), topic.dead.name) for topic in self._topics]
        dead = [f"{number} in {name}" for number, name in counts if number]
        if dead:
            yield warn(
                "dead letters",
                f"{', '.join(dead)}: requests that were rejected, expired or came back too often",
                "find their senders: docs/rabbitmq.md has programs that list them, remove one, or "
                "send them again; `gracekit tasks --state rejected` says why the service refused "
                "some. They stay until somebody takes or purges them",
            )
        elif self._profile.dead_letters:
            yield ok("dead letters", "none")
        else:
            yield ok(
                "dead letters",
                f"profile {self._profile.name} keeps none: what is rejected or expires is gone",
            )

    def _messages(self, entity: BrokerEntity) -> int:
        return self._report.found.get(entity, _UNKNOWN).messages

    def check_readers(self) -> Finding:
        """Check for readers of our shared queues that use another store."""
        check = "foreign readers"
        location = StoreLocation(self._settings)
        if location.is_memory:
            return skip(check, "a store in memory cannot be shared, and a start does not check")
        if location.path is None:
            return skip(check, f"only a start asks {location.name} which store it is, and checks")
        if not self._topics:
            return skip(check, "no queue is known to be ours", "name the MODULE:ATTR")
        if self._report.foreign is None:
            return skip(check, "they were not counted, see above")
        queues = [queue.name for topic in self._topics for queue in topic.announced]
        return judge(self._settings, self._report.foreign, queues, self._service)


# -- the connection --------------------------------------------------------------------


def check_tls(broker: Broker) -> Finding:
    """Check that the connection cannot be read by others, and that the broker is authenticated."""
    tls = broker.tls
    if tls is None:
        remote = [str(host) for host in broker.hosts if not is_loopback(host.host)]
        if not remote:
            return ok("TLS", "none, and none is needed on this machine")
        return warn(
            "TLS",
            f"none to {', '.join(remote)}: others on the network can read password and requests",
            f"write amqps:// (port {TLS_PORT} by default), and cafile= for your own authority",
        )
    if not tls.verify:
        return warn(
            "TLS",
            "verify=none: others on the network can pass for the broker, and get the password",
            "leave verify= out, and write cafile= for your own authority",
        )
    return ok("TLS", f"certificate and host name are checked against {tls.cafile or 'the system'}")


def check_node(node: Node, *, others: bool) -> Iterator[Finding]:
    """Check that *node* accepts the login; only a warning if *others* do."""
    check = f"broker {node.host}"
    if node.error is None:
        yield ok(check, "it lets us in")
        return
    for one in told_with(check, node.error):
        yield warn(one.check, f"{one.seen}; another host answers", one.remedy) if others else one


def told_with(check: str, error: GracekitError) -> Iterator[Finding]:
    """One FAIL for each line of *error*, each with a remedy."""
    wrong = isinstance(error, ConfigError)
    code = ExitCode.CONFIG if wrong else ExitCode.DEPENDENCY
    for one in told(check, error, code):
        yield fail(check, one.seen, one.remedy or (MEND if wrong else UNREACHABLE), code)
