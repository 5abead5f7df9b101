"""Checks of a service's declarations: policies, probes, timeouts and threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gracekit.config.settings import Settings
from gracekit.config.values import format_duration
from gracekit.doctor.finding import Finding, fail, ok, warn
from gracekit.errors import DeclarationError
from gracekit.request.lanes import can_accept, can_run
from gracekit.rpc.message import TASKS_NAMESPACE
from gracekit.rpc.methods import Method
from gracekit.service import Service

SHOWN: Final = 5

Methods = list[Method[Any, Any]]


def check_methods(service: Service) -> Finding:
    """Count the methods by their policy for interruptions."""
    methods = declared_ones(service.methods)
    if not methods:
        return warn(
            "methods",
            f"{service.topic} serves no method",
            "decorate functions with @svc.rpc, or include() an object, where the module is loaded",
        )
    policies = Counter(method.options.on_interrupt for method in methods)
    listed = ", ".join(f"{number} {name}" for name, number in sorted(policies.items()))
    plain = sum(1 for method in methods if not method.is_async)
    ops = sum(1 for m in methods if m.ops and m.options.in_drain == "answer")
    seen = f"{len(methods)} on topic {service.topic}: {listed}; {plain} in threads"
    return ok("methods", f"{seen}; {ops} also in a drain, on the ops topic" if ops else seen)


def check_doubts(service: Service) -> Iterator[Finding]:
    """Warn about what a start logs as `service.doubted`."""
    for seen, remedy in service.doubts():
        yield warn("declarations", seen, remedy)


def check_types(service: Service) -> Finding:
    """Warn about annotations that are not checked, so that their values stay plain data."""
    if not service.validate:
        return ok("types", "validate=False: arguments are not checked against annotations")
    methods = declared_ones(service.methods)
    lost = [
        f"{method.name}({name}): {why}"
        for method in methods
        for name, why in {**method.types.unresolved, **method.types.unsupported}.items()
    ]
    if lost:
        return warn(
            "types",
            f"{len(lost)} annotations are not checked, and their values stay plain data: "
            f"{'; '.join(lost[:SHOWN])}",
            "use types that msgspec reads, import them where the module is loaded and not under "
            "TYPE_CHECKING only, or leave the annotation out",
        )
    number = sum(1 for method in methods if method.types.arguments is not None)
    return ok("types", f"arguments of {number} methods are checked by their annotations")


def check_kinds(service: Service) -> Iterator[Finding]:
    """Check the kinds of resources: their functions and their order."""
    if not len(service.kinds):
        return
    try:
        service.check()
    except DeclarationError as error:
        yield fail("kinds", str(error), "declare it so; a start is refused as it is")
        return
    ordered = ", then ".join(
        f"{kind.name} ({len(kind.rules)} statuses)" for kind in service.kinds.in_order()
    )
    yield ok("kinds", f"settled in this order: {ordered}")


def check_pending(settings: Settings, service: Service) -> Iterator[Finding]:
    """Warn about methods with pending_timeout= while use_pending_state is off."""
    waiting = [m for m in service.methods if m.options.pending_timeout_s is not None]
    if waiting and not settings.use_pending_state:
        yield warn(
            "pending",
            f"{named(waiting)} has pending_timeout=, and use_pending_state is off: a task that "
            "raises NoCapacity is FAILED at once",
            "set GRACEKIT_USE_PENDING_STATE=true, or leave pending_timeout= out",
        )
    elif waiting:
        yield ok("pending", f"tasks of {named(waiting)} wait for capacity as they declare")


def check_timeouts(settings: Settings, service: Service) -> Finding:
    """Warn about methods that may outlast a drain and are not run again."""
    drain = settings.drain_timeout_s
    long = [
        method
        for method in service.methods
        if method.options.timeout_s is not None and method.options.timeout_s > drain
    ]
    cut = [method for method in long if method.options.on_interrupt == "error"]
    shown = f"drain_timeout = {format_duration(drain)}"
    if cut:
        return warn(
            "timeouts",
            f"{named(cut)}: timeout= above {shown}, and on_interrupt='error': a drain that cuts "
            "it marks it ERRORED at the next start",
            "say 'retry' or 'probe', add safe points, or raise GRACEKIT_DRAIN_TIMEOUT",
        )
    if long:
        return ok("timeouts", f"{named(long)} may outlive {shown}, and is settled by its policy")
    return ok("timeouts", f"no timeout= is above {shown}")


def check_threads(settings: Settings, service: Service) -> Iterator[Finding]:
    """Check plain functions: they run in a limited number of threads, and cannot be cancelled."""
    for ops, threads, lane in (
        (False, settings.threads, "threads"),
        (True, settings.ops_threads, "ops_threads"),
    ):
        plain = [m for m in service.methods if not m.is_async and m.ops is ops]
        if plain:
            yield _check_lane(plain, threads, lane)
    endless = [m for m in service.methods if not m.is_async and m.options.timeout_s is not None]
    if endless:
        yield warn(
            "threads",
            f"{named(endless)} has a timeout= and is a plain function: its caller is answered, "
            "and the thread goes on, with its place and lease, until it returns",
            "make it async, or give its own calls a time-out",
        )


def _check_lane(plain: Methods, threads: int, lane: str) -> Finding:
    wide = [method for method in plain if (method.options.max_running or 0) > threads]
    if wide:
        return warn(
            lane,
            f"{named(wide)}: max_running = {wide[0].options.max_running} should be at most "
            f"{lane} = {threads}, for plain functions run in threads",
            f"lower max_running=, or raise GRACEKIT_{lane.upper()}",
        )
    return ok(lane, f"{len(plain)} plain functions share {threads} threads")


def check_accepted(settings: Settings, service: Service) -> Iterator[Finding]:
    """Warn about requests that wait in a store which no other worker of the topic reads."""
    methods = _of_requests(service)
    kept = [method for method in methods if method.options.on_interrupt != "requeue"]
    if not (kept and settings.accept_unshared_store):
        return
    accepted, most = can_accept(settings, methods), can_run(settings, methods)
    if accepted <= most:
        yield ok("accepted requests", f"at most {accepted}, and as many may run")
        return
    yield warn(
        "accepted requests",
        f"accept_unshared_store = true, and up to max_accepted = {accepted} requests are kept in "
        f"this store while at most {most} run: a drain leaves the others here, no worker with "
        "another store can run them, and the exit code is 75",
        "leave GRACEKIT_MAX_ACCEPTED out: then further requests stay in the queue, where every "
        "worker can take them",
    )


def _of_requests(service: Service) -> Methods:
    """The methods of the service's topic, without the ops methods."""
    return [method for method in declared_ones(service.methods) if not method.ops]


def declared_ones(methods: Iterable[Method[Any, Any]]) -> Methods:
    """The methods that the application declared, without those of the task API."""
    return [method for method in methods if method.options.namespace != TASKS_NAMESPACE]


def named(methods: Iterable[Method[Any, Any]]) -> str:
    """`create(), delete() and 2 more`."""
    names = sorted(f"{method.name}()" for method in methods)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
