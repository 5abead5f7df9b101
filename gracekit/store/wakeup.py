"""Wake-ups between processes: a named pipe that wakes its owner's loop at once.

The sender never waits and never fails; it learns whether a living process listens. A
wake-up carries no news, only "look again": several may arrive as one. A nudge is a
wake-up of another kind, for what is cheap to look at and comes often.
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
_DRAIN_BYTES: Final = 65536  # a pipe holds no more, unless somebody enlarged it


def wakeups_directory(database: Path) -> Path:
    """Where the wake-up pipes of a database are: `<db>-bells/`."""
    return database.with_name(database.name + "-bells")


class Wakeup:
    """The wake-up pipe of one process.

    Args:
        path: Of the pipe, unique to this owner; its directory is made with mode 0700.
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
        """Make the pipe and call *on_wake* on the running loop for each wake-up or several.

        *on_nudge* is called for nudges; without it they are dropped.

        A second call does nothing.

        Raises:
            ConfigError: its directory is somebody else's, or none.
        """
        if self._fd is not None:
            return
        files.make_directory(self.path.parent)
        # A dead owner of the same name may have left its pipe.
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path, 0o600)
        # For writing too: else the pipe would be at its end whenever no sender has it open,
        # and the loop would spin on it.
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
            # Before the callback: a wake-up during it must cause another call.
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
        directory: Where they are; None for a store that no other process sees.
        run_id: Ours; None for a process that only wakes others.
    """

    def __init__(self, directory: Path | None, run_id: str | None) -> None:
        self._directory = directory
        self._own = (
            None if directory is None or run_id is None else Wakeup(pipe_of(directory, run_id))
        )

    def start(self, on_wake: Callable[[], None], *, on_nudge: Callable[[], None]) -> None:
        """Listen by ours; as `Wakeup.start`."""
        if self._own is not None:
            self._own.start(on_wake, on_nudge=on_nudge)

    def stop(self) -> None:
        """Remove ours; may be called twice or before `start`."""
        if self._own is not None:
            self._own.stop()

    def wake(self, run_ids: Iterable[str]) -> None:
        """Have those runs look: something was left for others to claim."""
        for run_id in run_ids:
            if self._directory is not None:
                wake(pipe_of(self._directory, run_id))

    def nudge(self, run_id: str) -> None:
        """Wake that run, which waits for a lease that is free now."""
        if self._directory is not None:
            nudge(pipe_of(self._directory, run_id))


def pipe_of(directory: Path, run_id: str) -> Path:
    """The wake-up pipe of a run, in the directory of its store's runs."""
    return directory / f"{run_id}.bell"


def nudge(path: Path) -> bool:
    """As `wake`, with a nudge."""
    return wake(path, _NUDGE)


def wake(path: Path, how: bytes = _WAKE) -> bool:
    """Wake the process that listens at *path*, without waiting.

    Returns:
        Whether it arrives; false where no living process has the pipe open.
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
    except OSError:  # it was removed since
        return False
    else:
        return True
    finally:
        os.close(fd)
