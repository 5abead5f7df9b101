"""Watches the beats of the runs that share a store, and says which of them have stopped.

No clock of another machine is compared. A run is silent once its number has not changed over an
unbroken series of reads, for as long as that run itself has said. The time counts from the *answer*
of the first read that showed the number: the run began that beat before, and the kernel has ended
it by then. A pause of the watcher, or a read that failed, proves nothing of others: the series
begins again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gracekit.store.batch import Row

READS_IN_DEAD: Final = 4
"""Two reads of one series are at most a quarter of `dead_after` apart."""


class SeenBeat(msgspec.Struct, frozen=True):
    """What a watcher has seen of one run.

    Attributes:
        number: Of its last beat.
        since: CLOCK_BOOTTIME of the answer that showed this number first in this series.
        has_changed: Whether the number has changed under our eyes.
        fail_s: So long after its last beat the run cancels its handlers; None if it never does.
        dead_s: And so long after it, others may declare it dead.
    """

    number: int
    since: float
    has_changed: bool
    fail_s: float | None
    dead_s: float | None


class BeatWatch:
    """One series of reads.

    Attributes:
        seen: By id of the run; replaced as a whole by each read, so that any thread may look.
    """

    def __init__(self) -> None:
        self.seen: Mapping[str, SeenBeat] = {}
        self._last_at: float | None = None
        self.reads = 0

    def lose(self) -> None:
        """Begin a new series: a read has failed, or another server answers."""
        self._last_at = None

    def note(self, rows: Iterable[Row], *, asked_at: float, answered_at: float) -> dict[str, int]:
        """Take the rows of `runs_sql.BEATS`.

        Args:
            rows: As they were read.
            asked_at: CLOCK_BOOTTIME before the read.
            answered_at: And after it.

        Returns:
            The number of each run that is silent: whoever still finds it may declare it dead.
        """
        gap_s = None if self._last_at is None else answered_at - self._last_at
        self._last_at, seen, silent = answered_at, dict[str, SeenBeat](), dict[str, int]()
        for run_id, number, fail_s, dead_s in rows:
            new = SeenBeat(_int(number), answered_at, False, _seconds(fail_s), _seconds(dead_s))
            seen[str(run_id)] = one = self._follow(self.seen.get(str(run_id)), new, gap_s)
            if one.dead_s is not None and asked_at - one.since >= one.dead_s:
                silent[str(run_id)] = one.number
        self.seen = seen
        self.reads += 1
        return silent

    def _follow(self, old: SeenBeat | None, new: SeenBeat, gap_s: float | None) -> SeenBeat:
        if old is None:
            return new
        if old.number != new.number:
            return msgspec.structs.replace(new, has_changed=True)
        if gap_s is None or new.dead_s is None or gap_s > new.dead_s / READS_IN_DEAD:
            return new
        return old

    def every_s(self, beat_s: float) -> float:
        """Seconds between two reads, so that none is missed by a jitter."""
        times = [one.dead_s for one in self.seen.values() if one.dead_s is not None]
        return min([beat_s, *(dead_s / READS_IN_DEAD / 2 for dead_s in times)])


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
