"""All clocks, ids and random numbers of the product.

There are three kinds of time, which are never mixed: loop time for deadlines inside
a run, wall time for stored moments, and the machine's time for measurements on which
no decision depends. Random ids come from here too, so that a simulation can replace
all of it with a seeded source.
"""

from __future__ import annotations

import asyncio
import os
import random
import time


class Clock:
    """The production clock; a simulation passes its own subclass."""

    def loop(self) -> float:
        """Loop time in seconds; deadlines of drains and calls use it."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds since the epoch: for stored moments, never for liveness or ownership."""
        return time.time()

    def machine(self) -> float:
        """Monotonic seconds of the machine; virtual loop time does not change them."""
        return time.monotonic()

    def new_id(self) -> str:
        """128 random bits as 32 hex digits, the form of oslo's `_unique_id`."""
        return os.urandom(16).hex()

    def new_request_id(self) -> str:
        """An id that sorts by time: 32 hex digits of a UUIDv7 (RFC 9562).

        A store keeps ids in order. So ids that are made one after the other lie in the same pages,
        and a new one costs the same beside a million old ones as beside none.
        """
        digits = self.new_id()
        variant = "89ab"[int(digits[16], 16) & 3]
        return f"{int(self.wall() * 1000):012x}7{digits[13:16]}{variant}{digits[17:]}"

    def jitter(self, seconds: float) -> float:
        """*seconds* plus or minus a fifth, so that siblings do not act in step."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, guards nothing


def age_s(now: float, then: float) -> float:
    """Seconds from *then* to *now*; a wall clock that stepped back counts as age 0."""
    return max(0.0, now - then)
