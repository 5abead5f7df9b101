"""Whether a process is alive: the rule, the evidence for it, and the lock that proves a life.

`judge` is the only such rule. It answers *alive*, *dead* or *not proven*: a
missing sign proves nothing. There are two kinds of evidence. Each process locks
a file of its own, and the kernel drops that lock when the process dies. The
process table says more, but it counts only with the same boot id, in the same
pid namespace, and where /proc hides nothing.

Rows record a process by its identity and its lock file. The judging process
looks for that file by name in its own view of the directory, because the same
volume may be mounted elsewhere under another path.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import shlex
import stat
import struct
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Self
from weakref import WeakSet

import msgspec

from gracekit.errors import ConfigError

# -- the rule -------------------------------------------------------------------------


class Alive(enum.Enum):
    """Whether a process is alive."""

    ALIVE = "alive"
    DEAD = "dead"
    NOT_PROVEN = "not proven"  # neither: it is reported, and left alone


class Liveness(msgspec.Struct, frozen=True):
    """An answer and its reason, a clause for messages to operators."""

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
    """What this process sees of the lock file; the value is a clause for messages."""

    HELD = "its lock is held"
    FREE = "its lock is free"
    MISSING = "its lock file is missing"
    REPLACED = "its lock file was replaced"
    UNREADABLE = "its lock file cannot be read"
    UNKNOWN = "its row names no lock file of its own"
    ELSEWHERE = "its lock is one of another host, or of an earlier boot"


class Pid(enum.Enum):
    """What our process table says about the process; the value is a clause for messages."""

    THERE = "its process is there"
    GONE = "its process is gone"
    REUSED = "another process has its pid"
    EXECED = "its process has replaced itself by this one"
    HIDDEN = "a process has its pid, and whether it is the same one is hidden from us"
    UNKNOWN = "the process table cannot be read"


class LifeEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about the life of one process.

    Attributes:
        same_boot: Whether its boot id is ours. Equal ids mean one running kernel; different
            ones prove nothing, because a container manager may give each container its own.
        same_namespace: Whether its pid namespace is ours.
        pid: What the process table says; counts only if both of the above are true.
    """

    lock: Lock
    same_boot: bool
    same_namespace: bool
    pid: Pid


def judge(evidence: LifeEvidence) -> Liveness:
    """Decide whether the process is alive; no other code decides that."""
    table, seen = _table(evidence)
    reason = f"{evidence.lock.value}, and {seen}"
    match evidence.lock, table:
        case Lock.HELD, (Pid.GONE | Pid.REUSED | Pid.EXECED):
            # For example, a child that C code forked still holds the lock of its dead parent.
            return Liveness(Alive.NOT_PROVEN, f"{reason}: something else holds it")
        case Lock.HELD, _:
            return Liveness(Alive.ALIVE, Lock.HELD.value)
        case _, Pid.THERE:
            return Liveness(Alive.ALIVE, Pid.THERE.value)
        case Lock.FREE, _:
            # The process had locked this very file. So it is dead, even if no table can be asked.
            return Liveness(Alive.DEAD, reason)
        case (
            (Lock.MISSING | Lock.REPLACED | Lock.UNKNOWN),
            (Pid.GONE | Pid.REUSED | Pid.EXECED),
        ):
            return Liveness(Alive.DEAD, reason)
        case _:
            return Liveness(Alive.NOT_PROVEN, reason)


def _table(evidence: LifeEvidence) -> tuple[Pid, str]:
    """What the process table proves, and how a message says it."""
    if not evidence.same_boot:
        return Pid.UNKNOWN, "it has another boot id, so its process cannot be looked up here"
    if not evidence.same_namespace:
        return Pid.UNKNOWN, "its process is in another pid namespace"
    return evidence.pid, evidence.pid.value


# -- what a row records of a life -----------------------------------------------------


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies one process, so that a later one with the same pid is not mistaken for it.

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
    """Identifies the file that a lock is on.

    While its holder lives the file stays open, so no other file can get its inode number: a
    file with this number *is* the one that was locked. Devices are numbered anew at each boot,
    so their number is compared within one boot only.
    """

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The file that a `stat` describes."""
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
        """Read what `str` has written."""
        device, _, inode = text.partition(":")
        return cls(int(device, 16), int(inode, 16))

    def __str__(self) -> str:
        return f"{self.device:x}:{self.inode:x}"


class RecordedLife(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as the row of its run records it.

    Attributes:
        lock_name: Name of its lock file, which no other life ever uses; empty if it has none.
        lock_file: None if it has none, as beside a store in memory.
    """

    identity: Identity
    lock_name: str
    lock_file: LockFile | None


# -- the evidence ---------------------------------------------------------------------


def read_identity() -> Identity:
    """The identity of this process; read at each call, because a fork has another one."""
    stat = _read("/proc/self/stat")
    return Identity(
        boot_id=_read("/proc/sys/kernel/random/boot_id").strip(),
        pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
        pid=os.getpid(),
        start_ticks=_ended_and_start(stat)[1],
        time_ns=_time_namespace(),
    )


def _read(path: str) -> str:
    """Read a small file of the kernel; transports do so often, and `Path` takes 3 times as long."""
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
    """Parse `/proc/<pid>/stat`: whether the process has ended, and its start in ticks.

    While a process ends, its first thread may be gone before others, which still hold its locks.
    """
    # The command name may hold spaces and brackets: fields count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    state, threads = fields[0], int(fields[17])
    return state in "ZX" and threads <= 1, int(fields[19])


def look(life: RecordedLife, directory: Path | None, *, is_shared: bool = False) -> LifeEvidence:
    """Gather the evidence; takes no lock, and raises nothing.

    Args:
        life: As it is on record.
        directory: Where to look for the lock file, a path of this process; None without locks.
        is_shared: Whether hosts share the record. A lock of another boot proves nothing then: a
            file of that name here may be another one, or on a network whose locks are local.
    """
    theirs = life.identity
    try:
        mine = read_identity()
    except OSError:
        mine = None  # for example, no descriptor is left to read with
    same_boot = mine is None or theirs.boot_id == mine.boot_id
    path = None if directory is None or not life.lock_name else directory / life.lock_name
    # Look for the process before the lock. The other way round, a process that ends in between
    # would be seen as gone and its lock as held, as if something else held it.
    pid = Pid.UNKNOWN if mine is None else _look_up(life, mine)
    is_elsewhere = is_shared and not same_boot
    return LifeEvidence(
        lock=Lock.ELSEWHERE
        if is_elsewhere
        else look_at_lock(path, life.lock_file, same_boot=same_boot),
        same_boot=same_boot,
        same_namespace=mine is None or theirs.pid_ns == mine.pid_ns,
        pid=pid,
    )


def look_at_lock(path: Path | None, expected: LockFile | None, *, same_boot: bool) -> Lock:
    """Look at a lock through a new descriptor, without taking it."""
    if path is None or expected is None:
        return Lock.UNKNOWN
    try:
        fd = os.open(path, _TO_LOOK)
    except (FileNotFoundError, NotADirectoryError):
        return Lock.MISSING
    except OSError:
        return Lock.UNREADABLE
    try:
        found = LockFile.of(os.fstat(fd))
        if found.inode != expected.inode or (same_boot and found.device != expected.device):
            return Lock.REPLACED
        return Lock.HELD if is_locked(fd) else Lock.FREE
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
    """GONE or UNKNOWN if no process with that pid can be seen; None if there is one."""
    try:
        os.kill(pid, 0)  # also sees what /proc hides (hidepid)
    except ProcessLookupError:
        return Pid.GONE
    except PermissionError:
        return None  # it exists and belongs to another user
    except (OSError, OverflowError):
        return Pid.UNKNOWN
    return None


def _was_before_exec(life: RecordedLife) -> bool:
    """Whether this process recorded that life before an `exec`, which closed its lock."""
    return life.lock_file is not None and not LifeLock.is_held_here(life.lock_name)


def _compare_start(theirs: Identity, mine: Identity) -> Pid:
    """Whether the process that has the pid now is the recorded one."""
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


_TO_LOOK: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ROOM: Final = 64  # bytes
_TRIES: Final = 10
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def _whole_file(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


_FOR_WRITING: Final = _whole_file(fcntl.F_WRLCK)


def is_locked(fd: int) -> bool:
    """Whether another open file description, of this or any other process, has the lock."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FOR_WRITING)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def read_note(path: Path) -> str:
    """The note that a process wrote into its lock file; empty if there is none."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


class LifeLock:
    """Proof of life: a lock on a file, held until `release` or death.

    It is an open-file-description lock. Unlike a POSIX lock, it is not lost when
    another descriptor of the file is closed, for example by a backup. Unlike a
    POSIX lock, a forked child shares it. So the child closes its copy right
    after the fork; an exec closes it too.
    """

    _held: ClassVar[WeakSet[LifeLock]] = WeakSet()

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._fd: int | None = None
        self._file: LockFile | None = None

    @property
    def file(self) -> LockFile:
        """The locked file; `acquire` must have succeeded."""
        assert self._file is not None, "acquire() it first"
        return self._file

    def acquire(self) -> bool:
        """Take the lock without waiting; false if another process holds it.

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

    def _try_to_acquire(self) -> bool | None:
        """As `acquire`; None if the file was removed or replaced before it was locked."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._check_ours(self.path.lstat())
            raise self._refused("opened", error) from error
        try:
            self._check_ours(os.fstat(fd))
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FOR_WRITING)
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
        """Write a short note into the lock file, in case the store cannot be written.

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
            remove: Remove the file first. A process that opened it before and locks it afterwards
                sees in `acquire` that its name leads to another file or to none.
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
        """In a forked child, close its copies of the locks: only the parent holds them then."""
        for lock in list(cls._held):
            lock._close()  # noqa: SLF001 - its own class


os.register_at_fork(after_in_child=LifeLock.leave_child)
