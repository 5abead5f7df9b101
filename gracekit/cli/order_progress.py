"""How far an operator's order about one task is, and the sentences about its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gracekit.cli.text import safe
from gracekit.journal.order_rows import OrderTarget
from gracekit.tracker.task import DONE, RETRIED, Order, TaskState, Verb

ASKED: Final = 3
"""Exit status where an order is given and its task has not ended yet."""
OVERDUE: Final = "its deadline is over: if it still finds no capacity, it is errored at once"
_IN_LINE: Final = "a run that serves its method and does not drain starts it again"


class OrderProgress(msgspec.Struct):
    """How far an order is.

    Attributes:
        asked: Run and state in which it was asked; None before.
        elsewhere: The run of another host for which it was left; empty for none.
        state: The task's, as last seen.
        code: Exit status.
        words: What is printed after the task's name.
    """

    asked: tuple[str, TaskState] | None = None
    elsewhere: str = ""
    state: str | None = None
    code: int = ASKED
    words: str = ""
    moves: int = 0

    def end(self, words: str, *, state: str | None, code: int = 0) -> OrderProgress:
        """Nothing more is to be done."""
        self.words, self.state, self.code = words, state, code
        return self


def not_parked(target: OrderTarget, verb: Verb) -> str:
    """Why an order for parked tasks is refused: what the task is, and which command is for it."""
    reason = f" ({target.reason})" if target.reason else ""
    words = f": {target.detail}" if target.detail else ""
    other = ""
    if verb is Verb.RETRY and target.state in RETRIED:
        other = f". `gracekit tasks retry {safe(shlex.quote(target.request_id))}` runs it again"
    return f"{target} does not wait for capacity: it is {target.state.value}{reason}{words}{other}"


def done_words(
    order: Order, *, runs_on: bool, end: TaskState | None = None, parked: bool = False
) -> str:
    """What an order has done to a task, and what comes next."""
    if order.verb is Verb.RETRY:
        return "retried; " + (_IN_LINE if runs_on else "the next start runs it")
    # The caller of a parked task was answered when it was parked.
    then = "sends the notification" if parked else "answers a caller that waits"
    later = "" if runs_on else f"; the next start {then}"
    return f"{ended_words(order.verb, end)}{later}"


def order_words(order: Mapping[str, Any]) -> str:
    """An order that a run has taken, as recorded: `to be cancelled, by ann@vm-0: wrong host`."""
    done = DONE[Verb(order["verb"])]
    return f"to be {done}, by {order['by']}: {order['reason'] or 'no reason given'}"


def ended_words(verb: Verb, end: TaskState | None) -> str:
    """`given up: it is errored now`, and `cancelled` alone."""
    done = DONE[verb]
    return done if end is None or end.value == done else f"{done}: it is {end.value} now"
