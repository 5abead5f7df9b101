"""Checks how the rules of a kind are declared; its errors say what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

from gracekit.errors import DeclarationError
from gracekit.rpc.failures import words_of


class NoDecorator:
    """Returned by `mark` and `leave`; raises an error if one of them is used as a decorator."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __repr__(self) -> str:
        return f"<{self._mark} is declared>"

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to decorate.

        Raises:
            DeclarationError: always.
        """
        raise DeclarationError(
            f"{self._mark} calls no function, so it is no decorator: write it as a statement of "
            "its own; @probe and @delete mark functions"
        )


def check_called(
    kind: str, mark: str, statuses: tuple[object, ...], ends: Mapping[str, object]
) -> None:
    """Check the arguments of a decorator.

    Args:
        kind: Name of the kind.
        mark: Name of the decorator.
        statuses: The statuses that it settles.
        ends: The statuses that it writes, by the name of their argument.

    Raises:
        DeclarationError: something is missing.
    """
    if statuses and not isinstance(statuses[0], str) and isinstance(statuses[0], Iterable):
        each = ", ".join(map(repr, statuses[0]))
        raise DeclarationError(
            f"@{kind}.{mark}({words_of(statuses[0])}) takes its statuses one by one, and not as "
            f"one value: write @{kind}.{mark}({each}, ...)"
        )
    if not statuses or not all(isinstance(status, str) for status in statuses):
        options = ", ".join(f"{name}='...'" for name in ends)
        raise DeclarationError(
            f"@{kind}.{mark} needs the statuses that it settles: write "
            f"@{kind}.{mark}('creating', {options})"
        )
    for name, status in ends.items():
        if not status:
            raise DeclarationError(
                f"@{kind}.{mark}({', '.join(map(repr, statuses))}) needs {name}=, the "
                "status that is written then"
            )


def marked_statuses(
    kind: str, given: tuple[object, ...], more: Mapping[str, str]
) -> Mapping[str, str]:
    """The statuses that `mark` writes, each by the status that it replaces.

    Args:
        kind: Name of the kind.
        given: Arguments by position: a mapping, if any.
        more: Arguments by name.

    Raises:
        DeclarationError: *given* is something else, or nothing is named.
    """
    by_status: Mapping[str, str] = {}
    match [one for one in given if one is not None]:
        case []:
            pass
        case [Mapping() as by_status]:
            pass
        case [str() as status, *rest]:
            written = rest[0] if len(rest) == 1 and isinstance(rest[0], str) else "error"
            raise DeclarationError(
                f"{kind}.mark() takes the status to write as the value of the one that is found: "
                f"write {_mark_of(kind, status, written)}"
            )
        case [*wrong]:
            words = ", ".join(map(words_of, wrong))
            raise DeclarationError(
                f"{kind}.mark() takes one mapping of statuses, and not ({words}): write "
                f"{_mark_of(kind, 'in-restore', 'error')}"
            )
    if not by_status and not more:
        raise DeclarationError(
            f"{kind}.mark() names no status: write {_mark_of(kind, 'restoring', 'error')}"
        )
    return {**by_status, **more}


def _mark_of(kind: str, status: str, written: str) -> str:
    """A call that marks *status*; a status that is no Python identifier needs a mapping."""
    if status.isidentifier():
        return f"{kind}.mark({status}={written!r})"
    return f"{kind}.mark({{{status!r}: {written!r}}})"
