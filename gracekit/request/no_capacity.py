"""Reads the NoCapacity that a handler raised, and says why its task is not parked for that.

A caller without `pending=True` gets the same class of failure whether the task was parked or not.
So the text of the failure says why it was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gracekit.errors import NoCapacity, Parked, checked_request
from gracekit.rpc.failures import is_foreign, words_of
from gracekit.tracker.task import TrackedTask

SETTING_OFF: Final = "GRACEKIT_USE_PENDING_STATE is off"
_LONGEST_WORDS: Final = 200


def requested_by(error: BaseException) -> Mapping[str, Any] | None:
    """The missing capacity that a handler named in NoCapacity; None if it raised no new one.

    A subclass may have its own `__init__`, and `requested` may have been changed since. The result
    is empty if it cannot be recorded.
    """
    if not isinstance(error, NoCapacity) or is_foreign(error):
        return None
    try:
        return checked_request(error.requested)
    except Exception:  # noqa: BLE001 - the attribute is the application's
        return {}


def why_not_parked(error: BaseException, task: TrackedTask) -> str:
    """Why *task*, whose handler raised *error*, may not be parked.

    Returns:
        What follows on "the task is not parked, because". Empty if it may be parked, or if *error*
        has nothing to do with capacity.
    """
    inside = error if isinstance(error, NoCapacity | Parked) else _in_group(error)
    if inside is None:
        return ""
    if task.on_interrupt == "requeue":  # a redelivered one has a row, but the same answer
        return f"{task.method}() has on_interrupt='requeue', and so no record that could wait"
    if task.recipient:
        return "it is a copy of a fanout, which is meant for one instance"
    if inside is not error:
        return (
            f"{words_of(inside)[:_LONGEST_WORDS]} is in a group of exceptions: catch it with "
            "`except* NoCapacity`, and raise one by itself"
        )
    if is_foreign(error):
        return (
            "its handler has passed on an error of a service that it called, and only a NoCapacity "
            "of its own parks it"
        )
    return ""


def _in_group(error: BaseException) -> BaseException | None:
    """The first NoCapacity in a group of exceptions; None if there is none. Never raises."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    try:
        found: Any = error.subgroup(NoCapacity)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
    except BaseException:  # noqa: BLE001 - the class of the group may be the application's
        return None
    return found if isinstance(found, NoCapacity) else None
