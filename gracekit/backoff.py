"""How long gracekit waits before it tries again: every such pause stands here and nowhere else.

A pause that grows is a `Backoff`; one that stays the same is a number of seconds. Each is named
for what is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gracekit.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that begin short and grow up to a bound.

    Attributes:
        first_s: Seconds before the second try.
        most_s: No pause is longer, but for its jitter.
        factor: Each pause is so many times the one before.
        jitter: Whether each is spread by `Clock.jitter`, so that siblings do not try in step.
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: bool = False

    def pauses(self, clock: Clock) -> Iterator[float]:
        """The pauses in seconds, one for each try that failed, without an end."""
        pause_s = self.first_s
        while True:
            yield clock.jitter(pause_s) if self.jitter else pause_s
            pause_s = min(self.most_s, self.factor * pause_s)

    def after(self, elapsed_s: float) -> float:
        """The pause in seconds *elapsed_s* after the first try: for tries that are not counted.

        They may have been made by several processes. Where pauses grow by a factor, the
        next one is what the earlier ones took together, times the factor less one.
        """
        return min(self.most_s, max(self.first_s, (self.factor - 1) * elapsed_s))


# -- the process ----------------------------------------------------------------------------

WORK: Final = Backoff(first_s=0.1, most_s=10.0, jitter=True)
"""Work in the background that raised. Work that ran for longer than the longest pause counts as
well again: its pauses begin anew."""
RECOVERY_S: Final = 5.0
"""A pass of recovery, or what is done beside it, that failed."""
OVERDUE_S: Final = 1.0
"""A parked task whose deadline has passed, and which could not be ended."""
MISSING_S: Final = 0.5
"""An accepted row that may be lost, or may be about to be begun by a claim that was under way."""
PROBE: Final = Backoff(first_s=1.0, most_s=60.0)
"""A probe that raised or was slow, or a task that could not be settled."""
RESOURCES_S: Final = 5.0
"""A pass over the resources of a host that another run has begun, or that could not be made; and
the next look at one resource on which somebody works."""
BROKEN_PASS: Final = Backoff(first_s=5.0, most_s=600.0, jitter=True)
"""A pass in which a kind could not be read; no longer than `reconciliation_interval`."""

# -- the store ------------------------------------------------------------------------------

OUTCOME: Final = Backoff(first_s=0.01, most_s=1.0)
"""The commit of an outcome, which the store refused."""
PAROLE_S: Final = 1.0
"""The commit that a suspect is no longer alone, which the store refused."""
FALSE_DEADLOCK_S: Final = 0.002
"""The lock between writers of one database, where the kernel saw a deadlock that is none."""

# -- deliveries -----------------------------------------------------------------------------

GIVE_BACK_S: Final = 0.5
"""Before a delivery goes back for want of its record: the transport may hand it out to us again in
the same moment, and a store that stays broken would keep the loop busy with that alone."""
SIBLING: Final = Backoff(first_s=0.5, most_s=60.0, factor=1.8)
"""Before a delivery goes back that only another version serves. RabbitMQ 4 gives up what a quorum
queue has delivered 20 times, and a message that no sibling takes goes back about 13 times."""
CONSUME_S: Final = 1.0
"""A lane that could not begin to consume."""

# -- answers --------------------------------------------------------------------------------

REPLY_S: Final = 1.0
"""A reply that the transport does not take for now."""

# -- notifications --------------------------------------------------------------------------

AFTER_CLOCK_S: Final = 3.0
"""The next look at notifications after the wall clock was set: until then their times follow it."""
NOTIFICATIONS: Final = Backoff(first_s=1.0, most_s=30.0, jitter=True)
"""Notifications that the transport does not take for now."""

# -- RabbitMQ -------------------------------------------------------------------------------

CONNECTION: Final = Backoff(first_s=0.1, most_s=3.0, jitter=True)
"""A connection that broke, or that no host of the URL accepted."""
CONSUMER: Final = Backoff(first_s=0.05, most_s=3.0, jitter=True)
"""A consumer that ended, or could not be opened."""
PUBLISH_S: Final = 0.25
"""A publish that failed, or whose reply queue is not there."""
CHANNEL_S: Final = 1.0
"""Between channels that are left for nacks, at least: a queue that is full nacks on each."""
FOREIGN_READER_S: Final = 0.5
"""Before a foreign reader is believed, and looked for again."""
NO_READER_S: Final = 1.0
"""Before a queue counts as one without readers: a broker may count a reader late."""
