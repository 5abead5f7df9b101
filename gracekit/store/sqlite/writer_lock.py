"""The writer lock: processes that write one database queue here, not inside SQLite.

SQLite waits for its own lock by sleeping and trying again, so that under load
waiting processes are often asleep when the lock becomes free. With a blocking
`lockf` on a separate file the kernel hands the lock to the next process. The lock
serves fairness only; correctness still relies on `BEGIN IMMEDIATE`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from gracekit import backoff
from gracekit.life import is_locked


class WriterLock:
    """A lock between processes; in each process one thread uses it.

    The file must not be opened elsewhere in this process: closing any other
    descriptor of it would release the lock.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)

    def info(self) -> os.stat_result:
        """`fstat` of the open file, even if its name was removed or replaced meanwhile."""
        return os.fstat(self._fd)

    def take(self) -> None:
        """Wait for the lock; without a timeout, so a frozen holder blocks for ever."""
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
            except OSError as error:
                # The kernel detects deadlocks between processes, not threads: two processes
                # that share two databases can briefly look like a deadlock.
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(backoff.FALSE_DEADLOCK_S)
            else:
                return

    def is_held(self) -> bool:
        """Whether any process is writing, also this one; from any thread."""
        return is_locked(self._fd)

    def give(self) -> None:
        """Release the lock to the next process; does nothing if it is not held."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which also releases the lock."""
        os.close(self._fd)
