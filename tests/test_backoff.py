"""Pauses before a next try: how they grow."""

from __future__ import annotations

from itertools import accumulate, islice

import pytest

from gracekit import backoff
from gracekit.backoff import Backoff
from gracekit.clock import Clock

GROWING = [name for name, value in vars(backoff).items() if isinstance(value, Backoff)]


class Doubling(Clock):
    """A clock whose jitter can be told from none."""

    def jitter(self, seconds: float) -> float:
        return 2 * seconds


def test_pauses_grow_by_the_factor_up_to_the_longest():
    """The first is the first; each next one is larger by the factor, until the bound."""
    pauses = Backoff(first_s=1.0, most_s=10.0, factor=3.0).pauses(Doubling())

    assert list(islice(pauses, 5)) == [1.0, 3.0, 9.0, 10.0, 10.0]


def test_jitter_spreads_each_pause_and_adds_nothing_up():
    """The clock draws it anew for each pause, from the pause without it."""
    pauses = Backoff(first_s=1.0, most_s=4.0, jitter=True).pauses(Doubling())

    assert list(islice(pauses, 4)) == [2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("name", GROWING)
def test_a_pause_by_the_time_that_has_passed_is_the_one_by_tries(name: str):
    """Both ways to ask give the same pauses: tries may be counted, or only their begin be known."""
    growing: Backoff = getattr(backoff, name)
    plain = Backoff(first_s=growing.first_s, most_s=growing.most_s, factor=growing.factor)
    pauses = list(islice(plain.pauses(Clock()), 12))
    shifted = growing.first_s / (growing.factor - 1)  # what a try before the first would have taken

    for elapsed_s, pause_s in zip(accumulate(pauses, initial=0.0), pauses, strict=False):
        if pause_s < growing.most_s:
            assert growing.after(elapsed_s + shifted) == pytest.approx(pause_s)


@pytest.mark.parametrize("elapsed_s", [-5.0, 0.0, 1e12])
def test_a_pause_stays_within_its_bounds(elapsed_s: float):
    """Also where a wall clock was set back, or for ever has passed."""
    pause_s = backoff.PROBE.after(elapsed_s)

    assert backoff.PROBE.first_s <= pause_s <= backoff.PROBE.most_s
