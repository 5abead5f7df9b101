"""How long attempts take: what is expected, and when nothing is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gracekit.tracker.task import FEWEST, KEPT, Durations


def durations(*seconds: float) -> Durations:
    made = Durations()
    for each in seconds:
        made.add(each)
    return made


def test_too_few_attempts_are_no_history():
    """An estimate is never invented."""
    assert durations(*[1.0] * (FEWEST - 1)).expected(0.0) is None
    assert durations(*[1.0] * FEWEST).expected(0.0) == 1.0


def test_a_high_quantile_of_those_that_took_longer_is_expected():
    """A task that has outlived the short ones is compared with the long ones; past all, nothing."""
    known = durations(*[1.0] * 40, *[60.0] * 2)

    assert [known.expected(s) for s in (0.0, 0.9, 1.0, 59.0, 60.0)] == [1.0, 1.0, 60.0, 60.0, None]


def test_the_last_attempts_alone_count():
    """A method that has become faster is not judged by its past; memory is bounded."""
    known = durations(*[60.0] * 1000, *[1.0] * KEPT)

    assert known.expected(0.0) == 1.0


@given(st.lists(st.floats(0, 1e6), max_size=100), st.floats(0, 1e6))
def test_what_is_expected_lies_ahead_and_has_happened(seconds, elapsed):
    """An expected end is never in the past, and always the length of a kept attempt."""
    expected = durations(*seconds).expected(elapsed)

    if expected is not None:
        assert expected > elapsed
        assert expected in seconds[-KEPT:]
