"""Checks what a test gives the kit, before anything waits for it or is planned with it."""

from __future__ import annotations

import asyncio
import enum
import math
import signal
from collections.abc import Collection
from typing import Final

from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError
from gracekit.service import Service
from gracekit.signals import HANGUP_SIGNAL, STOP_SIGNALS

PLAYED_SIGNALS: Final = (*STOP_SIGNALS, HANGUP_SIGNAL)


def check_service(service: object) -> None:
    """Refuse what is no Service.

    Raises:
        GracekitError: it is something else, such as its topic or its module.
    """
    if not isinstance(service, Service):
        raise GracekitError(f"InMemoryService({service!r}) is no Service: give the Service object")


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
    if not isinstance(by, signal.Signals) or by not in PLAYED_SIGNALS:
        known = ", ".join(f"signal.{one.name}" for one in PLAYED_SIGNALS)
        raise ValueError(f"{by!r} is none of {known}; crash() is kill -9")


def check_member(verb: str, given: object, kind: type[enum.Enum]) -> None:
    """Refuse what is no member of an enum of the kit.

    Raises:
        ValueError: it is something else; the message lists the members.
    """
    if not isinstance(given, kind):
        known = ", ".join(map(str, kind))
        raise ValueError(  # noqa: TRY004 - as below
            f"{verb}: {given!r} is no {kind.__name__}; write one of {known}"
        )


def check_where(verb: str, where: object) -> None:
    """Refuse a text where a point or the number of a safe point is meant.

    Raises:
        ValueError: it is a text.
    """
    if isinstance(where, str):
        raise ValueError(  # noqa: TRY004 - as for a number that counts nothing
            f"{verb}({where!r}): write the number of a safe point, or a Point, as Point.FINISH"
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
