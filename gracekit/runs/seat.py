"""Seats: the instance of a run, and the locks that show that the run lives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from gracekit.errors import AlreadyRunningError
from gracekit.life import Alive, Identity, LifeLock, Liveness
from gracekit.process import Process
from gracekit.runs.names import instance_lock_name, lock_name
from gracekit.runs.run import ENDED, STOPPING, Run, judge_run, list_open
from gracekit.store.engine import Engine
from gracekit.store.files import make_directory

MAX_INSTANCES: Final = 1000


class Seat:
    """The instance of this run: its name, and its two locks.

    The lock of the instance prevents a second run of it. The lock of the run proves that it lives;
    it is on a file that no other run ever uses.

    Attributes:
        instance: Name of the instance.
        identity: Identity of this process, read when the seat was taken.
        lock_path: Path of the lock of the run; empty without a directory for locks.
        lock_file: Device and inode of that file; None without a directory.
        replaced: Ids of earlier runs of the instance that may act no more once this one joins.
    """

    def __init__(
        self,
        instance: str,
        identity: Identity,
        instance_lock: LifeLock | None,
        own: LifeLock | None,
        *,
        replaced: Sequence[str] = (),
    ) -> None:
        self.instance = instance
        self.replaced = replaced
        self.identity = identity
        self.lock_path = Path() if own is None else own.path
        self.lock_file = None if own is None else own.file
        self._instance_lock = instance_lock
        self._own = own

    def trouble(self) -> str | None:
        """Why other processes cannot see any more that this run lives; None if they can."""
        locks = [lock for lock in (self._own, self._instance_lock) if lock is not None]
        return next((seen for lock in locks if (seen := lock.trouble()) is not None), None)

    def note_stop(self, code: int | None = None) -> None:
        """Note in the lock file that a stop has begun, or ended with *code*.

        For the case that the store cannot be written.
        """
        self._note(STOPPING if code is None else f"{ENDED}{code}")

    def clear_note(self) -> None:
        """Clear the note, after the stop-intent was committed or the stop was withdrawn."""
        self._note("")

    def _note(self, text: str) -> None:
        if self._own is not None:
            self._own.write_note(text)

    def leave(self, *, is_recorded: bool) -> None:
        """Release the locks; may be called twice.

        Args:
            is_recorded: Whether the end of the run is on record, so that its lock file is not
                needed any more.
        """
        if self._own is not None:
            self._own.release(remove=is_recorded)
        if self._instance_lock is not None:
            self._instance_lock.release()


Doubts = Callable[[list[Run]], Awaitable[None]]
"""Finds out whether these runs live; raises AlreadyRunningError if one does."""


async def take_seat(
    engine: Engine,
    process: Process,
    directory: Path | None,
    *,
    run_id: str,
    service: str,
    host: str,
    instance: str | None,
    settle_doubts: Doubts | None = None,
) -> Seat:
    """Take the name *instance*, or the first free one of `{host}-{n}`.

    Without a *directory* no locks are taken, as no other process sees such a store. In a store that
    hosts share, *settle_doubts* is asked about runs of this instance or host of which nothing is
    proven: two of them would be one member, or read one directed queue.

    Raises:
        AlreadyRunningError: the instance lives, or all names are taken.
        ConfigError: *directory* or a lock in it is not ours, or no lock can be taken there.
    """
    if directory is not None:
        # Before `judge_run`, which looks for locks there.
        make_directory(directory, with_parent=settle_doubts is not None)
    lives = await _judged(engine, process, directory, service, is_shared=settle_doubts is not None)
    if settle_doubts is not None:
        doubtful = [run for run, life in lives if life.answer is Alive.NOT_PROVEN]
        same = [run for run in doubtful if run.instance == instance or run.host == host]
        if same:
            await settle_doubts(same)
            lives = await _judged(engine, process, directory, service, is_shared=True)
    may_act = {
        run.instance
        for run, life in lives
        if life.is_alive or (settle_doubts is not None and not life.is_dead)
    }
    identity = process.identify()
    names: Iterable[str] = [instance] if instance else (f"{host}-{n}" for n in range(MAX_INSTANCES))
    for name in names:
        if name in may_act:
            continue
        replaced = [run.run_id for run, _ in lives if run.instance == name]
        if directory is None:
            return Seat(name, identity, None, None, replaced=replaced)
        instance_lock = LifeLock(directory / instance_lock_name(service, name))
        if instance_lock.acquire():
            own = LifeLock(directory / lock_name(run_id))
            if own.acquire():
                return Seat(name, identity, instance_lock, own, replaced=replaced)
            instance_lock.release()
    if instance:
        raise taken(service, instance)
    raise AlreadyRunningError(
        f"all {MAX_INSTANCES} instances of service {service!r} on {host!r} live"
    )


async def _judged(
    engine: Engine, process: Process, directory: Path | None, service: str, *, is_shared: bool
) -> list[tuple[Run, Liveness]]:
    """The runs of the service that may still act, each with whether it lives."""
    runs = await list_open(engine, service)
    return [(run, judge_run(run, process, directory, is_shared=is_shared)) for run in runs]


def taken(service: str, instance: str) -> AlreadyRunningError:
    """The error of a start under a name that a living run has."""
    return AlreadyRunningError(
        f"instance {instance!r} of service {service!r} is running, and only one process "
        "at a time may have that name; stop it, or set GRACEKIT_INSTANCE to another name"
    )
