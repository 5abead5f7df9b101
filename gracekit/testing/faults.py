"""Faults of the simulated ports, and the objects that decide when they happen.

Before each step a port calls `Faults.draw` with its name, the step and the kinds of
faults that are possible there. The base class never causes a fault.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection
from typing import Final


class Fault(enum.Enum):
    """A fault that may happen at one step."""

    DELAY = "it takes long"
    REFUSED = "nothing was done, and the error says so"
    LOST_BEFORE = "nothing was done, and nobody knows"
    LOST_AFTER = "it was done, and nobody knows"
    BROKEN = "the disk is gone"
    DUPLICATE = "it happens twice"
    REORDER = "a later one comes first"
    CRASH = "the process is killed here"
    NO_PROOF = "nobody can prove now whether a process lives"
    JUMP = "the wall clock is set"

    # Enum's own hash is slow Python code, and every step of every port uses it.
    __hash__ = object.__hash__


class Faults:
    """No faults at all; a test overrides `draw`."""

    def draw(self, port: str, step: str, kinds: Collection[Fault]) -> Fault | None:  # noqa: ARG002
        """Decide the fault of this step.

        Args:
            port: clock, store, transport or process.
            step: The name of a commit's point; for other steps, the port's method.
            kinds: The faults that are possible there.

        Returns:
            One of *kinds*, or None for nothing.
        """
        return None

    def seconds(self, port: str, step: str) -> float:  # noqa: ARG002
        """The length of a `DELAY` or the size of a `JUMP`, in seconds."""
        return 1.0


def check_count(name: str, number: object) -> None:
    """Check that *number* is a count.

    Raises:
        ValueError: *number* is no whole number from 1.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={number!r}: write a whole number, 1 or more")


NO_FAULTS: Final = Faults()


class PlannedFaults(Faults):
    """Faults that a test has planned, one by one."""

    def __init__(self) -> None:
        self._plan: dict[tuple[str, str], list[Fault]] = {}
        self.met: Counter[tuple[str, str, Fault]] = Counter()
        self.delay_s = 1.0

    def plan(self, port: str, step: str, fault: Fault, *, times: int = 1) -> None:
        """Plan *fault* for the next *times* of that step.

        Raises:
            ValueError: *times* is no number from 1.
        """
        check_count("times", times)
        self._plan.setdefault((port, step), []).extend([fault] * times)

    def forget(self) -> None:
        """Drop all planned faults."""
        self._plan.clear()

    def left(self) -> list[tuple[str, str, Fault]]:
        """The planned faults that have not happened, as (port, step, fault)."""
        return [(port, step, fault) for (port, step), plan in self._plan.items() for fault in plan]

    def draw(self, port: str, step: str, kinds: Collection[Fault]) -> Fault | None:
        """See `Faults.draw`."""
        planned = self._plan.get((port, step))
        if not planned or planned[0] not in kinds:
            return None
        fault = planned.pop(0)
        self.met[port, step, fault] += 1
        return fault

    def seconds(self, port: str, step: str) -> float:  # noqa: ARG002
        """See `Faults.seconds`."""
        return self.delay_s
