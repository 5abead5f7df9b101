"""Opening the store's file: the checks, files and settings before the first row is read.

When a process closes any descriptor of a database file, other than one opened with
O_PATH, it loses every lock it holds on the file. So the file is created before SQLite
connects, and later only SQLite opens the file, its `-wal` and its `-shm`. All checks
use `stat` by name, before SQLite opens the files and after.

The owner of a directory can remove the files in it. So a database, and the directories
of locks and wake-up pipes beside it, must belong to this process's user; their parent
directory may also belong to root. Permissions of the group are no reason to refuse: the
volume of a pod belongs to root and to the pod's group, and Kubernetes (fsGroup) sets
all bits of the group again at each start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final, Literal

import apsw

from gracekit.errors import ConfigError, DependencyError
from gracekit.process import is_mount_point, network_file_system
from gracekit.store.batch import Value
from gracekit.store.place import run_as
from gracekit.store.sqlite.writer_lock import WriterLock

Synchronous = Literal["FULL", "NORMAL"]
Database = apsw.Connection

SUFFIXES: Final = ("", "-wal", "-shm", "-writer")
"""The database and the files beside it; all must belong to this user alone."""
OPEN_SUFFIXES: Final = ("", "-wal", "-shm")
"""The files that SQLite keeps open; it removes `-wal` and `-shm` with its last connection."""
DIRECTORIES: Final = ("-runs", "-wakeups")
"""Directories that the processes using a database create beside it."""

_ROOT: Final = 0
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_SAME_TIME_S: Final = 0.1
"""Writes that are further apart give a file different times, on any kernel."""

_OLDEST_LIBRARY: Final = (3, 51, 3)
_STATEMENT_CACHE: Final = 256
"""Prepared statements that a connection caches; the package has about 130."""


def check_library(version: str) -> None:
    """Refuse a SQLite with the bug by which two connections can corrupt a WAL.

    Raises:
        ConfigError: *version*, for example `"3.50.1"`, is older than the fix.
    """
    if tuple(int(part) for part in version.split(".")) < _OLDEST_LIBRARY:
        fixed = ".".join(map(str, _OLDEST_LIBRARY))
        raise ConfigError(
            f"SQLite {version} can corrupt a database in WAL mode; {fixed} or newer is needed: "
            f"pip install 'apsw>={fixed}'"
        )


def prepare_file(path: Path) -> Path:
    """Check the file at *path*, or create it empty with mode 0600.

    Returns:
        The path with every symbolic link of its directory resolved.

    Raises:
        ConfigError: the directory or an existing file is not safe; the message names the remedy.
        DependencyError: the file cannot be created or opened, for example by an I/O error.
    """
    real = check_place(path)
    try:
        for suffix in SUFFIXES:
            close_to_group(real.with_name(real.name + suffix))
        _create(real)
    except OSError as error:
        raise _refusal(path, error) from error
    return real


def check_place(path: Path) -> Path:
    """As `prepare_file`, but create and change nothing."""
    try:
        directory = path.parent.resolve(strict=True)
        _check_directory(directory)
        real = directory / path.name
        for suffix in SUFFIXES:
            _check_file(real.with_name(real.name + suffix))
        for suffix in DIRECTORIES:
            _check_beside(real.with_name(real.name + suffix))
    except OSError as error:
        raise _refusal(path, error) from error
    return real


def make_directory(path: Path, *, with_parent: bool = False) -> None:
    """Make the directory *path* with mode 0700, or set that mode if it exists.

    *with_parent* makes its parent first, in the same way.

    Raises:
        ConfigError: *path* is no directory, it is not on a local disk, or another user owns it or
            could replace it.
        DependencyError: it cannot be created or opened, for example by an I/O error.
    """
    if with_parent:
        make_directory(path.parent)
    try:
        _check_directory(path.parent.resolve(strict=True))
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_beside(path)
        _check_local(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error, ", by GRACEKIT_RUN_DIRECTORY") from error
    try:
        info = os.fstat(fd)  # of the opened directory, which cannot be swapped under us
        _check_owner_beside(path, info)
        if info.st_uid == os.geteuid() and info.st_mode & _OTHERS:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def identity_of(path: Path) -> str | None:
    """A string that identifies this file until the next boot, whatever path it is opened by.

    A copy has another identity. None if there is no such file.
    """
    try:
        info = path.stat()  # by name: opening and closing it would drop this process's locks
    except OSError:
        return None
    return f"file {info.st_dev:x}:{info.st_ino}"


class OpenFiles:
    """The files that this process has open for one database, as `stat` by name sees them.

    Args:
        path: The database.
        now: A monotonic clock in seconds.
    """

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._names = [str(path.with_name(path.name + suffix)) for suffix in OPEN_SUFFIXES]
        self._now = now
        self._found: list[os.stat_result | None] = [None] * len(self._names)
        self._written: Hashable = None
        self._written_at = 0.0  # when that was first seen

    def look(self) -> list[str]:
        """Look again; returns what has happened to files that were there at the last look."""
        before, self._found = self._found, list(map(_stat_of, self._names))
        return [
            f"{name} was {'removed' if new is None else 'replaced'}"
            for name, old, new in zip(self._names, before, self._found, strict=True)
            if old is not None
            and (new is None or old.st_ino != new.st_ino or old.st_dev != new.st_dev)
        ]

    def mark(self) -> Hashable | None:
        """When the database and its log were written last; None if that may hide a later write.

        The kernel's clock for the times of files stands still for some milliseconds. So a file may
        be written again although its time does not change.
        """
        database, log, _ = self._found
        written = (
            database and (database.st_mtime_ns, database.st_size),
            log and (log.st_mtime_ns, log.st_size),
        )
        now = self._now()
        if written != self._written:
            self._written, self._written_at = written, now
        return written if now - self._written_at >= _SAME_TIME_S else None


def _stat_of(name: str) -> os.stat_result | None:
    try:
        return os.stat(name)  # noqa: PTH116 - `Path.stat` takes longer, and this is done each second
    except OSError:
        return None


def free_bytes(path: Path) -> int:
    """What this user may still write on the file system of the file *path*."""
    info = os.statvfs(path.parent)
    return info.f_bavail * info.f_frsize


def connect_writer(
    path: Path, *, synchronous: Synchronous, busy_timeout_s: float
) -> apsw.Connection:
    """Open the one connection of this process that writes, and verify its settings.

    Raises:
        ConfigError: the file is no database, is not writable, cannot be set to WAL, or its -wal
            or -shm belongs to another user.
        DependencyError: SQLite cannot open it.
    """
    connection = _connect(path, apsw.SQLITE_OPEN_READWRITE, busy_timeout_s)
    try:
        _set_up(connection, path, synchronous)
        for suffix in OPEN_SUFFIXES:  # SQLite would use an existing log of any owner
            _check_file(path.with_name(path.name + suffix))
    except apsw.NotADBError as error:
        connection.close()
        raise ConfigError(
            f"{path} is not a SQLite database; move it away or give the store another path"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path, *, busy_timeout_s: float) -> apsw.Connection:
    """Open a connection that reads only and never checkpoints."""
    connection = _connect(path, apsw.SQLITE_OPEN_READONLY, busy_timeout_s)
    connection.wal_autocheckpoint(0)
    return connection


def open_writer_lock(path: Path) -> WriterLock:
    """Open the `-writer` file, by which processes that write the database at *path* take turns.

    Raises:
        ConfigError: the file at its path is not a plain file of this user.
        DependencyError: it cannot be created or opened, for example by an I/O error.
    """
    place = path.with_name(path.name + "-writer")
    try:
        writer_lock = WriterLock(place)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        _check_own(place, writer_lock.info())
    except BaseException:
        writer_lock.close()
        raise
    return writer_lock


def open_memory() -> Database:
    """A database in memory, for one process or for several that a test simulates."""
    connection = apsw.Connection(":memory:", statementcachesize=_STATEMENT_CACHE)
    _plan_once(connection)
    return connection


def look_up(database: Database, sql: str, *params: Value) -> list[dict[str, Value]]:
    """The rows of a query on a database of `open_memory`, as dictionaries by column name."""
    cursor = database.cursor()
    found = cursor.execute(sql, params)
    try:
        names = [column[0] for column in cursor.get_description()]
    except apsw.ExecutionCompleteError:  # no rows
        return []
    return [dict(zip(names, row, strict=True)) for row in found]


def set_common(connection: apsw.Connection) -> None:
    """Apply the settings of every writing connection, in memory or on disk."""
    # Deleted arguments may hold secrets: overwrite their bytes, do not only unlink the page.
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA foreign_keys=OFF")
    # Otherwise savepoints spill to a temporary file, on a disk that may be full.
    connection.execute("PRAGMA temp_store=MEMORY")


def _plan_once(connection: apsw.Connection) -> None:
    """Keep the plan of a prepared statement, whatever values are bound to it.

    By default SQLite looks at bound values such as a LIMIT, and prepares the statement again
    at each execution, which costs many times what the statement itself does.
    """
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def _connect(path: Path, access: int, busy_timeout_s: float) -> apsw.Connection:
    try:
        connection = apsw.Connection(
            str(path),
            flags=access | apsw.SQLITE_OPEN_NOFOLLOW,
            statementcachesize=_STATEMENT_CACHE,
        )
    except apsw.CantOpenError as error:
        raise DependencyError(f"SQLite cannot open {path}: {error}") from error
    _plan_once(connection)
    connection.set_busy_timeout(int(busy_timeout_s * 1000))
    return connection


def _set_up(connection: apsw.Connection, path: Path, synchronous: Synchronous) -> None:
    if connection.readonly("main"):
        raise ConfigError(
            f"{path} can be read but not written; give the store a path on a writable file system"
        )
    mode = connection.execute("PRAGMA journal_mode=WAL").get
    if mode != "wal":
        raise ConfigError(
            f"{path} stays in journal mode {mode!r} and the store needs 'wal'; "
            f"end the programs that hold it open, or use another file system"
        )
    connection.execute(f"PRAGMA synchronous={synchronous}")
    level = connection.execute("PRAGMA synchronous").get
    if level != {"NORMAL": 1, "FULL": 2}[synchronous]:
        raise ConfigError(f"{path} took synchronous={level} instead of {synchronous}")
    set_common(connection)


def _check_local(directory: Path) -> None:
    network = network_file_system(directory)
    if network is not None:
        raise ConfigError(
            f"{directory} is on {network}, a file system that hosts share, where locks of files "
            f"and shared memory do not work; choose a path on a local disk"
        )


def _check_directory(directory: Path) -> None:
    _check_local(directory)
    info = directory.stat()
    if info.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"{directory} belongs to uid {info.st_uid} and this process runs as uid "
            f"{os.geteuid()}: its owner could take away what is in it; {run_as(info.st_uid)}, or "
            f"choose a path in a directory of uid {os.geteuid()} or root"
        )
    if info.st_mode & stat.S_IWOTH:
        raise _shared(directory) if info.st_mode & stat.S_ISVTX else _writable(directory)


def _shared(directory: Path) -> ConfigError:
    """The error for a directory like /tmp, whose mode the user must not change."""
    return ConfigError(
        f"{directory} can be written by everyone: another user who is first to make a file there "
        f"owns it and can read it; give the file a path in a directory of its own: "
        f"mkdir -m 700 {shlex.quote(str(directory / 'gracekit'))}"
    )


def _writable(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} can be written by everyone, who could replace what is in it; "
        f"run: chmod o-w {shlex.quote(str(directory))}"
    )


def _check_beside(path: Path) -> None:
    """Check one of the `DIRECTORIES`, if it exists."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "no directory"
        raise ConfigError(f"{path} is {what}, and locks are kept there; move it away")
    _check_owner_beside(path, info)


def _check_owner_beside(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid} and this process runs as uid {os.geteuid()}: its "
            f"owner could remove the locks that prove which runs are alive; "
            f"{run_as(info.st_uid)}, or, if no service has made it, remove it: "
            f"rm -r {shlex.quote(str(path))}"
        )
    if info.st_uid != os.geteuid() and info.st_mode & stat.S_IWOTH:
        raise _writable(path)


def close_to_group(path: Path) -> None:
    """Remove the group's permissions on the file *path*; see the module.

    The check and the change go by one descriptor, so they concern the same file even if the
    name is replaced meanwhile. Closing an O_PATH descriptor drops no lock.

    Raises:
        ConfigError: it is not a plain file of this user, or others can access it.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        info = os.fstat(fd)
        _check_own(path, info)
        if info.st_mode & stat.S_IRWXG:
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(info.st_mode) & ~_OTHERS)
    finally:
        os.close(fd)


def _check_file(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link; give the store its real path {os.path.realpath(path)}"
        )
    _check_own(path, info)
    if is_mount_point(path):
        raise ConfigError(
            f"{path} is a mount point, one file mounted by itself, without the -wal and -shm that "
            f"are beside it: two processes would keep two logs of one file; mount its directory"
        )


def _check_own(path: Path, info: os.stat_result) -> None:
    """Check for a plain file of this user, with a single name, that others cannot access."""
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{path} is no regular file; give the store another path")
    if info.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid} and this process runs as uid {os.geteuid()}; "
            f"{run_as(info.st_uid)}{_or_be_given(path)}"
        )
    if info.st_nlink > 1:
        raise ConfigError(
            f"{path} has {info.st_nlink} names, and SQLite finds -wal and -shm by name: two "
            f"processes would keep two logs of one file; leave one of those that this shows: "
            f"find / -samefile {shlex.quote(str(path))}"
        )
    if info.st_mode & stat.S_IRWXO:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o} and holds requests that others "
            f"must not read or change; run: chmod 600 {shlex.quote(str(path))}"
        )


def _or_be_given(path: Path) -> str:
    """The other remedy, chown. Not for root: the service could not open the file afterwards."""
    if (me := os.geteuid()) == _ROOT:
        return ""
    return f", or, if no service runs as that user, as root: chown {me} {shlex.quote(str(path))}"


def _create(path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        if path.lstat().st_size:
            return
    # Also for an empty file that exists: its creator may have died before this sync.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _refusal(path: Path, error: OSError, by: str = "") -> ConfigError | DependencyError:
    """The error for *path*; *by* says how another path is given."""
    parent = shlex.quote(str(path.parent))
    match error.errno:
        case errno.ENOENT:
            return ConfigError(
                f"the directory of {path} does not exist; create it: mkdir -p -m 700 {parent}"
            )
        case errno.ENOTDIR:
            return ConfigError(f"{path.parent} is not a directory; give {path} another path")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ConfigError(
                f"{path} cannot be created or opened ({error.strerror}); choose a path in a "
                f"directory that uid {os.geteuid()} may write{by}"
            )
        case _:
            return DependencyError(f"{path} cannot be created or opened: {error.strerror}")
