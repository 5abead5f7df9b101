"""When a run counts as silent: by its own time, over an unbroken series of reads."""

from __future__ import annotations

from typing import Final

import pytest

from gracekit.runs.watch import BeatWatch

FAIL_S: Final = 12.0
DEAD_S: Final = 30.0


class Watcher:
    """Reads one run's beat, each time within *took_s* seconds."""

    def __init__(self, dead_s: float | None = DEAD_S, took_s: float = 0.5) -> None:
        self.watch = BeatWatch()
        self.dead_s = dead_s
        self.took_s = took_s

    def read(self, at: float, number: int = 7) -> dict[str, int]:
        rows = [("one", number, FAIL_S, self.dead_s)]
        return self.watch.note(rows, asked_at=at, answered_at=at + self.took_s)

    def until_silent(self, begin: float, *, every_s: float = 3.0, number: int = 7) -> float:
        """Read on from *begin*; the start of the read that found it silent."""
        at = begin
        while not self.read(at, number):
            at += every_s
            assert at < begin + 10 * DEAD_S, "never silent"
        return at


def test_a_run_is_silent_when_its_time_has_passed_since_the_answer_of_the_first_read():
    """Not since its question: the beat may have been written between the two."""
    watcher = Watcher(took_s=2.0)

    first = 100.0
    found_at = watcher.until_silent(first, every_s=1.0)

    assert found_at == first + 2.0 + DEAD_S
    assert watcher.read(found_at + 1) == {"one": 7}


def test_a_beat_begins_the_time_again():
    """Whatever its number is."""
    watcher = Watcher()
    for at in range(0, 30, 3):
        watcher.read(at, number=7)

    found_at = watcher.until_silent(30, number=3)

    assert found_at >= 30 + DEAD_S
    assert watcher.watch.seen["one"].has_changed is True


@pytest.mark.parametrize("pause_s", [DEAD_S / 4 + 0.1, 10 * DEAD_S])
def test_a_pause_of_the_watcher_begins_the_time_again(pause_s: float):
    """It may have been stopped while everybody beat, and read an old answer."""
    watcher = Watcher(took_s=0.0)
    for at in range(0, 28, 3):
        watcher.read(at)

    back_at = 27 + pause_s
    assert watcher.read(back_at) == {}
    assert watcher.until_silent(back_at) >= back_at + DEAD_S


def test_a_read_that_failed_begins_the_time_again():
    """A watcher that cannot read cannot know, also if it can read again at once."""
    watcher = Watcher(took_s=0.0)
    for at in range(0, 28, 3):
        watcher.read(at)

    watcher.watch.lose()

    assert watcher.until_silent(28) >= 28 + DEAD_S


@pytest.mark.parametrize("dead_s", [10.0, 120.0])
def test_the_time_is_that_of_the_run_that_is_watched(dead_s: float):
    """Not the watcher's, whose settings may differ."""
    watcher = Watcher(dead_s=dead_s, took_s=0.0)

    assert watcher.until_silent(5, every_s=1) == 5 + dead_s
    assert watcher.watch.every_s(beat_s=3.0) <= dead_s / 4


def test_a_run_whose_death_can_be_proven_is_never_silent():
    """Its row has no times, as in a store in a file."""
    watcher = Watcher(dead_s=None)

    assert not any(watcher.read(at) for at in range(0, 1000, 3))


def test_a_run_that_has_left_is_forgotten():
    """If its name comes back, nothing is known of it."""
    watcher = Watcher(took_s=0.0)
    for at in range(0, 28, 3):
        watcher.read(at)
    watcher.watch.note([], asked_at=28, answered_at=28)

    assert watcher.watch.seen == {}
    assert watcher.until_silent(29) == 59
