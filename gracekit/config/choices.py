"""Words that users choose between, such as `on_interrupt="retry"`: each set is written once, here.

A set is a `Literal`, because then a type checker knows it and users write plain text. What is
checked and said at run time comes from the same type, by `choices_of`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

OnInterrupt = Literal["error", "retry", "probe", "requeue"]
"""What recovery does with a started, unfinished task; `requeue` keeps no journal row, and its
request is given back to the transport."""
NOT_TWICE: Final[tuple[OnInterrupt, ...]] = ("error", "probe")
"""A task of these policies must not be started again unless somebody has asked whether it may."""
InDrain = Literal["answer", "refuse"]
"""What the ops server does with a method's requests in a drain."""
StopSource = Literal["signal", "operator", "user", "error"]
"""What the record tells stops apart by."""
AdminOpen = Literal["probes", "nothing"]
"""What the HTTP endpoint answers without a token."""
ErrorDetails = Literal["full", "message", "none"]
"""What callers are shown of an exception."""
RejectReason = Literal[
    "oversize",
    "unreadable",
    "arguments",
    "unknown_method",
    "draining",
    "lease_held",
    "conflicting_id",
]
"""Why a request never becomes a task. Users do not choose it; it is a label of a metric."""
LogFormat = Literal["auto", "text", "json"]
"""How log lines are written; `auto` is text on a terminal and JSON elsewhere."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
"""The lowest level that is logged."""
LogFailures = Literal["line", "traceback", "off"]
"""What the log tells of a FAILED task."""


def choices_of(choice: Any) -> tuple[str, ...]:
    """The words of one of the types above, in their order: `choices_of(InDrain)`."""
    return get_args(choice)


def need_choice(word: object, choice: Any) -> str:
    """*word*, if it is one of *choice*.

    Raises:
        ValueError: it is not.
    """
    if word not in (words := choices_of(choice)):
        raise ValueError(f"{word!r} is none of {', '.join(words)}")
    return str(word)
