"""A "virtual machine": a process that runs until its user, a crash, or its host ends it.

    python -m examples.vms.guest DIRECTORY NAME MEMORY

SIGUSR1 is its user, who shuts it down from inside; SIGUSR2 a crash of its kernel.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path


def main(directory: Path, name: str) -> None:
    """Run; the lock shows that it does, and keeps a second one from running."""
    lock = (directory / f"{name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (directory / "twice").touch()  # what must never happen
        raise SystemExit(9) from None
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: os.abort())
    lock.write(str(os.getpid()))
    lock.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
