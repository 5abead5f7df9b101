"""Kinds of resources, as an application declares them: how they are found, and their rules.

    share = svc.kind("share", after=[server])

A kind has the same name as in `@svc.rpc(resource="share")`: rules and handlers take the same lease.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from gracekit.callables import check_call, is_async, name_of
from gracekit.config.choices import NeedsFailed, choices_of
from gracekit.config.values import did_you_mean, parse_duration
from gracekit.errors import ConfigError, DeclarationError, InvalidArgumentsError
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.found import Found, TruthAnswer, status_of
from gracekit.rpc.argument_paths import need_resource_id

_MEANT: Final = {"Context": "ctx", "Found": "found"}
"""Which argument a type belongs to, however it is called."""


class How(enum.Enum):
    """The ways in which a rule settles a resource."""

    PROBE = "probe"  # the backend is asked for the truth
    DELETE = "delete"  # the resource is deleted again
    ACT = "act"  # something is done, and its answer written
    MARK = "mark"  # the failed status is written; no backend is asked
    LEAVE = "leave"  # nothing is done: the application itself goes on with it


class KindHook:
    """A function of the application that a kind calls.

    If it is a method of a class, it is called on the object that `Service.include` serves.

    Attributes:
        name: Name of the function.
        owner: Name of the class in whose body it is defined; None for a plain function.
    """

    def __init__(self, function: Callable[..., Any], what: str, written: str) -> None:
        """Check and keep *function*.

        Args:
            function: A plain or async function.
            what: What it was declared as, for errors.
            written: The arguments that it must take, as source text.

        Raises:
            DeclarationError: it cannot be called with these arguments.
        """
        self.function = function
        self.name = name_of(function)
        self.owner = _class_of(function)
        self._target: Callable[..., Any] | None = None if self.owner else function
        _check(function, what, written, has_self=self.owner is not None)

    @property
    def target(self) -> Callable[..., Any] | None:
        """What is called; None for a method as long as no object of its class is served."""
        return self._target

    @property
    def is_plain(self) -> bool:
        """Whether it runs in a worker thread, where it cannot be stopped."""
        return self._target is None or not is_async(self._target)

    def bind(self, target: Callable[..., Any]) -> None:
        """Call *target*, the method of an object."""
        self._target = target


class StatusRule(msgspec.Struct, frozen=True, kw_only=True):
    """How the resources of one kind in one status are settled.

    Attributes:
        how: The way.
        hook: The function to call; None for MARK and LEAVE.
        done: Status to write after a delete; empty for all others.
        failed: Status to write if the truth is bad or cannot be known, or the delete has failed.
        why: Why it is left, for LEAVE.
        needs_failed: Whether *failed* is written without a call if a needed resource has failed.
        before_use: Whether it frees what others need, so that it ends first in each pass, and
            `Context.settle` calls it.
    """

    how: How
    hook: KindHook | None = None
    done: str = ""
    failed: str = ""
    why: str = ""
    needs_failed: NeedsFailed = "fail"
    before_use: bool = False

    @property
    def name(self) -> str:
        """Its name in records and logs: the name of its function, else the value of `how`."""
        return self.how.value if self.hook is None else self.hook.name


def check_ends(kind: str, rules: Mapping[str, StatusRule], status: str, rule: StatusRule) -> None:
    """Refuse *rule* for *status* if what it writes leads back to *status* by other rules.

    Each pass would write the next status of the round, and none would be the last.

    Raises:
        DeclarationError: it does; the message shows the round.
    """
    ways = [[(status, rule, end)] for end in _ends(rule)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        _, _, end = way[-1]
        if end == status:
            shown = ", then ".join(
                f"{rule.name} writes {written!r} for {found!r}" for found, rule, written in way
            )
            raise DeclarationError(
                f"rules of kind {kind} go round for ever: {shown}: let one of them write a status "
                "that has no rule"
            )
        if end in rules and end not in seen:
            seen.add(end)
            ways.extend([*way, (end, rules[end], further)] for further in _ends(rules[end]))


def _ends(rule: StatusRule) -> list[str]:
    """The statuses that *rule* may write, but for those that its probe answers."""
    return [end for end in (rule.done, rule.failed) if end]


def _class_of(function: Callable[..., Any]) -> str | None:
    """The class in whose body *function* was defined; None if it is a plain function."""
    parts = str(getattr(function, "__qualname__", "")).split(".")
    is_method = len(parts) > 1 and parts[-2] != "<locals>" and not hasattr(function, "__self__")
    return parts[-2] if is_method else None


def _check(function: Callable[..., Any], what: str, written: str, *, has_self: bool) -> None:
    """Refuse other arguments, also by their order: their names or annotations show it."""
    expected = ["self"] * has_self + written.partition(", *")[0].split(", ")
    for place, parameter in enumerate(check_call(function, what, written, has_self=has_self)):
        kind = str(getattr(parameter.annotation, "__name__", parameter.annotation))
        meant = _MEANT.get(kind.rpartition(".")[2], parameter.name)
        if meant in expected and expected.index(meant) != place < len(expected):
            name, own = name_of(function), "self, " * has_self
            raise DeclarationError(
                f"{what} {name}() is called with ({written}), and has {parameter} in another "
                f"place: write def {name}({own}{written})"
            )


FindT = TypeVar("FindT", bound=Callable[..., Awaitable[Iterable[Found]] | Iterable[Found]])
WriteT = TypeVar("WriteT", bound=Callable[..., Awaitable[bool] | bool])
ProbeT = TypeVar("ProbeT", bound=Callable[..., Awaitable[TruthAnswer] | TruthAnswer])
DeleteT = TypeVar("DeleteT", bound=Callable[..., Awaitable[None] | None])
ActT = TypeVar("ActT", bound=Callable[..., Awaitable[TruthAnswer | None] | TruthAnswer | None])

FIND: Final = "ctx, *, after, limit"
WRITE: Final = "ctx, found, status, facts"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")


class ResourceKind:
    """One kind of resources; made by `Service.kind`.

    Attributes:
        name: As methods name it: `@svc.rpc(resource="share")`.
        after: Names of the kinds that are settled before it.
        statuses: Its transient statuses; None if they were not given.
        stuck_after_s: Seconds for which a resource must have had its status, but not in the first
            pass of a run.
        max_wait_s: Seconds after which a probe is no longer asked again; timeout of a delete or
            act.
        every_s: Seconds between two passes over this kind; None for those of all kinds only.
    """

    def __init__(
        self,
        name: object,
        *,
        after: ResourceKind | str | Iterable[ResourceKind | str] = (),
        statuses: Iterable[str] | None = None,
        stuck_after: str | float = "10m",
        max_wait: str | float = "10m",
        every: str | float | None = None,
    ) -> None:
        """See `Service.kind`."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DeclarationError(
                f"a kind is named like an argument of its methods, and not {name!r}: letters, "
                "digits, '_', '-' and '.'"
            )
        self.name = name
        kinds = (after,) if isinstance(after, ResourceKind | str) else after
        self.after = tuple(before if isinstance(before, str) else before.name for before in kinds)
        known = (statuses,) if isinstance(statuses, str) else statuses
        self.statuses = None if known is None else frozenset(map(self._status, known))
        try:
            self.stuck_after_s = parse_duration(stuck_after)
            self.max_wait_s = parse_duration(max_wait)
            self.every_s = None if every is None else parse_duration(every)
        except ConfigError as error:
            raise DeclarationError(f"kind {name}: {error}") from None
        if self.every_s == 0:
            raise DeclarationError(f"kind {name}: every={every!r} is no time between two passes")
        if not self.max_wait_s:
            raise DeclarationError(f"kind {name}: max_wait={max_wait!r} leaves no time to ask")
        self._hooks: dict[str, KindHook] = {}
        self._rules: dict[str, StatusRule] = {}

    def __repr__(self) -> str:
        return f"<ResourceKind {self.name}>"

    def of(self, resource_id: object) -> Resource | None:
        """(kind, id) of one resource, for `needs=`; None for the id None."""
        return None if resource_id is None else (self.name, need_resource_id(resource_id))

    # -- hooks and rules, as an application declares them -------------------------------

    def find(self, function: FindT) -> FindT:
        """Find the resources of this host in a transient status, in the order of their ids.

        It is called with `after`, the last id of the previous page (None at first), and `limit`.
        It returns a list of `Found`; an empty list after the last page.
        """
        self._add_hook("find", function, FIND)
        return function

    def write(self, function: WriteT) -> WriteT:
        """Write a status, if the record still has the one that was found.

        It returns True if it has changed the record, else False. It is called with the resource as
        found, the new status, and the facts of the probe's `Settled` (else an empty mapping).
        `ctx.fence` is the token of the lease: store it, and refuse a lower one.
        """
        self._add_hook("write", function, WRITE)
        return function

    def probe(
        self, *statuses: str, failed: str = "", before_use: bool = False
    ) -> Callable[[ProbeT], ProbeT]:
        """Settle resources in *statuses* by a function that asks the backend for the truth.

        It gets the resource as found, and returns `Settled`, `Absent`, `Broken` or `Wait`.

        Args:
            statuses: Statuses that this rule settles.
            failed: Status to write if the answer is `Absent` or `Broken`, if the function raises
                NotImplementedError, or if the truth is not known after `max_wait`.
            before_use: Whether it frees what others need, see `Context.settle`.

        Raises:
            DeclarationError: it cannot work; the message says why.
        """
        self._check_called("probe", statuses, {"failed": failed})

        def register(function: ProbeT) -> ProbeT:
            hook = KindHook(function, f"the probe of kind {self.name},", "ctx, found")
            rule = StatusRule(how=How.PROBE, hook=hook, failed=failed, before_use=before_use)
            self._add_rules(statuses, rule)
            return function

        return register

    def act(
        self, *statuses: str, done: str = "", failed: str = "", before_use: bool = False
    ) -> Callable[[ActT], ActT]:
        """Settle resources in *statuses* by a function that does something about them.

        It gets the resource as found. It must be safe to call again: its process may die in it. It
        returns None when it is done; `Settled` for another status, with facts; `Wait` to be called
        again; `Absent` or `Broken` if it has failed.

        Args:
            statuses: Statuses that this rule settles.
            done: Status to write if the function has returned None.
            failed: Status to write if it has failed or raised, or is not done after `max_wait`.
            before_use: Whether it frees what others need, see `Context.settle`.

        Raises:
            DeclarationError: it cannot work; the message says why.
        """
        self._check_called("act", statuses, {"done": done, "failed": failed})

        def register(function: ActT) -> ActT:
            hook = KindHook(function, f"the act of kind {self.name},", "ctx, found")
            rule = StatusRule(
                how=How.ACT, hook=hook, done=done, failed=failed, before_use=before_use
            )
            self._add_rules(statuses, rule)
            return function

        return register

    def delete(
        self,
        *statuses: str,
        done: str = "",
        failed: str = "",
        needs_failed: NeedsFailed = "fail",
        before_use: bool = False,
    ) -> Callable[[DeleteT], DeleteT]:
        """Settle resources in *statuses* by a function that deletes them, again or at last.

        The function must not raise if the resource is gone already.

        Args:
            statuses: Statuses that this rule settles.
            done: Status to write if the function has returned None: the resource is gone.
            failed: Status to write if it raises, or has not returned after `max_wait`.
            needs_failed: What to do if a resource that it `needs` has failed: "fail" writes
                *failed* without a call; "call" deletes nevertheless.
            before_use: Whether it frees what others need, see `Context.settle`.

        Raises:
            DeclarationError: it cannot work; the message says why.
        """
        self._check_called("delete", statuses, {"done": done, "failed": failed})
        if needs_failed not in (words := choices_of(NeedsFailed)):
            raise DeclarationError(
                f"kind {self.name}: needs_failed={needs_failed!r} is none of {', '.join(words)}"
            )

        def register(function: DeleteT) -> DeleteT:
            hook = KindHook(function, f"the delete of kind {self.name},", "ctx, found")
            rule = StatusRule(
                how=How.DELETE,
                hook=hook,
                done=done,
                failed=failed,
                needs_failed=needs_failed,
                before_use=before_use,
            )
            self._add_rules(statuses, rule)
            return function

        return register

    def mark(self, by_status: Mapping[str, str] | None = None, /, **more: str) -> None:
        """Replace a status by another without asking a backend: `mark(restoring="error")`.

        Args:
            by_status: For statuses that are no Python identifier: `{"in-restore": "error"}`.
            more: New status by status, for all others.

        Raises:
            DeclarationError: none is named, or a status has another rule already.
        """
        given: object = by_status
        if not isinstance(given, Mapping | None) or not (given or more):
            raise DeclarationError(
                f"{self.name}.mark() needs statuses, each with the one that is written in its "
                f"place: write {self.name}.mark(restoring='error'), or a mapping for what is no "
                f"Python identifier: {self.name}.mark({{'in-restore': 'error'}})"
            )
        for status, failed in {**(by_status or {}), **more}.items():
            self._add_rules((status,), StatusRule(how=How.MARK, failed=self._status(failed)))

    def leave(self, *statuses: str, why: str = "") -> None:
        """Leave resources in *statuses* alone, and say why.

        Raises:
            DeclarationError: without a status or a reason, or a status has another rule already.
        """
        if not why or not statuses:
            raise DeclarationError(
                f"{self.name}.leave({', '.join(map(repr, statuses))}) needs its statuses, and "
                "why=: say who goes on with such a resource"
            )
        self._add_rules(statuses, StatusRule(how=How.LEAVE, why=why))

    # -- use ----------------------------------------------------------------------------

    @property
    def rules(self) -> Mapping[str, StatusRule]:
        """The rules by status."""
        return self._rules

    @property
    def failed_statuses(self) -> frozenset[str]:
        """The failed statuses of all rules; a resource in one of them is of no use to others."""
        return frozenset(rule.failed for rule in self._rules.values() if rule.failed)

    @property
    def end_statuses(self) -> frozenset[str]:
        """The statuses that rules write and that have no rule themselves: nothing is left to do."""
        done = {rule.done for rule in self._rules.values() if rule.done}
        return frozenset((done | self.failed_statuses) - self._rules.keys())

    @property
    def hooks(self) -> Iterator[KindHook]:
        """All functions of the kind, each once."""
        yield from self._hooks.values()
        yield from {id(rule.hook): rule.hook for rule in self._rules.values() if rule.hook}.values()

    def hook(self, name: str) -> KindHook:
        """The `find` or `write` of a kind that was checked."""
        return self._hooks[name]

    def bind(self, owner: object) -> bool:
        """Bind the marked methods of *owner*'s class to *owner*; returns whether there are any.

        Raises:
            DeclarationError: another object is served for them already.
        """
        marked = False
        for name in dir(type(owner)):
            function = inspect.getattr_static(type(owner), name)
            for hook in self.hooks:  # a function may be marked several times, for other statuses
                if hook.owner is None or hook.function is not function:
                    continue
                if hook.target is not None:
                    raise DeclarationError(
                        f"kind {self.name} is served by another {hook.owner} already: one object "
                        "of a class finds and settles its resources"
                    )
                hook.bind(getattr(owner, name))
                marked = True
        return marked

    def check(self) -> None:
        """Check that it is complete.

        Raises:
            DeclarationError: it is not; the message says what to write.
        """
        for name, arguments in (("find", FIND), ("write", WRITE)):
            if name not in self._hooks:
                raise DeclarationError(
                    f"kind {self.name} has no {name}: mark a function with @{self.name}.{name} "
                    f"that takes ({arguments})"
                )
        for hook in self.hooks:
            if hook.target is None:
                raise DeclarationError(
                    f"kind {self.name} uses {hook.owner}.{hook.name}(), and no {hook.owner} is "
                    f"served: call svc.include({hook.owner}(...))"
                )
        self._check_statuses()

    def _check_statuses(self) -> None:
        if self.statuses is None:
            return
        if forgotten := sorted(self.statuses - self._rules.keys()):
            raise DeclarationError(
                f"kind {self.name} has no rule for status {', '.join(map(repr, forgotten))}, so "
                "resources would get stuck in it: give it a rule, or `leave` it and say why"
            )
        if unknown := sorted(self._rules.keys() - self.statuses):
            raise DeclarationError(
                f"kind {self.name} has a rule for status {unknown[0]!r}, which is none of its "
                f"statuses={did_you_mean(unknown[0], self.statuses)}"
            )

    # -- checks -------------------------------------------------------------------------

    def _status(self, status: object) -> str:
        try:
            return status_of(status)
        except InvalidArgumentsError as error:
            raise DeclarationError(f"kind {self.name}: {error}") from None

    def _check_called(self, mark: str, statuses: tuple[Any, ...], ends: Mapping[str, str]) -> None:
        """Check the arguments of the decorator *mark*; *ends* are the statuses that it writes."""
        if not statuses or not all(isinstance(status, str) for status in statuses):
            options = ", ".join(f"{name}='...'" for name in ends)
            raise DeclarationError(
                f"@{self.name}.{mark} needs the statuses that it settles: write "
                f"@{self.name}.{mark}('creating', {options})"
            )
        for name, status in ends.items():
            if not status:
                raise DeclarationError(
                    f"@{self.name}.{mark}({', '.join(map(repr, statuses))}) needs {name}=, the "
                    "status that is written then"
                )
            self._status(status)

    def _add_hook(self, name: str, function: Callable[..., Any], written: str) -> None:
        if name in self._hooks:
            raise DeclarationError(
                f"kind {self.name} has a {name} already, {self._hooks[name].name}()"
            )
        self._hooks[name] = KindHook(function, f"the {name} of kind {self.name},", written)

    def _add_rules(self, statuses: tuple[str, ...], rule: StatusRule) -> None:
        for status in map(self._status, statuses):
            if status in self._rules:
                raise DeclarationError(
                    f"status {status!r} of kind {self.name} has two rules, "
                    f"{self._rules[status].name} and {rule.name}: keep one"
                )
            if status in {rule.failed, rule.done}:
                raise DeclarationError(
                    f"the rule {rule.name} of kind {self.name} would write status {status!r} over "
                    "itself: name the status that it becomes"
                )
            check_ends(self.name, self._rules, status, rule)
            self._rules[status] = rule
