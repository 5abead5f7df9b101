"""The table of all settings, and the rules that they must keep together.

Everything that is wrong is reported at once, each with its remedy, because an operator who mends
one line at a time restarts a service once for each.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from gracekit.config.admin import OFF, admin_problems, parse_admin, parse_certificate
from gracekit.config.choices import (
    AdminOpen,
    ErrorDetails,
    LivenessPreset,
    LogFailures,
    LogFormat,
    LogLevel,
    LoopName,
    OnUserStop,
    choices_of,
)
from gracekit.config.postgres_url import read_postgres_url
from gracekit.config.timings import BEATS, DRIFT, MARGIN_S, PRESETS, Timings, timings_of
from gracekit.config.urls import (
    STORE,
    STORES,
    TRANSPORT,
    TRANSPORTS,
    UrlKind,
    absolute,
    checked_file,
    kind_of,
    parse_url,
    shown_url,
)
from gracekit.config.values import (
    DECLARE_PROFILE,
    EXCHANGE,
    HOST,
    LEAST_BODY_BYTES,
    LONGEST_QUEUE,
    PATTERN_SAID,
    PREFIX,
    TOPIC,
    Problem,
    check_topic,
    did_you_mean,
    format_duration,
    is_pattern,
    parse_count,
    parse_duration,
    parse_optional_count,
    parse_optional_duration,
    parse_optional_name,
    parse_text,
    parse_truth,
    parse_word,
    parse_words,
    problem,
)
from gracekit.errors import ConfigError

LONGEST_NOTIFICATION_TOPIC: Final = LONGEST_QUEUE - len(".critical")
"""Characters: behind it stands the priority, in the name of a queue."""


def _setting(default: object, parse: Callable[[Any], object], *, zero: bool = False) -> Any:
    """A field that knows how to read itself; *zero* says that 0 is a sensible value."""
    return field(default=default, metadata={"parse": parse, "zero": zero})


def _text(default: str) -> Any:
    return _setting(default, parse_text)


def _url(default: str) -> Any:
    return _setting(default, parse_url)


def _choice(choice: Any, default: str, parse: Callable[[Any], object] = parse_word) -> Any:
    """A field for one of the words of *choice*."""
    return field(default=default, metadata={"parse": parse, "choices": choices_of(choice)})


def _seconds(default: float, *, zero: bool = False) -> Any:
    return _setting(default, parse_duration, zero=zero)


def _count(default: int) -> Any:
    return _setting(default, parse_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run; checked as a whole when built.

    A field is set by the variable `GRACEKIT_` and its name in capitals without the unit `_s`, for
    example `GRACEKIT_DRAIN_TIMEOUT=25s`. In options and files its name may be written with or
    without `_s`. Fields that end in `_s` are seconds.

    Attributes:
        transport_url: Where requests come from: `sqlite:///file`, `memory://`, or a RabbitMQ
            broker by `amqp://`, `amqps://` or `rabbit://`.
        store_url: Where the journal is kept: `sqlite:///file`, `memory://`, or
            `postgresql://user@host/database`. It must not be the file of the transport.
        run_directory: Directory beside a store in PostgreSQL for what concerns this host alone:
            locks that prove which runs live, their doors and wake-up pipes. It must be on a local
            disk. All runs and commands of one host need the same one, and another host needs
            another one. If it is unset, it is `gracekit-runs` in the working directory. A store in
            a file has its own, `{store}-runs`.
        host: Name of this host. The queue for requests to this host alone is named after it;
            several runs of one host may share that queue.
        instance: Name of this process among those of its service. If it is unset, the run takes
            the first free `{host}-{n}`.
        ops_topic: Name of the ops topic. `{topic}` stands for the service's topic.
        exchange: Name of the control exchange on RabbitMQ, to which clients send their calls and
            casts. OpenStack sites use `openstack`. `?exchange=` in the URL overrides it.
        declare_profile: How exchanges and queues are declared on RabbitMQ: `durable`, `quorum`,
            or as oslo.messaging does it: `oslo-transient` (oslo's default), `oslo-durable`,
            `oslo-durable-all`, `oslo-quorum`, `oslo-quorum-all`. `?profile=` in the URL overrides
            it.
        drain_timeout_s: How long a drain waits for running tasks, counted from the request to
            stop. Then it cancels them. 0 cancels them at once.
        handover_grace_s: How long a drain waits for cancelled handlers to return.
        handover_flush_s: How long a drain then waits until the last outcomes are written and the
            last replies are sent.
        exit_margin_s: Time after that to close everything. At its end, the hard limit, the process
            is ended.
        ops_quiet_timeout_s: When nothing else runs any more, a drain keeps the ops topic open for
            the ops requests that run, or come within this time, until they have ended. It awaits
            later ones, too, behind a closed topic, and all at most until its deadline.
        cancel_ok_timeout_s: How long a drain waits for the transport to confirm that an intake is
            closed.
        kill_after_s: Time between the platform's request to stop and its kill:
            terminationGracePeriodSeconds, TimeoutStopSec. A start is refused if a drain could take
            longer. Leave it unset if it is unknown.
        start_timeout_s: How long each `on_start` hook may take; a longer one fails the start.
        stop_hook_timeout_s: How long each `on_stop` hook may take. The hard limit may end it
            earlier.
        max_accepted: Requests of the service's topic that this process may have accepted at one
            time, waiting and running ones together. Further ones wait in their queue. If it is
            unset, they are 1000, or `max_running` if that is more. With `accept_unshared_store`
            they are then only as many as can run: `max_running`, and if one of the methods is a
            plain function, at most `threads`.
        max_running: Handlers of the service's topic that run at one time. A reload that changes it
            also changes the limit of accepted requests that follows from it.
        ops_max_accepted: As `max_accepted`, for the ops topic.
        ops_max_running: As `max_running`, for the ops topic.
        threads: Threads for plain (`def`) handlers of the service's topic. Periodic jobs, and the
            hooks that recovery calls, have as many of their own.
        ops_threads: Threads for plain (`def`) handlers of the ops topic.
        prefetch: Messages that may be read and not acknowledged at one time, for each of the two
            topics; at most as many as may be accepted.
        prefetch_bytes: Bytes that may be read and not accepted at one time, for each of the two
            topics. Above it, reading from RabbitMQ pauses.
        accept_wait_s: How long a message that was read waits for a place (`max_accepted`) before it
            is given back to its queue.
        max_body_bytes: Size of the largest message that is parsed. A larger one is refused.
        max_attempts: After so many crashes of its process without progress, an interrupted task is
            ended as ERRORED. But if other tasks ran beside it at the last crash, one of them may
            have caused it: then the task gets further attempts, and is ended after ten times as
            many crashes at the latest. A method's own `max_attempts=` overrides it.
        retention_s: How long ended tasks stay on record, and with them their results and the
            detection of duplicates. An ended request takes about 330 bytes of disk, and its result
            beside that; the arguments of one that failed are kept, too. Requests a second times
            seconds of retention times bytes is the size of the store: 100 a second with results of
            1 KB are about 80 GiB in 7 days. `gracekit doctor` says it for your store.
        retention_after_s: Extra time for which a record is kept when it is older than `retention`.
            Only time in which a run of the service takes requests counts. Reason: while no run
            takes requests, a duplicate of a recorded request may wait in a queue. If the record
            were removed before the duplicate is read, the request would be run a second time.
        keep_failed_arguments: Keep arguments and context of FAILED and ERRORED tasks on record, so
            that `gracekit tasks retry` can run them again.
        startup_reconciliation_enabled: Settle, without being asked, unfinished tasks of earlier
            runs, and resources whose status says that an operation is in progress although none is.
            If it is off, only `gracekit reconcile` settles them.
        startup_reconciliation_wait_seconds: How long a task that was interrupted uncleanly is left
            alone before it is probed or run again; a method's `settle=` overrides that. After a
            start, the first pass over resources also waits so long from the moment at which the
            service is ready.
        reconcile_every_s: Time between two looks for unfinished tasks of dead runs, and for records
            to remove.
        reconciliation_interval_s: Time from the end of one pass over the resources of a host to the
            next pass. 0 makes a pass after each start only.
        reconcile_at_once: Resources of one kind that a pass settles at one time.
        look_every_s: Time between two checks whether this run may still act, or another run has
            taken over its tasks. The run also records in the store that it is alive, but less
            often: normally every 15 s.
        liveness: How soon other hosts may conclude that this run is dead: `normal`, or `slow` for
            a database server whose failover takes longer than about 5 s. It is the preset for
            `beat`, `fail_after`, `hard_after` and `dead_after`: 3 s, 12 s, 20 s and 30 s, or 15 s,
            75 s, 90 s and 120 s. These five settings matter only for a store in PostgreSQL.
        beat_s: Time between two signs of life (*beats*) that this run writes into the store. By
            them the runs of other hosts know that it lives. If it is unset, `liveness` gives it, as
            it does for the next three.
        fail_after_s: If no beat has succeeded for this time, the run cancels its handlers, because
            others may soon take its tasks over. This time, and the next two, count from the start
            of the last beat that succeeded.
        hard_after_s: If no beat has succeeded for this time, the kernel ends the process, whatever
            hangs in it.
        dead_after_s: If no beat of a run has succeeded for this time, the runs of other hosts may
            declare it dead, and take its tasks over.
        on_user_stop: What becomes of an instance that a user has stopped from inside, by a handler
            that calls `ctx.request_stop`: `down`, it stays down until an operator starts it, or
            `restart`. Only an instance that `instance` names can stay down.
        progress_every_s: Time between two progress lines in the log of a drain.
        host_gone_after_s: How long a host may have no run before tasks for this host only are given
            up (ERRORED).
        fanout_gone_after_s: A fanout that an instance has accepted and not finished waits for the
            next run of that instance. If the instance has had no run for this time, another run of
            the service ends the task: as CANCELLED if it was not started, otherwise as ERRORED.
        probe_timeout_s: How long one probe of recovery may take. A method's own `probe_timeout=`
            overrides it.
        use_pending_state: Park a task whose handler raises NoCapacity: it waits as PENDING. If it
            is off, the task has FAILED.
        pending_timeout_s: How long a parked task may wait, counted from the first time that it was
            parked. A method's own `pending_timeout=` overrides it.
        pending_max: Tasks of the service that may be parked at one time. If there are so many, a
            further NoCapacity fails its task.
        notification_topic: Topic of the notifications about parked tasks. `{topic}` stands for
            the service's topic. Their queues are named for it: `scheduler-notifications.info`.
        notification_context: Keys of a caller's context that a notification shows, separated by
            commas.
        accept_unshared_store: Start although a living process reads the same queue into
            another store. Duplicates are then not found, and resources not locked, across the two
            stores.
        rpc_ping_enabled: Answer `oslo_rpc_server_ping` with "pong", as an oslo server does.
        error_details: What a caller gets of an exception that a handler raises: `full`, `message`
            (neither traceback nor arguments), or `none` (only that the request has failed). The
            record keeps everything.
        dedupe_context: Keys of a caller's context, separated by commas. If a request id comes
            again, the caller must have the same values for these keys as the first time, and a key
            that was missing must be missing again. Otherwise the request is refused.
        reply_queues: Names of queues that replies may go to besides `reply_...`, separated by
            commas; `*` stands for any characters.
        admin: Address of the HTTP endpoint: `off`, `unix:/path`, `127.0.0.1:9701`, or
            `0.0.0.0:9701`, which needs `admin_token_file`. The endpoint needs `gracekit[web]`.
        admin_token_file: File with tokens for the HTTP API: `name:token:scope` lines, mode 0600.
        admin_tls: Certificate and key of the HTTP endpoint: `cert.pem,key.pem`.
        admin_open: What the HTTP endpoint answers without a token: `probes` (and metrics), or
            `nothing`.
        admin_hosts: Host names by which clients may address the HTTP endpoint, separated by
            commas. IP addresses, localhost and the name of the host are always allowed.
        admin_read_only: Let the HTTP endpoint show state and refuse all actions.
        loop: Event loop on which `gracekit run` and `svc.run()` run the service: `asyncio`,
            `uvloop`, which needs `gracekit[uvloop]`, or `auto` (uvloop if it is installed, else
            asyncio). An embedded Runtime runs on the loop of its program.
        log_format: Format of the log: `text`, `json`, or `auto` (text on a terminal, else JSON).
            If it is set, it replaces the logging that the service's module has configured.
        log_level: Lowest level that `gracekit run` logs: `debug`, `info`, `warning`, `error` or
            `critical`.
        log_failures: What is logged of a FAILED task: `line` (class, message and request id),
            `traceback` (the same with the traceback), or `off`.
        origins: Field name to the place that its value came from.
        service_defaults: The service's own defaults.
        doubts: Options of oslo.config that have no effect here, a sentence each; see `from_oslo`.
    """

    transport_url: str = _url(TRANSPORT)
    store_url: str = _url(STORE)
    run_directory: str | None = _setting(None, parse_optional_name)
    host: str = field(default_factory=socket.gethostname, metadata={"parse": parse_text})
    instance: str | None = _setting(None, parse_optional_name)
    ops_topic: str = _text("{topic}-ops")
    exchange: str = _text(EXCHANGE)
    declare_profile: str = _text(DECLARE_PROFILE)

    drain_timeout_s: float = _seconds(25.0, zero=True)
    handover_grace_s: float = _seconds(2.0)
    handover_flush_s: float = _seconds(1.0)
    exit_margin_s: float = _seconds(1.0)
    ops_quiet_timeout_s: float = _seconds(5.0)
    cancel_ok_timeout_s: float = _seconds(5.0)
    kill_after_s: float | None = _setting(None, parse_optional_duration)
    start_timeout_s: float = _seconds(60.0)
    stop_hook_timeout_s: float = _seconds(5.0)

    max_accepted: int | None = _setting(None, parse_optional_count)
    max_running: int = _count(100)
    ops_max_accepted: int = _count(1000)
    ops_max_running: int = _count(100)
    threads: int = _count(40)
    ops_threads: int = _count(10)
    prefetch: int = _count(256)
    prefetch_bytes: int = _count(64 * 1024 * 1024)
    accept_wait_s: float = _seconds(30.0)
    max_body_bytes: int = _count(1024 * 1024)
    max_attempts: int = _count(3)

    retention_s: float = _seconds(7 * 86400.0)
    retention_after_s: float = _seconds(600.0)
    keep_failed_arguments: bool = _setting(default=True, parse=parse_truth)
    startup_reconciliation_enabled: bool = _setting(default=True, parse=parse_truth)
    startup_reconciliation_wait_seconds: float = _seconds(10.0, zero=True)
    reconcile_every_s: float = _seconds(30.0)
    reconciliation_interval_s: float = _seconds(600.0, zero=True)
    reconcile_at_once: int = _count(16)
    look_every_s: float = _seconds(1.0)
    liveness: LivenessPreset = _choice(LivenessPreset, "normal")
    beat_s: float | None = _setting(None, parse_optional_duration)
    fail_after_s: float | None = _setting(None, parse_optional_duration)
    hard_after_s: float | None = _setting(None, parse_optional_duration)
    dead_after_s: float | None = _setting(None, parse_optional_duration)
    on_user_stop: OnUserStop = _choice(OnUserStop, "down")
    progress_every_s: float = _seconds(5.0)
    host_gone_after_s: float = _seconds(7 * 86400.0)
    fanout_gone_after_s: float = _seconds(60.0)
    probe_timeout_s: float = _seconds(30.0)
    use_pending_state: bool = _setting(default=False, parse=parse_truth)
    pending_timeout_s: float = _seconds(3600.0)
    pending_max: int = _count(1000)
    notification_topic: str = _text("{topic}-notifications")
    notification_context: str = _setting("project_id,user_id,request_id", parse_words)
    accept_unshared_store: bool = _setting(default=False, parse=parse_truth)
    rpc_ping_enabled: bool = _setting(default=False, parse=parse_truth)
    error_details: ErrorDetails = _choice(ErrorDetails, "full")
    dedupe_context: str = _setting("user_id,project_id", parse_words)
    reply_queues: str = _setting("", parse_words)
    admin: str = _setting(OFF, parse_admin)
    admin_token_file: str | None = _setting(None, parse_optional_name)
    admin_tls: str | None = _setting(None, parse_certificate)
    admin_open: AdminOpen = _choice(AdminOpen, "probes")
    admin_hosts: str = _setting("", parse_words)
    admin_read_only: bool = _setting(default=False, parse=parse_truth)
    loop: LoopName = _choice(LoopName, "asyncio")
    log_format: LogFormat = _choice(LogFormat, "auto", parse_text)
    log_level: LogLevel = _choice(LogLevel, "info")
    log_failures: LogFailures = _choice(LogFailures, "line")

    origins: Mapping[str, str] = field(
        default_factory=dict, repr=False, compare=False, metadata={"parse": None}
    )
    service_defaults: Mapping[str, object] = field(
        default_factory=dict, repr=False, compare=False, metadata={"parse": None}
    )

    doubts: tuple[str, ...] = field(default=(), repr=False, compare=False, metadata={"parse": None})

    @classmethod
    def from_oslo(
        cls,
        conf: Any,
        *,
        defaults: Mapping[str, object] = MappingProxyType({}),
        env: Mapping[str, str] | None = None,
        **given: object,
    ) -> Settings:
        """The settings of an OpenStack service, from its oslo.config.

        It reads `host`, `transport_url`, `control_exchange`, `graceful_shutdown_timeout`,
        `rpc_ping_enabled`, and of [oslo_messaging_rabbit] durable and quorum flags, TLS, heartbeat
        and prefetch. Arguments win over variables of the environment, these over what is set in
        *conf*, and that over the service's defaults. What the service's code has set as a default
        in *conf* (`cfg.set_defaults`) counts if *defaults* say nothing. oslo's own defaults count
        only for host, URL, exchange and profile. `doubts` names the options that are set and not
        used.

        Args:
            conf: A `cfg.ConfigOpts` that has parsed its files, and knows oslo.messaging's options.
            defaults: Those of the service, `svc.defaults`.
            env: The environment; None for this process's own.
            given: Settings by name; durations as `"5m"`.

        Raises:
            ConfigError: at least one value is wrong or unknown; names them all.
        """
        from gracekit.config.loading import load  # noqa: PLC0415 - it reads this table

        return load(given, env, defaults=defaults, oslo=conf)

    def __new__(cls, **given: object) -> Self:
        """Refuse names that are no field in words of their own, before `__init__` does."""
        unknown = [name for name in given if name not in _FIELDS]
        if unknown:
            raise ConfigError("\n".join(map(_no_field, unknown)))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = list(_wrong_types(self)) or [found.text for found in _problems(self)]
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def handover_s(self) -> float:
        """Seconds from the drain's deadline until everything known is written."""
        return self.handover_grace_s + self.handover_flush_s

    @property
    def hard_limit_s(self) -> float:
        """Seconds from the stop request until the process is gone, whatever hangs."""
        return self.drain_timeout_s + self.handover_s + self.exit_margin_s

    @property
    def timings(self) -> Timings:
        """When this run writes its beats, and what follows if it cannot."""
        return timings_of(
            self.liveness,
            beat_s=self.beat_s,
            fail_after_s=self.fail_after_s,
            hard_after_s=self.hard_after_s,
            dead_after_s=self.dead_after_s,
        )

    def ops_topic_of(self, topic: str) -> str:
        """Name of the ops topic that belongs to *topic*.

        Raises:
            ConfigError: together they are too long, or requests of the one would be read as
                requests of the other.
        """
        name = check_topic(self.ops_topic.replace("{topic}", topic), "set GRACEKIT_OPS_TOPIC")
        if name in {topic, f"{topic}.{self.host}", f"{topic}.{self.instance}"}:
            raise ConfigError(
                f"ops_topic = {self.ops_topic!r} is {name!r}, which is a queue of new requests of "
                f"the service {topic!r}: in a drain they would be refused as unknown; set "
                "GRACEKIT_OPS_TOPIC to a name of its own such as '{topic}-ops'"
            )
        return name

    def notification_topic_of(self, topic: str) -> str:
        """Name of the topic of notifications that belongs to *topic*.

        Raises:
            ConfigError: it is no name, or requests would be read as notifications.
        """
        name = self.notification_topic.replace("{topic}", topic)
        # No exchange is named for it, so it may be longer than other topics.
        is_name = len(name) <= LONGEST_NOTIFICATION_TOPIC and HOST.fullmatch(name)
        wrong = ""
        if name in {topic, self.ops_topic_of(topic)}:
            wrong = f"names {name[:50]!r}, to which requests are sent"
        elif not is_name or is_pattern(name):
            wrong = (
                f"makes a topic of {len(name)} characters, {name[:50]!r}, and queues can be named "
                f"for 1 to {LONGEST_NOTIFICATION_TOPIC} of A-Z a-z 0-9 space and _ . : @ # , / + -"
            )
        if wrong:
            raise ConfigError(
                f"notification_topic = {self.notification_topic!r} {wrong}: set "
                "GRACEKIT_NOTIFICATION_TOPIC to one such as '{topic}-notifications'"
            )
        return name

    def origin(self, name: str) -> str:
        """Where the value of field *name* came from: flag, variable, file, service or default."""
        return self.origins.get(name, "default")

    def describe(self) -> Iterator[tuple[str, str, str]]:
        """Name, value as an operator writes it, and origin of every setting; no secrets."""
        for name, setting in SETTINGS.items():
            yield option_name(name), _shown(name, getattr(self, name), setting), self.origin(name)


def _settings() -> dict[str, Field[Any]]:
    return {entry.name: entry for entry in fields(Settings) if entry.metadata["parse"]}


SETTINGS: Final = MappingProxyType(_settings())
_FIELDS: Final = frozenset(entry.name for entry in fields(Settings))


def _shown(name: str, value: object, setting: Field[Any]) -> str:
    if isinstance(value, float) and _is_duration(setting):
        return format_duration(value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "unset"
    return shown_url(str(value)) if name.endswith("_url") else str(value)


def _is_duration(setting: Field[Any]) -> bool:
    return setting.metadata["parse"] in {parse_duration, parse_optional_duration}


def option_name(name: str) -> str:
    """How operators spell field *name* in flags and files: without its unit."""
    return name.removesuffix("_s")


def variable_name(name: str) -> str:
    """How field *name* is spelled in the environment."""
    return PREFIX + option_name(name).upper()


BY_VARIABLE: Final = MappingProxyType({variable_name(name): name for name in SETTINGS})
BY_OPTION: Final = MappingProxyType({option_name(name): name for name in SETTINGS})
# Read elsewhere; and what Kubernetes gives to every pod beside a Service called gracekit-anything.
NOT_OURS: Final = re.compile(
    PREFIX + r"(FAILPOINT|SOAK|CONFIG|APP|TEST_.*"
    r"|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?))"
)


def _no_field(name: str) -> str:
    """What to write instead of a field that `Settings()` does not have."""
    if (unit := f"{name}_s") in SETTINGS:
        return (
            f"Settings() has no {name!r}, only {unit!r}, in seconds: write {unit}=25.0, or read "
            f"text by gracekit.config.load({{{name!r}: '25s'}})"
        )
    return f"Settings() has no {name!r}{did_you_mean(name, _FIELDS)}"


def _wrong_types(settings: Settings) -> Iterator[str]:
    """Values that were given in code, where nobody has read them as a setting's text."""
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        if value is None and setting.default is None:
            continue
        kind, wanted = _kind_of(setting)
        is_truth = isinstance(value, bool)
        if not isinstance(value, kind) or is_truth is not (kind is bool):
            shown = "" if name.endswith("_url") else f" = {value!r}"
            yield (
                f"{name}{shown} is {type(value).__name__}, and Settings() wants {wanted}; text, as "
                "in the environment, is read by gracekit.config.load()"
            )


def _kind_of(setting: Field[Any]) -> tuple[type | tuple[type, ...], str]:
    """Which types it may have, and how that is said."""
    if _is_duration(setting):
        return (int, float), "seconds, such as 25.0"
    if setting.metadata["parse"] in {parse_count, parse_optional_count}:
        return int, "a whole number"
    if setting.metadata["parse"] is parse_truth:
        return bool, "True or False"
    return str, "a text"


class _Draft(Settings):
    """Settings that may be wrong."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Refuse nothing."""


def problems_of(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with settings that have these *values*, by field name, each of its type."""
    return list(_problems(_Draft(**values)))


def _problems(settings: Settings) -> Iterator[Problem]:
    yield from _numbers(settings)
    yield from _names(settings)
    yield from _urls(settings)
    yield from _deadlines(settings)
    yield from admin_problems(
        settings.admin,
        token_file=settings.admin_token_file,
        needs_token=settings.admin_open == "nothing",
    )


def _numbers(settings: Settings) -> Iterator[Problem]:
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        shown, zero = _shown(name, value, setting), setting.metadata.get("zero", False)
        if not 0 <= value < math.inf or (value == 0 and not zero):
            rule = "not negative" if zero else "more than 0"
            yield problem(
                f"{option_name(name)} = {shown} must be {rule}; set {variable_name(name)}", name
            )

    if 0 < settings.max_body_bytes < LEAST_BODY_BYTES:
        yield problem(
            f"max_body_bytes = {settings.max_body_bytes} must be at least {LEAST_BODY_BYTES}: "
            "otherwise hardly a request is small enough to be taken; set GRACEKIT_MAX_BODY_BYTES",
            "max_body_bytes",
        )


def _names(settings: Settings) -> Iterator[Problem]:
    for name in ("host", "instance"):
        value = getattr(settings, name)
        if value is not None and not HOST.fullmatch(value):
            yield problem(
                f"{name} = {value!r} must be 1 to {LONGEST_QUEUE} of A-Z a-z 0-9 space and _ . : "
                f"@ # , / + - because queues are named for it; set {variable_name(name)}",
                name,
            )
        elif value is not None and is_pattern(value):
            yield problem(f"{name} = {value!r} {PATTERN_SAID}; set {variable_name(name)}", name)
    if settings.ops_topic == "{topic}" or not TOPIC.fullmatch(
        settings.ops_topic.replace("{topic}", "topic")
    ):
        yield problem(
            f"ops_topic = {settings.ops_topic!r} must be a name of its own such as "
            "'{topic}-ops' or 'compute-alt'; set GRACEKIT_OPS_TOPIC",
            "ops_topic",
        )
    notifications = settings.notification_topic.replace("{topic}", "topic")
    if not HOST.fullmatch(notifications) or is_pattern(notifications):
        yield problem(
            f"notification_topic = {settings.notification_topic!r} must be a name such as "
            "'{topic}-notifications'; set GRACEKIT_NOTIFICATION_TOPIC",
            "notification_topic",
        )
    for name, setting in SETTINGS.items():
        words = setting.metadata.get("choices")
        if words and (given := getattr(settings, name)) not in words:
            rule = f"{', '.join(words[:-1])} or {words[-1]}"
            yield problem(f"{name} = {given!r} must be {rule}{did_you_mean(given, words)}", name)


def _urls(settings: Settings) -> Iterator[Problem]:
    paths: list[Path] = []
    for name, schemes in (("transport_url", TRANSPORTS), ("store_url", STORES)):
        url = getattr(settings, name)
        try:
            path = checked_file(url, schemes)
            if kind_of(url) is UrlKind.DATABASE:
                read_postgres_url(url)
            paths += [] if path is None else [path]
        except ConfigError as error:
            yield problem(f"{option_name(name)}: {error}", name)
    if len(paths) == 2 and _same_file(*paths):  # noqa: PLR2004 - the two URLs
        yield problem(
            f"transport_url and store_url both name {paths[0]}: the journal needs a file of its "
            "own, with other durability and mode; set GRACEKIT_STORE_URL to another one",
            *("transport_url", "store_url"),
        )
    if settings.run_directory is not None and kind_of(settings.store_url) is UrlKind.FILE:
        yield problem(
            f"run_directory = {settings.run_directory} is for a store in PostgreSQL; a store in a "
            "file has its own beside it: leave GRACEKIT_RUN_DIRECTORY out",
            *("run_directory", "store_url"),
        )
    kinds = kind_of(settings.store_url), kind_of(settings.transport_url)
    if kinds == (UrlKind.MEMORY, UrlKind.FILE):
        yield problem(
            f"store_url = {settings.store_url} forgets at exit what it accepted from "
            f"{shown_url(settings.transport_url)}; set GRACEKIT_STORE_URL to a file, or both "
            "to memory://",
            *("transport_url", "store_url"),
        )


def _same_file(one: Path, other: Path) -> bool:
    return os.path.realpath(absolute(one)) == os.path.realpath(absolute(other))


def _deadlines(settings: Settings) -> Iterator[Problem]:
    for rule in rules(settings):
        if rule.refused and not rule.holds:
            text = f"{rule.said('must be')}: {rule.because}; {rule.remedy}"
            yield problem(text, *rule.about)


ALARM_AFTER_HARD_LIMIT_S: Final = 0.5
"""Seconds from the hard limit to the kernel's alarm, which ends a process that hangs."""


class Rule(NamedTuple):
    """One inequality between settings, with their values.

    Attributes:
        left: `drain_timeout 25s`, the smaller side, as an operator writes it.
        relation: `below`, or `at most`.
        right: `kill_after = 30s`.
        holds: Whether it is kept.
        because: What goes wrong where it is not.
        remedy: What to set.
        about: The fields that it compares, first the one for which it is named.
        refused: Whether nothing starts where it is not kept; else `doctor` warns.
        formula: The rule with names only, if it is no plain sum of the fields.
    """

    left: str
    relation: str
    right: str
    holds: bool
    because: str
    remedy: str
    about: tuple[str, ...]
    refused: bool = False
    formula: str = ""

    def said(self, verb: str) -> str:
        """`drain_timeout 25s must be below kill_after = 30s`, with `must be` as *verb*."""
        return f"{self.left} {verb} {self.relation} {self.right}"


def rules(settings: Settings) -> Iterator[Rule]:
    """Every inequality between settings: what must hold at a start, and what should."""
    if settings.kill_after_s is not None:
        yield _gone_before(settings, settings.kill_after_s)
    if kind_of(settings.store_url) is UrlKind.DATABASE and settings.liveness in PRESETS:
        yield from _signs_of_life(settings)
    if settings.drain_timeout_s:
        for name, because in _WITHIN_A_DRAIN.items():
            yield _at_most(settings, name, "drain_timeout_s", because)
    for name, other, because in _NEVER_USED:
        if getattr(settings, other) is not None:
            yield _at_most(settings, name, other, because)


_WITHIN_A_DRAIN: Final = MappingProxyType(
    {
        "cancel_ok_timeout_s": "an intake that is slow to close is cut off at the drain's deadline",
        "ops_quiet_timeout_s": "at the deadline of a drain the ops topic closes in any case",
        "progress_every_s": "a drain ends before its first progress line",
    }
)
_NEVER_USED: Final = (
    ("max_running", "max_accepted", "no more handlers run than requests are accepted"),
    ("ops_max_running", "ops_max_accepted", "no more handlers run than requests are accepted"),
    ("threads", "max_running", "a handler uses one thread, so some would be unused"),
    ("ops_threads", "ops_max_running", "a handler uses one thread, so some would be unused"),
)


def _at_most(settings: Settings, name: str, other: str, because: str) -> Rule:
    value, limit = getattr(settings, name), getattr(settings, other)
    return Rule(
        left=_side(settings, name),
        relation="at most",
        right=_side(settings, other),
        holds=value <= limit,
        because=because,
        remedy=f"lower {variable_name(name)}, or raise {variable_name(other)}",
        about=(name, other),
    )


_GONE_BEFORE: Final = (
    "drain_timeout_s",
    "handover_grace_s",
    "handover_flush_s",
    "exit_margin_s",
    "kill_after_s",
)
"""The parts of the hard limit, and what their sum must be below."""


def hard_limit_sum(settings: Settings) -> str:
    """`drain_timeout 25s + handover_grace 2s + ... = 29s`."""
    parts = _GONE_BEFORE[:-1]
    total = " + ".join(f"{option_name(n)} {format_duration(getattr(settings, n))}" for n in parts)
    return f"{total} = {format_duration(settings.hard_limit_s)}"


def _gone_before(settings: Settings, kill_s: float) -> Rule:
    limit = settings.hard_limit_s
    return Rule(
        left=hard_limit_sum(settings),
        relation="below",
        right=f"kill_after = {format_duration(kill_s)}",
        holds=limit < kill_s,
        because="the platform would kill the process before it could hand its tasks over",
        remedy=(
            "raise terminationGracePeriodSeconds or TimeoutStopSec, and GRACEKIT_KILL_AFTER with "
            f"it, to {platform_stop_s(settings)}{shorter_drain(settings, kill_s)}"
        ),
        about=_GONE_BEFORE,
        refused=True,
    )


def _signs_of_life(settings: Settings) -> Iterator[Rule]:
    """The rules by which the silence of a run proves to other hosts that it is dead."""
    now, grace_s = settings.timings, settings.handover_grace_s
    fail, hard, dead = map(_exact, (now.fail_s, now.hard_s, now.dead_s))
    later = _later_times(settings)
    yield Rule(
        left=f"{BEATS} * beat {_exact(now.beat_s)} + op {_exact(now.op_s)} = "
        f"{_exact(now.least_fail_s)}",
        relation="at most",
        right=f"fail_after = {fail}",
        holds=now.least_fail_s <= now.fail_s,
        because="two lost beats would be enough to cancel all handlers",
        remedy=f"lower GRACEKIT_BEAT, or set {later}",
        about=("beat_s", "fail_after_s", "liveness"),
        refused=True,
        formula=f"{BEATS} * beat + op at most fail_after; op is 2/3 of beat, but not more than 5s",
    )
    yield Rule(
        left=f"fail_after {fail} + handover_grace {_exact(grace_s)} = "
        f"{_exact(now.least_hard_s(grace_s))}",
        relation="at most",
        right=f"hard_after = {hard}",
        holds=now.least_hard_s(grace_s) <= now.hard_s,
        because="the kernel would end the process while cancelled handlers have time to return",
        remedy=f"lower GRACEKIT_HANDOVER_GRACE, or set {later}",
        about=("fail_after_s", "handover_grace_s", "hard_after_s", "liveness"),
        refused=True,
        formula="fail_after + handover_grace at most hard_after",
    )
    yield Rule(
        left=f"{DRIFT} * hard_after {hard} + {_exact(MARGIN_S)} = {_exact(now.least_dead_s)}",
        relation="at most",
        right=f"dead_after = {dead}",
        holds=now.least_dead_s <= now.dead_s,
        because="others, whose clocks may run 5 % faster, could take tasks over before it ends",
        remedy=f"lower GRACEKIT_HARD_AFTER, or set {later}",
        about=("hard_after_s", "dead_after_s", "liveness"),
        refused=True,
        formula=f"{DRIFT} * hard_after + {_exact(MARGIN_S)} at most dead_after",
    )


def _later_times(settings: Settings) -> str:
    """`GRACEKIT_HARD_AFTER=42s GRACEKIT_DEAD_AFTER=47s`, which keep all three rules."""
    now, late = settings.timings, settings.timings.later(settings.handover_grace_s)
    times = (
        ("fail_after_s", now.fail_s, late.fail_s),
        ("hard_after_s", now.hard_s, late.hard_s),
        ("dead_after_s", now.dead_s, late.dead_s),
    )
    return " ".join(f"{variable_name(name)}={_exact(to)}" for name, at, to in times if to > at)


def _exact(seconds: float) -> str:
    return format_duration(round(seconds, 3))


def last_breath_s(settings: Settings) -> float:
    """Seconds from a stop request until the kernel's alarm ends even a hanging process."""
    return settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S


def platform_stop_s(settings: Settings, *, before_s: float = 0.0) -> int:
    """Seconds for the platform from its stop request to its kill: 1 s above the alarm, rounded up.

    *before_s* pass before the drain begins. Every remedy and every printed file has this number.
    """
    return math.ceil(before_s + last_breath_s(settings) + 1)


def shorter_drain(settings: Settings, kill_s: float) -> str:
    """`, or set GRACEKIT_DRAIN_TIMEOUT=5s`, which ends below *kill_s*; empty if none does."""
    room = math.ceil(kill_s - settings.handover_s - settings.exit_margin_s) - 1
    return f", or set GRACEKIT_DRAIN_TIMEOUT={room}s" if room >= 0 else ""


def _side(settings: Settings, name: str) -> str:
    return f"{option_name(name)} = {_shown(name, getattr(settings, name), SETTINGS[name])}"
