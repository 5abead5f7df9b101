"""How long gracekit waits before it tries again: all such pauses are defined here.

A pause that grows is a `Backoff`; a constant one is a number of seconds. Each is named for what
is tried again, and its docstring says what has failed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gracekit.clock import Clock


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses that begin short and grow up to a bound.

    Attributes:
        first_s: Seconds before the second try.
        most_s: Longest pause in seconds, before jitter.
        factor: Each pause is the previous one times this.
        jitter: Whether `Clock.jitter` varies each pause, so that siblings do not try in step.
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: bool = False

    def pauses(self, clock: Clock) -> Iterator[float]:
        """The pauses in seconds, one for each failed try; the iterator never ends."""
        pause_s = self.first_s
        while True:
            yield clock.jitter(pause_s) if self.jitter else pause_s
            pause_s = min(self.most_s, self.factor * pause_s)

    def after(self, elapsed_s: float) -> float:
        """The next pause in seconds, *elapsed_s* after the first try, if tries are not counted.

        Several processes may have made them. If each pause is the previous one times the factor,
        the next pause is about the sum of all earlier ones times (factor - 1).
        """
        return min(self.most_s, max(self.first_s, (self.factor - 1) * elapsed_s))


# -- the process ----------------------------------------------------------------------------

WORK: Final = Backoff(first_s=0.1, most_s=10.0, jitter=True)
"""Background work raised. If it had run for longer than the longest pause, the pauses start over
from the first."""
RECOVERY_S: Final = 5.0
"""A pass of recovery, or a task beside it, failed."""
BEAT_S: Final = 0.5
"""A beat of this run was not answered, or those of others could not be read."""
HOLD_S: Final = 1.0
"""A lease that a hold waits for is held."""
OVERDUE_S: Final = 1.0
"""A parked task could not be ended after its deadline."""
MISSING_S: Final = 0.5
"""An accepted row may be lost, or a claim that was under way may be about to begin it."""
PROBE: Final = Backoff(first_s=1.0, most_s=60.0)
"""A probe raised or was slow, or a task could not be settled."""
RESOURCES_S: Final = 5.0
"""A pass over the resources of a host failed, or another run has begun it. Also the pause before
the next look at a resource on which a task works."""
BROKEN_PASS: Final = Backoff(first_s=5.0, most_s=600.0, jitter=True)
"""In a pass over resources, a kind could not be read; at most `reconciliation_interval`."""

NO_THREAD: Final = Backoff(first_s=1.0, most_s=10.0)
"""No thread could be started for a plain handler."""

# -- the store ------------------------------------------------------------------------------

OUTCOME: Final = Backoff(first_s=0.01, most_s=1.0)
"""The store refused to commit an outcome."""
REACH: Final = Backoff(first_s=0.1, most_s=3.0)
"""The server of the store could not be reached, or refused a commit that may succeed now."""
PAROLE_S: Final = 1.0
"""The store refused to commit that a suspect is no longer alone."""
FALSE_DEADLOCK_S: Final = 0.002
"""The kernel reported a deadlock on the writer lock of a database, although there is none."""

# -- deliveries -----------------------------------------------------------------------------

GIVE_BACK_S: Final = 0.5
"""A delivery could not be recorded, and is given back after this pause. The transport may deliver
it here again at once, so with a broken store the loop would do nothing else."""
SIBLING: Final = Backoff(first_s=0.5, most_s=60.0, factor=1.8)
"""Only another version serves a delivery, which is given back after this pause. RabbitMQ 4 gives up
a message that a quorum queue delivered 20 times; with these pauses it is given back about 13
times before it is refused."""
CONSUME_S: Final = 1.0
"""A lane could not begin to consume."""

LOOKUP: Final = Backoff(first_s=0.2, most_s=2.0, jitter=True)
"""A caller waits for a result, and no server of the service waits with it."""

# -- answers --------------------------------------------------------------------------------

REPLY_S: Final = 1.0
"""The transport did not take a reply."""

# -- notifications --------------------------------------------------------------------------

AFTER_CLOCK_S: Final = 3.0
"""The wall clock was set. Until the next look at notifications, their times are set likewise."""
NOTIFICATIONS: Final = Backoff(first_s=1.0, most_s=30.0, jitter=True)
"""The transport did not take notifications."""

# -- RabbitMQ -------------------------------------------------------------------------------

CONNECTION: Final = Backoff(first_s=0.1, most_s=3.0, jitter=True)
"""A connection broke, or no host of the URL accepted one."""
CONSUMER: Final = Backoff(first_s=0.05, most_s=3.0, jitter=True)
"""A consumer ended, or could not be opened."""
PUBLISH_S: Final = 0.25
"""A publish failed, or its reply queue does not exist."""
CHANNEL_S: Final = 1.0
"""The broker nacked a publish. Its channel is replaced, but no more often than this, because a full
queue nacks on each new channel too."""
FOREIGN_READER_S: Final = 0.5
"""A queue seems to have a reader with another store. It is reported only if it is seen again, as a
sibling that comes or goes looks like one for a moment."""
NO_READER_S: Final = 1.0
"""A queue seems to have no consumer. It counts as such only if a second look agrees, because a
broker may count a consumer late."""
