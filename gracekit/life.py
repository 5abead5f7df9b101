"""Who is alive: one rule, the evidence that it judges, and the lock that proves a life.

`judge` is the rule, and the only one. It answers *alive*, *dead* or *not
proven*: a missing sign is no proof. Two witnesses are asked. The lock that a
life holds on a file of its own is dropped by the kernel at its death. The
process table knows more, but it can be asked only under an equal boot id, in
the same pid namespace, and where nothing is hidden from us.

Rows record a life by its identity and its lock file. Who judges looks for that
file by name in the directory as it sees it itself, because the same volume may
be mounted elsewhere under another path.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import shlex
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Self
from weakref import WeakSet

from gracekit.errors import ConfigError

# -- the rule -------------------------------------------------------------------------


class Alive(enum.Enum):
    """Whether somebody is alive."""

    ALIVE = "alive"
    DEAD = "dead"
    NOT_PROVEN = "not proven"  # neither: it is reported, and left alone


@dataclass(frozen=True, slots=True)
class Liveness:
    """An answer and its reason, which is half a sentence for operators."""

    answer: Alive
    reason: str

    @property
    def is_alive(self) -> bool:
        """Whether life is proven."""
        return self.answer is Alive.ALIVE

    @property
    def is_dead(self) -> bool:
        """Whether death is proven."""
        return self.answer is Alive.DEAD

    def __str__(self) -> str:
        return f"{self.answer.value}: {self.reason}"


class Lock(enum.Enum):
    """What we see of the lock file; the value is half a sentence."""

    HELD = "its lock is held"
    FREE = "its lock is free"
    MISSING = "its lock file is missing"
    REPLACED = "its lock file was replaced"
    UNREADABLE = "its lock file cannot be read"
    UNKNOWN = "its row names no lock file of its own"


class Pid(enum.Enum):
    """What our process table says about the process; the value is half a sentence."""

    THERE = "its process is there"
    GONE = "its process is gone"
    REUSED = "another process has its pid"
    EXECED = "its process has replaced itself by this one"
    HIDDEN = "a process has its pid, and whether it is the same one is hidden from us"
    UNKNOWN = "the process table cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEvidence:
    """All that we know about one life.

    Attributes:
        same_boot: Whether its boot id is ours. Equal ids mean one running kernel; different
            ones prove nothing, because a container manager may give each container its own.
        same_namespace: Whether its pid namespace is ours.
        pid: Counts only where both are equal.
    """

    lock: Lock
    same_boot: bool
    same_namespace: bool
    pid: Pid


def judge(evidence: LifeEvidence) -> Liveness:
    """The rule."""
    table, seen = _table(evidence)
    reason = f"{evidence.lock.value}, and {seen}"
    match evidence.lock, table:
        case Lock.HELD, (Pid.GONE | Pid.REUSED | Pid.EXECED):
            # A child that C code has forked may hold the lock that its parent left behind.
            return Liveness(Alive.NOT_PROVEN, f"{reason}: something else holds it")
        case Lock.HELD, _:
            return Liveness(Alive.ALIVE, Lock.HELD.value)
        case _, Pid.THERE:
            return Liveness(Alive.ALIVE, Pid.THERE.value)
        case Lock.FREE, _:
            # It is the very file that was held. Where the table cannot be asked, that is enough.
            return Liveness(Alive.DEAD, reason)
        case (
            (Lock.MISSING | Lock.REPLACED | Lock.UNKNOWN),
            (Pid.GONE | Pid.REUSED | Pid.EXECED),
        ):
            return Liveness(Alive.DEAD, reason)
        case _:
            return Liveness(Alive.NOT_PROVEN, reason)


def _table(evidence: LifeEvidence) -> tuple[Pid, str]:
    """What the process table proves, and the words for it."""
    if not evidence.same_boot:
        return Pid.UNKNOWN, "it has another boot id, so its process cannot be looked up here"
    if not evidence.same_namespace:
        return Pid.UNKNOWN, "its process is in another pid namespace"
    return evidence.pid, evidence.pid.value


# -- what a row records of a life -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, so that a reused pid is not mistaken for it.

    Attributes:
        boot_id: Kernel's random id of this boot.
        pid_ns: Inode of the pid namespace; pids of another one say nothing here.
        pid: Process id inside that namespace.
        start_ticks: Clock ticks from boot to the start of the process, as read in its own time
            namespace: another one adds an offset.
        time_ns: Inode of that namespace; None if it was not recorded.
    """

    boot_id: str
    pid_ns: int
    pid: int
    start_ticks: int
    time_ns: int | None = None


class LockFile(NamedTuple):
    """Which file a lock is on.

    While its holder lives the file stays open, so its inode number cannot be given to another
    file: a file of this number *is* the one that was locked. Devices are numbered anew at each
    boot, so their number is compared within one boot only.
    """

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The file that a `stat` has described."""
        return cls(status.st_dev, status.st_ino)

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """The file at *path* now; None if there is none."""
        try:
            return cls.of(path.lstat())
        except OSError:
            return None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The other way round from `str`."""
        device, _, inode = text.partition(":")
        return cls(int(device, 16), int(inode, 16))

    def __str__(self) -> str:
        return f"{self.device:x}:{self.inode:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLife:
    """One life of a process, as its row records it.

    Attributes:
        lock_name: Name of its lock file, which no other life ever uses; empty if it has none.
        lock_file: None where an older gracekit did not record it.
    """

    identity: Identity
    lock_name: str
    lock_file: LockFile | None


# -- the evidence ---------------------------------------------------------------------


def read_identity() -> Identity:
    """The identity of this process, read now: a fork has another one."""
    stat = _read("/proc/self/stat")
    return Identity(
        boot_id=_read("/proc/sys/kernel/random/boot_id").strip(),
        pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
        pid=os.getpid(),
        start_ticks=_ended_and_start(stat)[1],
        time_ns=_time_namespace(),
    )


def _read(path: str) -> str:
    """One of the kernel's small files; transports ask often, and `Path` takes three times that."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode()
    finally:
        os.close(fd)


def _time_namespace() -> int | None:
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except OSError:  # a kernel before 5.6
        return None


def _ended_and_start(stat: str) -> tuple[bool, int]:
    """Of `/proc/<pid>/stat`: whether the process has ended, and its start in ticks.

    While a process ends, its first thread may be gone before others, which still hold its locks.
    """
    # The command name may hold spaces and brackets: fields count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    state, threads = fields[0], int(fields[17])
    return state in "ZX" and threads <= 1, int(fields[19])


def look(life: RecordedLife, directory: Path | None) -> LifeEvidence:
    """Gather the evidence; takes no lock, and raises nothing.

    The lock file is looked for in *directory*, as this process sees that; None if there is none.
    """
    theirs = life.identity
    try:
        mine = read_identity()
    except OSError:
        mine = None  # for example, no descriptor is left to read with
    same_boot = mine is None or theirs.boot_id == mine.boot_id
    path = None if directory is None or not life.lock_name else directory / life.lock_name
    # The process first. If it ended between the two looks, its lock would seem to outlive it, and
    # to be held by something else.
    pid = Pid.UNKNOWN if mine is None else _look_up(life, mine)
    return LifeEvidence(
        lock=look_at_lock(path, life.lock_file, same_boot=same_boot),
        same_boot=same_boot,
        same_namespace=mine is None or theirs.pid_ns == mine.pid_ns,
        pid=pid,
    )


def look_at_lock(path: Path | None, expected: LockFile | None, *, same_boot: bool) -> Lock:
    """What is seen of a lock by a descriptor of our own; takes nothing."""
    if path is None or expected is None:
        return Lock.UNKNOWN
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return Lock.MISSING
    except OSError:
        return Lock.UNREADABLE
    try:
        found = LockFile.of(os.fstat(fd))
        if found.inode != expected.inode or (same_boot and found.device != expected.device):
            return Lock.REPLACED
        return Lock.HELD if _is_locked(fd) else Lock.FREE
    except OSError:
        return Lock.UNREADABLE
    finally:
        os.close(fd)


def _look_up(life: RecordedLife, mine: Identity) -> Pid:
    """Ask the process table for a process of our own pid namespace."""
    theirs = life.identity
    if (absent := _absence(theirs.pid)) is not None:
        return absent
    seen = _compare_start(theirs, mine)
    if seen is Pid.HIDDEN:
        return _absence(theirs.pid) or seen  # it may have gone since we asked
    if seen is Pid.THERE and theirs.pid == mine.pid and _was_before_exec(life):
        return Pid.EXECED
    return seen


def _absence(pid: int) -> Pid | None:
    """Why nothing can be said of a process with that pid; None if there is one."""
    try:
        os.kill(pid, 0)  # also sees what /proc hides (hidepid)
    except ProcessLookupError:
        return Pid.GONE
    except PermissionError:
        return None  # it is there, and another user's
    except (OSError, OverflowError):
        return Pid.UNKNOWN
    return None


def _was_before_exec(life: RecordedLife) -> bool:
    """Whether this process had that life before an `exec`, which closes the lock."""
    return life.lock_file is not None and not LifeLock.is_held_here(life.lock_name)


def _compare_start(theirs: Identity, mine: Identity) -> Pid:
    """Whether the process that has the pid is the one that had it."""
    try:
        has_ended, start = _ended_and_start(_read(f"/proc/{theirs.pid}/stat"))
        is_our_table = Path("/proc/self").readlink() == Path(str(mine.pid))
    except (OSError, ValueError, IndexError):
        return Pid.HIDDEN
    if not is_our_table:  # /proc is mounted from another pid namespace
        return Pid.HIDDEN
    if has_ended:
        return Pid.GONE
    if start == theirs.start_ticks:
        return Pid.THERE
    # In another time namespace, the same process has other ticks.
    return Pid.REUSED if theirs.time_ns == mine.time_ns else Pid.HIDDEN


# -- the lock -------------------------------------------------------------------------


_ROOM: Final = 64  # bytes
_TRIES: Final = 10
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def _whole_file(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _is_locked(fd: int) -> bool:
    """Whether another open file description, of any process and also of ours, has the lock.

    It sees POSIX locks too, which older versions take.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def read_note(path: Path) -> str:
    """The note that a process wrote into its lock file; empty if there is none."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


class LifeLock:
    """Proof of life: a lock on a file, held until `release` or death.

    It is an open-file-description lock. Unlike a POSIX lock, it survives that
    another descriptor of the file is closed, by a backup for example. Unlike a
    POSIX lock, a forked child shares it; so the child closes its copy at the
    fork, and an exec closes it too.
    """

    _held: ClassVar[WeakSet[LifeLock]] = WeakSet()

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._fd: int | None = None
        self._file: LockFile | None = None

    @property
    def file(self) -> LockFile:
        """The file that it is on; only once it was acquired."""
        assert self._file is not None, "acquire() it first"
        return self._file

    def acquire(self) -> bool:
        """Take the lock without waiting; false if somebody else holds it.

        Raises:
            ConfigError: the file cannot be made, cannot be locked in this way, or is not ours.
        """
        for _ in range(_TRIES):
            if (is_ours := self._try_to_acquire()) is not None:
                return is_ours
        raise ConfigError(
            f"{self.path} was replaced {_TRIES} times while it was being locked: let nothing but "
            "gracekit write in the directory of its run locks"
        )

    def remove_if_free(self) -> bool:
        """Remove the file if nobody holds the lock; whether it was so."""
        if not self.acquire():
            return False
        self.release(remove=True)
        return True

    def _try_to_acquire(self) -> bool | None:
        """As `acquire`; None if somebody removed the file between its opening and its lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._check_ours(self.path.lstat())
            raise self._refused("opened", error) from error
        try:
            self._check_ours(os.fstat(fd))
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            os.close(fd)
            return False
        except OSError as error:
            os.close(fd)
            raise self._refused("locked", error) from error
        except ConfigError:
            os.close(fd)
            raise
        there = LockFile.at(self.path)
        if there is None or there.inode != os.fstat(fd).st_ino:
            os.close(fd)
            return None
        with contextlib.suppress(OSError):
            os.pwrite(fd, b" " * _ROOM, 0)
        self._fd, self._file = fd, LockFile.of(os.fstat(fd))
        self._held.add(self)
        return True

    def _check_ours(self, info: os.stat_result) -> None:
        """Raise ConfigError unless it is a plain file of this user, or of root, with one name."""
        if stat.S_ISLNK(info.st_mode):
            wrong = "is a symbolic link"
        elif not stat.S_ISREG(info.st_mode):
            wrong = "is no regular file"
        elif info.st_uid not in {0, os.geteuid()}:
            wrong = f"belongs to uid {info.st_uid} and this process runs as uid {os.geteuid()}"
        elif info.st_nlink > 1:
            wrong = f"has {info.st_nlink} names, and notes in it would change another file"
        else:
            return
        raise ConfigError(
            f"{self.path} {wrong}: as a lock it would prove nothing of this process's life; "
            f"remove it: rm -r {shlex.quote(str(self.path))}"
        )

    def _refused(self, what: str, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be {what} ({error.strerror}), and its lock is what proves to "
            f"others that this process lives: put the store on a local Linux file system that "
            f"uid {os.geteuid()} may write"
        )

    @classmethod
    def is_held_here(cls, name: str) -> bool:
        """Whether this process holds the lock of a file of that name."""
        return any(lock.path.name == name for lock in list(cls._held))

    def write_note(self, note: str) -> None:
        """Write a short note into the lock file, for what the store may be unable to take.

        The bytes were reserved by `acquire`, so this works on a full disk too.
        """
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, note.encode().ljust(_ROOM)[:_ROOM], 0)

    def trouble(self) -> str | None:
        """Why others cannot see the lock any more, as a sentence; None if they can."""
        match look_at_lock(self.path, self._file, same_boot=True):
            case Lock.MISSING:
                return f"the lock file {self.path} was removed"
            case Lock.REPLACED:
                return f"the lock file {self.path} was replaced"
            case Lock.FREE:
                return f"the lock on {self.path} is gone: something has closed its descriptor"
            case _:
                return None

    def release(self, *, remove: bool = False) -> None:
        """Give the lock up; may be called twice.

        Args:
            remove: Remove the file first. Who opened it before and locks it afterwards finds in
                `acquire` that it is not the file of that name any more.
        """
        if self._fd is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        self._held.discard(self)
        if fd is not None:
            with contextlib.suppress(OSError):  # something has closed it before us
                os.close(fd)

    @classmethod
    def leave_child(cls) -> None:
        """In a forked child: the lock stays the parent's alone."""
        for lock in list(cls._held):
            lock._close()  # noqa: SLF001 - its own class


os.register_at_fork(after_in_child=LifeLock.leave_child)
