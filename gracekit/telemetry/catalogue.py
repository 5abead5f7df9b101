"""The catalogue of events: names, levels and fields are the contract with operators."""

from __future__ import annotations

import functools
import logging
from types import MappingProxyType
from typing import Final, NamedTuple

from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError

LOGGER: Final = "gracekit"


class Event(NamedTuple):
    """One kind of event.

    Attributes:
        name: `noun.past_participle`, stable.
        level: Of its log line, as in `logging`.
        meaning: One sentence for operators.
        fields: The fields that it may have; `_s` marks seconds.
        kind: Fields by which it is rate-limited: each combination of their values is logged at
            most once a second, with the number of lines left out. None to log every event.
    """

    name: str
    level: int
    meaning: str
    fields: frozenset[str]
    kind: tuple[str, ...] | None = None


def _event(
    name: str, level: int, meaning: str, fields: str = "", *, kind: str | None = None
) -> Event:
    split = None if kind is None else tuple(kind.split())
    return Event(name, level, meaning, frozenset(fields.split()), split)


_D, _I, _W, _E, _C = (
    logging.DEBUG,  # one for each request
    logging.INFO,  # a change of state, or a decision about one task that operators may look for
    logging.WARNING,  # a caller or an operator waits in vain
    logging.ERROR,  # a fault that the run survives
    logging.CRITICAL,  # a fault that ends the run
)
_TASK: Final = "task_id method lane resource attempt"
_SERVICE: Final = (
    _event("service.starting", _I, "A run begins.", "service instance host run loop hard_limit_s"),
    _event(
        "service.doubted",
        _W,
        "A declaration of the service will not have the effect that was probably meant.",
        "text",
    ),
    _event(
        "service.serving", _I, "The service is ready for requests.", "service instance run took_s"
    ),
    _event(
        "service.start_failed", _C, "The start failed; what it began is ended in order.", "error"
    ),
    _event("service.reloaded", _I, "SIGHUP: the settings were read again.", "changed"),
    _event(
        "service.reload_failed",
        _E,
        "SIGHUP: the settings are wrong, so nothing has changed.",
        "error",
    ),
    _event(
        "setting.kept",
        _W,
        "SIGHUP: this setting has a new value, which needs a restart.",
        "setting value wanted",
    ),
    _event("service.quieted", _I, "Intake is closed, and may be resumed."),
    _event("service.stopped", _I, "The run is over.", "service instance run exit_code"),
    _event("signal.received", _I, "A signal came.", "signal"),
    _event(
        "signal.taken",
        _W,
        "Something had blocked a signal, or replaced gracekit's handler of it; it is back.",
        "signal by",
    ),
    _event("signal.hint", _I, "What another signal would do now.", "text"),
    _event(
        "loop.left",
        _E,
        "SystemExit or KeyboardInterrupt of the application left an asyncio task that is no "
        "handler's own, or the event loop was stopped; a drain follows.",
        "error",
    ),
    _event(
        "loop.blocked",
        _W,
        "The event loop was blocked for this long, or slightly longer: a handler did not yield, "
        "or the process was stopped.",
        "blocked_s",
    ),
    _event("service.deaf", _W, "The service cannot read requests, and is not ready.", "lane error"),
    _event("service.hears", _I, "The service reads requests again, and is ready.", "lane"),
    _event(
        "hook.failed",
        _E,
        "A hook of the application raised, with its traceback, or returned a wrong value. For a "
        "function of a kind this is a WARNING, once a pass or an hour for each kind of error.",
        "hook task_id method error",
        kind="hook",
    ),
    _event(
        "job.finished", _D, "A run of a periodic job has ended.", "task_id method outcome ran_s"
    ),
    _event(
        "background.failed",
        _E,
        "A background task failed because of a fault in gracekit; it is started again.",
        "work error again_s",
    ),
    _event(
        "reader.foreign",
        _W,
        "Another process reads one of our queues, but uses another store.",
        "queue by store",
    ),
)
_INTAKE: Final = (
    _event("intake.opened", _I, "Requests of a lane are taken.", "lane"),
    _event("intake.closed", _I, "Requests are no longer taken.", "lane given_back not_started"),
)
_REQUEST: Final = (
    _event(
        "lane.self_blocked",
        _W,
        "Handlers that wait for requests of their own lane have all its places or threads.",
        "lane running",
    ),
    _event("task.started", _D, "Its handler runs.", _TASK),
    _event(
        "task.apart",
        _W,
        "It was running when processes died: it begins alone, and other tasks wait for a while.",
        f"{_TASK} crashes alone for_s",
    ),
    _event(
        "task.interrupted",
        _W,
        "Something other than gracekit cancelled its handler: it counts as crashed. Or no thread "
        "could be started for it: it is called later, and nothing is counted.",
        f"{_TASK} error",
    ),
    _event("task.finished", _D, "Its handler has ended.", f"{_TASK} outcome ran_s"),
    _event(
        "task.result_left_out",
        _W,
        "Its work is done, and its result cannot be sent: the caller gets an error that says so.",
        f"{_TASK} error",
        kind="method",
    ),
    _event(
        "task.failed",
        _W,
        "Its handler raised, or took too long: it is FAILED, and not run again.",
        f"{_TASK} error ran_s",
        kind="method error",
    ),
    _event(
        "task.retried",
        _W,
        "Its handler raised what its method tries again: the task waits, and no run owns it.",
        f"{_TASK} error again_s ran_s",
        kind="method error",
    ),
    _event(
        "task.parked",
        _I,
        "Its handler found no capacity: the task waits as PENDING, and no run owns it.",
        f"{_TASK} parkings waits_s reason ran_s",
    ),
    _event(
        "notifications.failed",
        _W,
        "Notifications about PENDING tasks cannot be sent; they are kept and tried again.",
        "topic error",
    ),
    _event(
        "notification.unsendable",
        _E,
        "No message can carry a notification about a PENDING task: it is dropped, and counted.",
        "task_id method error",
    ),
    _event("notifications.resumed", _I, "Notifications are sent again.", "topic"),
    _event(
        "task.ordered",
        _I,
        "An operator has given an order about a task, such as to cancel it.",
        "task_id method verb by reason state",
    ),
    _event(
        "task.rejected",
        _W,
        "A request was refused for good; `gracekit tasks --state rejected` lists all.",
        "task_id method reason error",
        kind="reason",
    ),
    _event(
        "task.passed_on",
        _I,
        "Only siblings of another version serve a request, so it goes back to the queue, again and "
        "again. After left_s it is refused. Logged for each method at most once a minute.",
        "task_id method queue siblings waited_s left_s",
    ),
    _event("dispatch.failed", _E, "A fault in gracekit made a request fail.", "error", kind=""),
    _event("reply.given_up", _W, "A reply cannot be delivered.", "queue error", kind=""),
    _event("heartbeat.lost", _W, "A heartbeat cannot be delivered.", "queue error", kind=""),
    _event("message.unreadable", _W, "An unreadable message was rejected.", "queue error", kind=""),
)
_BROKER: Final = (
    _event("broker.lost", _W, "A connection to the broker ended.", "purpose error"),
    _event(
        "broker.silent",
        _W,
        "The broker answered nothing and sent nothing; the connection is cut.",
        "purpose what waited_s",
    ),
    _event("broker.unreachable", _W, "Connecting again failed.", "purpose tries error"),
    _event("broker.connected", _I, "The broker is connected again.", "purpose tries"),
    _event("consumer.lost", _W, "A queue's consumer was lost; it is opened again.", "queue error"),
    _event("consumer.refused", _W, "Opening the consumer again failed.", "queue tries error"),
    _event("consumer.resumed", _I, "A queue is read again.", "queue"),
    _event(
        "binding.lost", _W, "An exchange was deleted; it is made and bound again.", "queue exchange"
    ),
    _event("binding.refused", _W, "A queue cannot be bound to its exchange.", "queue error"),
    _event("publish.repeated", _W, "A message was not confirmed and is sent again.", "queue error"),
)
_DRAIN: Final = (
    _event(
        "drain.started",
        _I,
        "A drain begins, because a stop was requested.",
        "source by in_flight running timeout_s",
    ),
    _event(
        "task.awaited",
        _I,
        "It runs at the start of a drain, which waits for it.",
        f"{_TASK} running_s safe_point_s expected_s",
    ),
    _event("hold.awaited", _I, "A drain waits for a hold.", "hold key method lapses_s"),
    _event(
        "drain.progress",
        _I,
        "What a drain waits for.",
        "step in_flight running open_holds holds tasks left_s expected_s",
    ),
    _event(
        "drain.extended",
        _I,
        "An operator has moved the deadline later; left_s is the time until it.",
        "more_s left_s",
    ),
    _event(
        "drain.out_of_time",
        _W,
        "The deadline has passed, or a second signal has cut the wait: what still runs is "
        "cancelled, and has a line of its own.",
        "running open_holds holds not_begun forced",
    ),
    _event("drain.waiting", _I, "A step takes long; limit_s is its time limit.", "step limit_s"),
    _event(
        "drain.step_failed",
        _E,
        "A step failed or took too long; the next began, or the same was tried again.",
        "step error",
    ),
    _event("drain.resumed", _I, "Quiet or a drain was undone."),
    _event(
        "drain.finished",
        _I,
        "Nothing is in flight any more.",
        "waited_s finished handed_over not_started given_back open_holds holds unfinished "
        "exit_code",
    ),
    _event("work.ended", _I, "Tracked work has ended in a drain.", f"{_TASK} outcome ran_s"),
    _event(
        "work.untracked",
        _W,
        "Nothing tracks these asyncio tasks and threads of the application, which end with the "
        "process: ctx.track_call and ctx.track do.",
        "number work",
    ),
    _event(
        "task.stuck",
        _W,
        "Work without a row, such as a block that a handler tracks, was cancelled at the deadline, "
        "and has not ended: it ends with the process.",
        f"{_TASK} running_s",
    ),
    _event(
        "task.handed_over",
        _I,
        "A task is unfinished; the journal has it for the next run. A WARNING if time ran out.",
        f"{_TASK} cut running_s safe_point_s cursor",
    ),
    _event(
        "task.not_started",
        _I,
        "A task has not begun; the journal has it for the next run.",
        _TASK,
    ),
    _event(
        "task.given_back",
        _I,
        "Its handler was interrupted; it has no row, so its message goes back to the queue.",
        f"{_TASK} cut running_s safe_point_s cursor",
    ),
)
_OPERATORS: Final = (
    _event(
        "door.missing",
        _W,
        "The run has no door, so no command can ask it.",
        "path error",
    ),
    _event(
        "door.refused",
        _W,
        "A user without permission has connected to the run's door.",
        "uid pid",
        kind="uid",
    ),
    _event("admin.opened", _I, "The HTTP endpoint listens.", "address"),
    _event(
        "admin.refused",
        _W,
        "The HTTP endpoint has refused a request that is not allowed.",
        "path why error",
        kind="path why",
    ),
    _event(
        "admin.full",
        _W,
        "The HTTP endpoint has as many clients as it takes; it disconnects the idlest ones.",
        "limit",
    ),
    _event(
        "admin.no_descriptor",
        _E,
        "The HTTP endpoint cannot accept connections, mostly because the process has too many "
        "files open. It tries again each second, and logs this once a minute.",
        "error",
    ),
    _event(
        "admin.failed",
        _E,
        "A request to the HTTP endpoint failed because of a fault in gracekit.",
        "path error",
        kind="path",
    ),
    _event(
        "admin.tokens_unusable",
        _E,
        "The token file cannot be used any more. If it is missing or empty, no token is valid; "
        "otherwise those that were read before stay valid.",
        "error",
    ),
    _event("admin.certificate_renewed", _I, "The endpoint's certificate was read again."),
    _event(
        "admin.certificate_unusable",
        _E,
        "The endpoint's certificate has changed and cannot be used; the old one stays in use.",
        "error",
    ),
    _event("run.ordered", _I, "An operator used a verb of the run.", "verb by reason"),
)
_RECOVERY: Final = (
    _event(
        "run.classified",
        _I,
        "How an earlier run ended and why, as far as is known so far, and what it left.",
        "run instance verdict why unfinished not_started",
    ),
    _event(
        "run.explained",
        _I,
        "After a run was classified, its parent or systemd has told how its process ended.",
        "run instance why",
    ),
    _event(
        "run.not_proven",
        _W,
        "It is not proven whether an earlier run is dead, so its tasks are left alone.",
        "run instance reason",
    ),
    _event("task.adopted", _I, "A run has taken over a task whose run is gone.", _TASK),
    _event(
        "task.settled",
        _I,
        "Recovery has decided what becomes of an unfinished task.",
        f"{_TASK} decision reason",
    ),
    _event("task.row_lost", _E, "The store has lost its row; its outcome is dropped.", _TASK),
    _event(
        "task.errored",
        _W,
        "A task was given up, and is not run again; `expired` if its caller has left before.",
        f"{_TASK} reason",
    ),
    _event(
        "hold.ended",
        _I,
        "A hold has ended: it lapsed, or was settled; in a drain also if a request has ended it.",
        "hold key method reason",
    ),
    _event("clock.set", _W, "The wall clock was changed; waits keep their length.", "by_s"),
)
_COUNTS: Final = "settled failed waiting left"
_RESOURCES: Final = (
    _event(
        "reconciliation.started",
        _I,
        "A pass over the resources of this host begins; with dry_run it settles nothing.",
        "by_hand dry_run",
    ),
    _event(
        "reconciliation.progress",
        _I,
        "How far a pass is. waits_for counts the requests in the queues that it waits for.",
        f"{_COUNTS} waits_for",
    ),
    _event(
        "reconciliation.broken",
        _W,
        "The resources of a kind, or of one that is settled before it, cannot be listed; the next "
        "pass tries again.",
        "kind reason",
    ),
    _event(
        "reconciliation.finished",
        _I,
        "A pass is over; if a drain interrupted it, it is repeated. What a dry run would settle is "
        "counted as waiting here, and is `settled` in the results of a dry run by hand.",
        f"{_COUNTS} broken interrupted dry_run took_s",
    ),
    _event(
        "resource.settled",
        _I,
        "A rule has written the status of a resource.",
        "resource status written rule token",
    ),
    _event(
        "resource.failed",
        _W,
        "A rule has written its failed status for a resource.",
        "resource status written rule reason token",
    ),
    _event(
        "resource.left",
        _I,
        "A rule has ended without writing a status: it is asked again, or the status has changed.",
        "resource status outcome rule reason token",
    ),
    _event(
        "resource.stuck",
        _W,
        "A rule was cancelled at its limit and has not ended: it keeps its resource until it has.",
        "resource status rule reason token",
    ),
    _event(
        "resource.unruled",
        _W,
        "So many resources have a status without a rule, so none of them is settled.",
        "kind status number",
    ),
    _event(
        "resource.reconciled",
        _D,
        "A pass has looked at a resource, or a rule was asked again about one.",
        "kind outcome",
    ),
)
_STORE: Final = (
    _event(
        "store.error",
        _E,
        "A commit or read failed; rows are read again.",
        "what error",
        kind="what",
    ),
    _event(
        "run.watched",
        _W,
        "The start waits to see whether an earlier run of this host still beats.",
        "run instance host",
    ),
    _event(
        "run.declared_dead",
        _W,
        "The beats of a run have stopped; others take its tasks over.",
        "run instance host reason",
    ),
    _event(
        "lease.lost",
        _W,
        "A lease that people hold is lost; its holder must change nothing more.",
        "resource reason",
    ),
    _event(
        "lease.on_lost_failed", _E, "The function on_lost of a hold raised an exception.", "error"
    ),
    _event(
        "beats.missed",
        _W,
        "No sign of life of this run has reached the store for away_s; it takes nothing.",
        "away_s",
    ),
    _event("beats.resumed", _W, "The signs of life of this run reach the store again."),
    _event("run.lost", _C, "Other runs cannot see that this run is alive; it ends.", "error"),
    _event(
        "store.older",
        _E,
        "The store is older than the one used last: what was recorded since is lost.",
        "store reason",
    ),
    _event(
        "store.stranded",
        _E,
        "Something belonged to a run that may not act; it was taken over. This is a fault.",
        "run unfinished not_started",
    ),
    _event(
        "store.unreachable",
        _E,
        "The store is unreachable for away_s; the service is not ready, and tries again.",
        "away_s error",
    ),
    _event("store.reachable", _W, "The store can be reached again.", "away_s"),
    _event(
        "store.fenced",
        _C,
        "Others have declared this run dead, and the store refuses its commits; it ends.",
        "error",
    ),
    _event("store.broken", _C, "The disk under a file fails; the run ends.", "what error"),
)
GROUPS: Final = MappingProxyType(
    {
        "A service": _SERVICE,
        "Intake": _INTAKE,
        "A request": _REQUEST,
        "A broker": _BROKER,
        "A drain": _DRAIN,
        "Operators": _OPERATORS,
        "Recovery": _RECOVERY,
        "Resources": _RESOURCES,
        "The store": _STORE,
    }
)
"""The events by subject, in the order of docs/events.md."""
CATALOGUE: Final = MappingProxyType(
    {event.name: event for events in GROUPS.values() for event in events}
)


class UnknownEventError(GracekitError):
    """An event or field that the catalogue does not list; add it there first."""


@functools.cache  # few distinct calls, but one for each request
def checked(name: str, fields: tuple[str, ...]) -> Event:
    """The event of that name, if it may carry these fields.

    Raises:
        UnknownEventError: the catalogue does not list it or one of the fields.
    """
    event = CATALOGUE.get(name)
    if event is None:
        raise UnknownEventError(f"no event {name!r}{did_you_mean(name, CATALOGUE)}")
    for field in fields:
        if field not in event.fields:
            hint = did_you_mean(field, event.fields)
            raise UnknownEventError(f"event {name} has no field {field!r}{hint}")
    return event


# Fields whose attributes of log records have another name, as oslo.log uses these names for other
# things. A JSON line has the field's name.
ATTRIBUTES: Final = MappingProxyType(
    {"instance": "gracekit_instance", "resource": "gracekit_resource"}
)
