"""Ids and times that come from the clock."""

from __future__ import annotations

import uuid

from gracekit.clock import Clock


class SetClock(Clock):
    """A clock whose wall time is set by hand."""

    at = 1_800_000_000.125

    def wall(self) -> float:
        return self.at


def test_request_ids_are_version_7_uuids_of_their_moment():
    """
    32 hex digits; the first twelve are the milliseconds since the epoch.
    """
    made = uuid.UUID(hex=SetClock().new_request_id())

    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_800_000_000_125


def test_request_ids_sort_by_time_and_do_not_repeat():
    """
    A later one is larger; of one millisecond all differ.
    """
    clock = SetClock()
    of_now = {clock.new_request_id() for _ in range(10_000)}
    clock.at += 0.001
    later = clock.new_request_id()

    assert len(of_now) == 10_000
    assert all(one < later for one in of_now)
