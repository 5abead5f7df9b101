"""Rules: how a resource that is found in a transient status is settled."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gracekit.callables import check_call, is_async, name_of
from gracekit.config.choices import NeedsFailed
from gracekit.errors import DeclarationError

_MEANT: Final = {"Context": "ctx", "Found": "found"}
"""Which argument a type belongs to, however it is called."""


class How(enum.Enum):
    """The ways in which a rule settles a resource."""

    PROBE = "probe"  # the backend is asked for the truth
    DELETE = "delete"  # the resource is deleted again
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
    """

    how: How
    hook: KindHook | None = None
    done: str = ""
    failed: str = ""
    why: str = ""
    needs_failed: NeedsFailed = "fail"

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
