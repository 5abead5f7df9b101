"""The kinds of one service: checks them together, and puts them in the order of settling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gracekit.config.values import did_you_mean, nearest
from gracekit.errors import DeclarationError
from gracekit.recovery.resources.kinds import ResourceKind

SHOWN: Final = 3
"""Methods that one sentence names."""


class KindTable:
    """The kinds of one service, by name."""

    def __init__(self) -> None:
        self._kinds: dict[str, ResourceKind] = {}

    def __iter__(self) -> Iterator[ResourceKind]:
        return iter(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> ResourceKind:
        return self._kinds[name]

    def add(self, kind: ResourceKind) -> None:
        """Add *kind*.

        Raises:
            DeclarationError: its name is taken, or it closes a cycle of `after`.
        """
        if kind.name in self._kinds:
            raise DeclarationError(f"kind {kind.name} is declared twice: keep one")
        self._kinds[kind.name] = kind
        if cycle := self._cycle(kind.name):
            del self._kinds[kind.name]
            raise DeclarationError(
                f"kinds wait for each other: {' after '.join(cycle)}: remove one `after`"
            )

    def _cycle(self, name: str) -> list[str]:
        """The path from *name* back to itself by `after`; empty if there is none."""
        ways = [[name]]
        seen: set[str] = set()
        while ways:
            way = ways.pop()
            kind = self._kinds.get(way[-1])
            for before in () if kind is None else kind.after:
                if before == name:
                    return [*way, name]
                if before not in seen:
                    seen.add(before)
                    ways.append([*way, before])
        return []

    def check(self) -> None:
        """Check that each kind is complete, and that the kinds in its `after` are declared.

        Raises:
            DeclarationError: for the first that is not.
        """
        for kind in self:
            for before in kind.after:
                if before not in self._kinds:
                    raise DeclarationError(
                        f"kind {kind.name} comes after {before!r}, which is not declared"
                        f"{did_you_mean(before, self._kinds)}"
                    )
            kind.check()

    def in_order(self) -> list[ResourceKind]:
        """All kinds, each behind those in its `after`, otherwise in the order of declaration."""
        ordered: dict[str, ResourceKind] = {}

        def put(kind: ResourceKind) -> None:
            for before in kind.after:
                put(self._kinds[before])
            ordered.setdefault(kind.name, kind)

        for kind in self:
            put(kind)
        return list(ordered.values())

    def before(self, name: str) -> set[str]:
        """Names of all kinds that are settled before that one."""
        found: set[str] = set()
        for before in self._kinds[name].after:
            found |= {before, *self.before(before)}
        return found

    def needed(self) -> frozenset[str]:
        """Names of the kinds that another kind comes after."""
        return frozenset(before for kind in self for before in kind.after)


def undeclared_kind(name: str, methods: Sequence[str], kinds: KindTable) -> tuple[str, str]:
    """What is wrong with methods whose `resource=` is no declared kind, and the remedy.

    Args:
        name: As the methods name their resource.
        methods: As `create()`.
        kinds: Those of their service.
    """
    near = nearest(name, [kind.name for kind in kinds])
    more = len(methods) - SHOWN
    listed = ", ".join(methods[:SHOWN]) + (f" and {more} more" if more > 0 else "")
    seen = (
        f"{listed}: resource={name!r}, and no svc.kind({name!r}) is declared"
        f"{f' (did you mean {near!r}?)' if near else ''}: no pass settles such a resource, and the "
        "rules of the declared kinds do not wait for its lease"
    )
    declare = (
        f"declare svc.kind({name!r}) with its find, write and rules; if no record of such a "
        "resource can stay in a transient status, leave it so"
    )
    if near is None:
        return seen, declare
    return (
        seen,
        f"write resource=({near!r}, 'argument') with the name of the argument, or {declare}",
    )
