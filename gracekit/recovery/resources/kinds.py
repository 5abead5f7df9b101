"""Kinds of resources, as an application declares them: where they are found, and their rules.

    share = svc.kind("share", after=[server])

The kind of a rule is the kind of `@svc.rpc(resource="share")`: both take the same lease.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Never, TypeVar

from gracekit.config.values import did_you_mean, parse_duration
from gracekit.errors import ConfigError, DeclarationError, InvalidArgumentsError
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.declaring import NoDecorator, check_called, marked_statuses
from gracekit.recovery.resources.found import Found, TruthAnswer, id_of, status_of
from gracekit.recovery.resources.rules import How, KindHook, StatusRule, check_ends

FindT = TypeVar("FindT", bound=Callable[..., Awaitable[Iterable[Found]] | Iterable[Found]])
WriteT = TypeVar("WriteT", bound=Callable[..., Awaitable[bool] | bool])
ProbeT = TypeVar("ProbeT", bound=Callable[..., Awaitable[TruthAnswer] | TruthAnswer])
DeleteT = TypeVar("DeleteT", bound=Callable[..., Awaitable[None] | None])

FIND: Final = "ctx, *, after, limit"
WRITE: Final = "ctx, found, status, facts"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")


class ResourceKind:
    """One kind of resources; made by `Service.kind`.

    Attributes:
        name: As methods name it: `@svc.rpc(resource="share")`.
        after: Names of the kinds that are settled before it.
        statuses: Its transient statuses; None if they were not said.
        stuck_after_s: Seconds that a resource has had its status before a later pass settles it.
        max_wait_s: Seconds that a probe may be asked again, in all.
    """

    def __init__(
        self,
        name: object,
        *,
        after: ResourceKind | str | Iterable[ResourceKind | str] = (),
        statuses: Iterable[str] | None = None,
        stuck_after: str | float = "10m",
        max_wait: str | float = "10m",
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
        except ConfigError as error:
            raise DeclarationError(f"kind {name}: {error}") from None
        if not self.max_wait_s:
            raise DeclarationError(f"kind {name}: max_wait={max_wait!r} leaves no time to ask")
        self._hooks: dict[str, KindHook] = {}
        self._rules: dict[str, StatusRule] = {}

    def __repr__(self) -> str:
        return f"<ResourceKind {self.name}>"

    def of(self, resource_id: object) -> Resource | None:
        """(kind, id) of one resource, for `needs=`; None for the id None."""
        return None if resource_id is None else (self.name, id_of(resource_id))

    # -- what is marked -----------------------------------------------------------------

    def find(self, function: FindT) -> FindT:
        """Find the resources of this host in a transient status, in the order of their ids.

        It is called with `after`, the id of the last one of the page before (None at first), and
        `limit`, and returns a list of `Found`; an empty one at the end.
        """
        self._add_hook("find", function, FIND)
        return function

    def write(self, function: WriteT) -> WriteT:
        """Write a status, if the record still has the one that was found: `True`, else `False`.

        It is called with the resource as found, the new status, and the facts of the probe's
        `Settled` (an empty mapping otherwise). `ctx.fence` is the token of the lease: store it,
        and refuse a lower one.
        """
        self._add_hook("write", function, WRITE)
        return function

    def probe(self, *statuses: str, failed: str = "") -> Callable[[ProbeT], ProbeT]:
        """Ask for the truth about resources in *statuses*.

        The function gets the resource as found, and returns `Settled`, `Absent` or `Wait`.

        Args:
            statuses: Which are settled so.
            failed: Status when it is `Absent`, not written (NotImplementedError), or unknown
                after `max_wait`.

        Raises:
            DeclarationError: it cannot work; the message says why.
        """
        self._check_called("probe", statuses, {"failed": failed})

        def register(function: ProbeT) -> ProbeT:
            hook = KindHook(function, f"the probe of kind {self.name},", "ctx, found")
            self._add_rules(statuses, StatusRule(how=How.PROBE, hook=hook, failed=failed))
            return function

        return register

    def delete(
        self, *statuses: str, done: str = "", failed: str = ""
    ) -> Callable[[DeleteT], DeleteT]:
        """Delete resources in *statuses* again; one that is gone already is no error.

        Args:
            statuses: Which are settled so.
            done: Status when the function has returned None: the resource is gone.
            failed: Status when it raises, or is not done after `max_wait`.

        Raises:
            DeclarationError: it cannot work; the message says why.
        """
        self._check_called("delete", statuses, {"done": done, "failed": failed})

        def register(function: DeleteT) -> DeleteT:
            hook = KindHook(function, f"the delete of kind {self.name},", "ctx, found")
            self._add_rules(
                statuses, StatusRule(how=How.DELETE, hook=hook, done=done, failed=failed)
            )
            return function

        return register

    def mark(
        self, by_status: Mapping[str, str] | None = None, /, *wrong: Never, **more: str
    ) -> object:
        """Write a status for another, without a question: `mark(restoring="error")`.

        Args:
            by_status: Where a status is no Python name: `{"in-restore": "error"}`.
            wrong: Nothing; what stands here is refused.
            more: The others.

        Raises:
            DeclarationError: none is named, or a status has another rule already.
        """
        for status, failed in marked_statuses(self.name, (by_status, *wrong), more).items():
            self._add_rules((status,), StatusRule(how=How.MARK, failed=self._status(failed)))
        return NoDecorator(f"{self.name}.mark()")

    def leave(self, *statuses: str, why: str = "") -> object:
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
        return NoDecorator(f"{self.name}.leave()")

    # -- use ----------------------------------------------------------------------------

    @property
    def rules(self) -> Mapping[str, StatusRule]:
        """By status."""
        return self._rules

    @property
    def failed_statuses(self) -> frozenset[str]:
        """Those that say that a resource is of no use to what needs it."""
        return frozenset(rule.failed for rule in self._rules.values() if rule.failed)

    @property
    def end_statuses(self) -> frozenset[str]:
        """Those that rules end in, and that have no rule themselves: nothing is left to do."""
        done = {rule.done for rule in self._rules.values() if rule.done}
        return frozenset((done | self.failed_statuses) - self._rules.keys())

    @property
    def hooks(self) -> Iterator[KindHook]:
        """All functions that are called."""
        yield from self._hooks.values()
        yield from {id(rule.hook): rule.hook for rule in self._rules.values() if rule.hook}.values()

    def hook(self, name: str) -> KindHook:
        """The one that finds, or writes; of a kind that was checked."""
        return self._hooks[name]

    def bind(self, owner: object) -> bool:
        """Call the marked methods of *owner*'s class as its own; whether there are any.

        Raises:
            DeclarationError: another object is served for them already.
        """
        marked = False
        for name in dir(type(owner)):
            function = inspect.getattr_static(type(owner), name)
            for hook in self.hooks:  # a function may settle several statuses, each by a mark
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
                f"kind {self.name} has no rule for status {', '.join(map(repr, forgotten))}: a "
                "status that nobody settles is how records get stuck: give it a rule, or `leave` "
                "it and say why"
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
        check_called(self.name, mark, statuses, ends)
        for status in ends.values():
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
