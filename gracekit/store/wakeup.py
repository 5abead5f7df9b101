"""Wake-ups between processes: each process has a named pipe that wakes its loop at once.

The sender never blocks and never fails; it learns whether a living process listens. A
wake-up carries no data, it only means "look at the store again", so several may arrive as
one. A *nudge* is a second kind of wake-up, for checks that are cheap and frequent.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from gracekit.store import files

_WAKE: Final = b"\0"
_NUDGE: Final = b"\1"
_DRAIN_BYTES: Final = 65536  # the default capacity of a pipe


def wakeups_directory(database: Path) -> Path:
    """The directory of the wake-up pipes of a database: `<db>-wakeups/`."""
    return database.with_name(database.name + "-wakeups")


class Wakeup:
    """The wake-up pipe of one process.

    Args:
        path: Of the pipe, unique to this process; its directory is made with mode 0700.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path.absolute()
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_wake: Callable[[], None] | None = None
        self._on_nudge: Callable[[], None] | None = None

    def start(
        self, on_wake: Callable[[], None], *, on_nudge: Callable[[], None] | None = None
    ) -> None:
        """Make the pipe; from then on call *on_wake* on the running loop after wake-ups.

        One call may stand for several wake-ups. *on_nudge* is called for nudges; without it
        they are dropped.

        A second call does nothing.

        Raises:
            ConfigError: its directory belongs to another user, or is no directory.
        """
        if self._fd is not None:
            return
        files.make_directory(self.path.parent)
        # A process of the same name that died may have left its pipe.
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path, 0o600)
        # For writing too: otherwise the pipe would be at end-of-file whenever no sender has it
        # open, and the loop would spin on it.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._on_wake, self._on_nudge = on_wake, on_nudge
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._heard)

    def stop(self) -> None:
        """Remove the pipe; may be called twice or before `start`."""
        if self._fd is None or self._loop is None:
            return
        self.path.unlink(missing_ok=True)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = None

    def _heard(self) -> None:
        assert self._fd is not None
        assert self._on_wake is not None
        try:
            # Empty the pipe before the callback: a wake-up during it must cause another call.
            heard = os.read(self._fd, _DRAIN_BYTES)
        except BlockingIOError:
            heard = _WAKE
        if _NUDGE in heard and self._on_nudge is not None:
            self._on_nudge()
        if _WAKE in heard:
            self._on_wake()


class Wakeups:
    """The wake-up pipes of a store's runs: our own, and those of siblings.

    Args:
        directory: Of the pipes; None for a store that no other process can open.
        run_id: This process's run; None for a process that only wakes others.
    """

    def __init__(self, directory: Path | None, run_id: str | None) -> None:
        self._directory = directory
        self._own = (
            None if directory is None or run_id is None else Wakeup(pipe_of(directory, run_id))
        )

    def start(self, on_wake: Callable[[], None], *, on_nudge: Callable[[], None]) -> None:
        """Listen on our own pipe; as `Wakeup.start`."""
        if self._own is not None:
            self._own.start(on_wake, on_nudge=on_nudge)

    def stop(self) -> None:
        """Remove our own pipe; may be called twice or before `start`."""
        if self._own is not None:
            self._own.stop()

    def wake(self, run_ids: Iterable[str]) -> None:
        """Have those runs look at the store, because there is a row to claim."""
        for run_id in run_ids:
            if self._directory is not None:
                wake(pipe_of(self._directory, run_id))

    def nudge(self, run_id: str) -> None:
        """Nudge that run, which waits for a lease that has become free."""
        if self._directory is not None:
            nudge(pipe_of(self._directory, run_id))


def pipe_of(directory: Path, run_id: str) -> Path:
    """The wake-up pipe of a run, in the directory of its store's runs."""
    return directory / f"{run_id}.wakeup"


def nudge(path: Path) -> bool:
    """As `wake`, with a nudge."""
    return wake(path, _NUDGE)


def wake(path: Path, how: bytes = _WAKE) -> bool:
    """Wake the process that listens at *path*, without waiting.

    Returns:
        Whether the wake-up arrives; False if no living process has the pipe open.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no such pipe, or no process reads it
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        os.write(fd, how)
    except BlockingIOError:  # full of wake-ups that its owner has not read yet
        return True
    except OSError:  # its reader closed it meanwhile
        return False
    else:
        return True
    finally:
        os.close(fd)
