"""The sets of words that users choose from, such as `on_interrupt="retry"`.

Each set is a `Literal`, so that users write plain text and a type checker knows the words. The
checks and messages at run time take the words from the same type, by `choices_of`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

OnInterrupt = Literal["error", "retry", "probe", "requeue"]
"""What recovery does with a started, unfinished task; `requeue` keeps no journal row, and its
request is given back to the transport."""
NOT_TWICE: Final[tuple[OnInterrupt, ...]] = ("error", "probe")
"""Policies whose tasks must not be run again without a probe or an operator's decision."""
InDrain = Literal["answer", "refuse"]
"""What the ops server does with a method's requests in a drain."""
AllowCancel = Literal["sender", "anyone", "nobody"]
"""Which caller may cancel a request: the user that has sent it, each that knows its id, or none."""
TaskApi = Literal["callers"]
"""Whom the ops topic answers about tasks, beside True for resolvers and False for nobody."""
NeedsFailed = Literal["fail", "call"]
"""What a delete does if a resource that its own one needs has failed."""
ServiceQueues = Literal["all", "directed"]
"""Which queues of new requests a service reads: all, or only those for one host and fanouts."""
StopSource = Literal["signal", "operator", "rollout", "user", "error"]
"""Who requested a stop, as recorded."""
OnUserStop = Literal["down", "restart"]
"""Whether a stop from inside lasts, or its instance may be started again."""
AdminOpen = Literal["probes", "nothing"]
"""What the HTTP endpoint answers without a token."""
ErrorDetails = Literal["full", "message", "none"]
"""How much of an exception is sent to callers."""
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
LivenessPreset = Literal["normal", "slow"]
"""The preset for the times of a run's signs of life; `slow` is for slow failovers."""
LoopName = Literal["auto", "asyncio", "uvloop"]
"""The event loop of a process of its own; `auto` is uvloop if it can be used."""
LogFormat = Literal["auto", "text", "json"]
"""How log lines are written; `auto` is text on a terminal and JSON elsewhere."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
"""The lowest level that is logged."""
LogFailures = Literal["line", "traceback", "off"]
"""How a FAILED task is logged."""


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
