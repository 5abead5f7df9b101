"""The writer lock: several processes that write one database queue here, not inside SQLite.

SQLite waits for its own lock by sleeping and asking again, so that under load
some process is always asleep when the lock is free. A blocking `lockf` on a
file of its own is handed on by the kernel. It is for fairness alone:
what it protects is still protected by `BEGIN IMMEDIATE`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from gracekit import backoff


class WriterLock:
    """A lock between processes, taken and given back by one thread of each.

    The file must not be opened elsewhere in this process: closing any other
    descriptor of it would release the lock.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)

    def info(self) -> os.stat_result:
        """Of the file that is open, whatever stands under its name by now."""
        return os.fstat(self._fd)

    def take(self) -> None:
        """Wait until no other process has the lock: without a limit, if one of them is frozen."""
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
            except OSError as error:
                # The kernel looks for deadlocks between processes, not threads: two
                # processes that share two databases can look like one for a moment.
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(backoff.FALSE_DEADLOCK_S)
            else:
                return

    def give(self) -> None:
        """Let the next process have it; harmless if it is not taken."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock for good."""
        os.close(self._fd)
