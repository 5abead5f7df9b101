"""Checks what a test gives the kit, before anything waits for it or is planned with it."""

from __future__ import annotations

import asyncio
import enum
import math
import signal
from collections.abc import Collection
from typing import Final, TypeVar

from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError
from gracekit.process import Point
from gracekit.service import Service
from gracekit.signals import HANGUP_SIGNAL, STOP_SIGNALS

EnumT = TypeVar("EnumT", bound=enum.Enum)

PLAYED_SIGNALS: Final = (*STOP_SIGNALS, HANGUP_SIGNAL)


def check_service(service: object) -> None:
    """Refuse what is no Service.

    Raises:
        GracekitError: it is something else, such as its topic or its module.
    """
    if isinstance(service, Service):
        return
    found = next((name for name, value in _members(service) if isinstance(value, Service)), None)
    hint = "svc" if found is None else f"{getattr(service, '__name__', 'module')}.{found}"
    raise GracekitError(
        f"InMemoryService({service!r}) is no Service: write InMemoryService({hint})"
    )


def check_seconds(seconds: object) -> None:
    """Refuse what virtual time cannot pass by.

    Raises:
        ValueError: it is no number, negative, or has no end.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:  # type: ignore[operator]  # a number
        raise ValueError(f"pass_time({seconds!r}): write seconds, 0 or more, that come to an end")


def check_condition(condition: object) -> None:
    """Refuse what cannot be asked again.

    Raises:
        TypeError: it is no function, or a coroutine function, whose result is always true.
    """
    if not callable(condition) or asyncio.iscoroutinefunction(condition):
        raise TypeError(
            f"until({condition!r}): write a plain function that says whether it holds now, as "
            "until(lambda: len(seen) == 2)"
        )


def check_signal(by: object) -> None:
    """Refuse what the process of a service does not handle.

    Raises:
        ValueError: gracekit handles no such signal.
    """
    if isinstance(by, signal.Signals) and by in PLAYED_SIGNALS:
        return
    known = ", ".join(one.name for one in PLAYED_SIGNALS)
    if isinstance(by, str) and by in known.split(", "):
        raise ValueError(f"{by!r} is a text: write signal.{by}")
    raise ValueError(f"{by!r} is none of {known}, as signal.SIGTERM; crash() is kill -9")


def check_member(verb: str, given: object, kind: type[EnumT]) -> None:
    """Refuse what is no member of an enum of the kit.

    Raises:
        ValueError: it is something else; the message lists the members.
    """
    if isinstance(given, kind):
        return
    hint = did_you_mean_member(given, kind)
    raise ValueError(f"{verb}: {given!r} is no {kind.__name__}{hint or _listed(kind)}")


def did_you_mean_member(given: object, kind: type[EnumT]) -> str:
    """`; did you mean Point.PARK?`, of a text that names, or nearly names, a member."""
    if not isinstance(given, str):
        return ""
    name = given.rpartition(".")[2].upper().replace("-", "_")
    return did_you_mean(f"{kind.__name__}.{name}", [f"{kind.__name__}.{one.name}" for one in kind])


def check_where(verb: str, where: object) -> None:
    """Refuse a text where a point or the number of a safe point is meant.

    Raises:
        ValueError: it is a text.
    """
    if isinstance(where, str):
        hint = did_you_mean_member(where, Point)
        raise ValueError(  # noqa: TRY004 - as for a number that counts nothing
            f"{verb}({where!r}): write the number of a safe point, or a Point, as "
            f"Point.FINISH{hint}"
        )


def check_event_type(given: str | None, known: Collection[str]) -> None:
    """Refuse a type of notifications that nobody sends.

    Raises:
        GracekitError: there is none of that name.
    """
    if given is not None and given not in known:
        raise GracekitError(
            f"no notification has the type {given!r}{did_you_mean(str(given), known)}; there are "
            f"{' and '.join(known)}"
        )


def _listed(kind: type[enum.Enum]) -> str:
    return f"; write one of {', '.join(f'{kind.__name__}.{one.name}' for one in kind)}"


def _members(value: object) -> list[tuple[str, object]]:
    return list(getattr(value, "__dict__", {}).items())
