"""Seats: the instance of a run, and the locks that show that the run lives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gracekit.errors import AlreadyRunningError, DependencyError
from gracekit.life import Identity, LifeLock
from gracekit.process import Process
from gracekit.runs.names import instance_lock_name, lock_name
from gracekit.runs.run import ENDED, STOPPING, judge_run, list_open
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
    """

    def __init__(
        self,
        instance: str,
        identity: Identity,
        instance_lock: LifeLock | None,
        own: LifeLock | None,
    ) -> None:
        self.instance = instance
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


async def take_seat(
    engine: Engine,
    process: Process,
    directory: Path | None,
    *,
    run_id: str,
    service: str,
    host: str,
    instance: str | None,
    is_shared: bool = False,
) -> Seat:
    """Take the name *instance*, or the first free one of `{host}-{n}`.

    Without a *directory* no locks are taken, as no other process sees such a store. On a store that
    hosts share, the name of a run that is not proven dead is taken too: it may act on another host.

    Raises:
        AlreadyRunningError: the instance lives, or all names are taken.
        DependencyError: it is not proven that an earlier run of the instance is dead.
        ConfigError: *directory* or a lock in it is not ours, or no lock can be taken there.
    """
    if directory is not None:
        # Before `judge_run`, which looks for locks there.
        make_directory(directory, with_parent=is_shared)
    identity = process.identify()
    runs = await list_open(engine, service)
    judged = [(run, judge_run(run, process, directory, is_shared=is_shared)) for run in runs]
    taken = {
        run.instance for run, life in judged if life.is_alive or (is_shared and not life.is_dead)
    }
    names: Iterable[str] = [instance] if instance else (f"{host}-{n}" for n in range(MAX_INSTANCES))
    for name in names:
        if name in taken:
            continue
        if directory is None:
            return Seat(name, identity, None, None)
        instance_lock = LifeLock(directory / instance_lock_name(service, name))
        if instance_lock.acquire():
            own = LifeLock(directory / lock_name(run_id))
            if own.acquire():
                return Seat(name, identity, instance_lock, own)
            instance_lock.release()
    for run, life in judged:
        if is_shared and run.instance == instance and not (life.is_alive or life.is_dead):
            raise DependencyError(
                f"it is not proven that run {run.run_id} of instance {instance!r} on host "
                f"{run.host!r} is dead ({life.reason}): when you know that it is, say so by: "
                f"gracekit runs gone {run.run_id} --reason '...'"
            )
    if instance:
        raise AlreadyRunningError(
            f"instance {instance!r} of service {service!r} is running, and only one process "
            "at a time may have that name; stop it, or set GRACEKIT_INSTANCE to another name"
        )
    raise AlreadyRunningError(
        f"all {MAX_INSTANCES} instances of service {service!r} on {host!r} live"
    )
