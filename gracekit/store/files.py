"""Opening the store's file: what is checked, created and set before the first row.

Closing any descriptor of a database file, except one of O_PATH, drops every lock
that this process holds on it. So the file is created before SQLite connects, and
from then on nothing here opens it, its `-wal` or its `-shm` otherwise; checks go by
name, before SQLite opens them and after.

Whoever owns a directory can take away what is in it. So a database, and the
directories of locks and wake-up pipes beside it, must belong to this process's user; the
directory that they are in may also be root's. What only the group may do is no
reason to refuse: a volume of a pod belongs to root and to the pod's group, and
Kubernetes (fsGroup) gives the group all bits again at each start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from pathlib import Path
from typing import Final, Literal

import apsw

from gracekit.errors import ConfigError, DependencyError
from gracekit.process import is_mount_point, kernel_file_system, network_file_system
from gracekit.store.batch import Value
from gracekit.store.writer_lock import WriterLock

Synchronous = Literal["FULL", "NORMAL"]
Database = apsw.Connection

SUFFIXES: Final = ("", "-wal", "-shm", "-turn")
"""What is beside a database and must be as private as it."""
OPEN_SUFFIXES: Final = ("", "-wal", "-shm")
"""What SQLite keeps open; it removes them only when its last connection closes."""
DIRECTORIES: Final = ("-runs", "-bells")
"""What processes that use a database put beside it."""

_ROOT: Final = 0
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_OLDEST_LIBRARY: Final = (3, 51, 3)
_STATEMENT_CACHE: Final = 256
"""Statements that a connection keeps prepared; the package has about 130."""


def check_library(version: str) -> None:
    """Refuse a SQLite whose WAL can be corrupted by two connections at work together.

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
        ConfigError: the place or an existing file is not safe; the message names the remedy.
        DependencyError: the disk did not do it.
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
    """As `prepare_file`, and nothing is created or changed."""
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


def make_directory(path: Path) -> None:
    """Make the directory at *path* for this user alone, or close the one that is there to others.

    Raises:
        ConfigError: something else is there, or it is somebody else's.
        DependencyError: the disk did not do it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_beside(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        info = os.fstat(fd)  # of what is there now, and stays there while we hold it
        _check_owner_beside(path, info)
        if info.st_uid == os.geteuid() and info.st_mode & _OTHERS:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def identity_of(path: Path) -> str | None:
    """What tells this database from every other one of this boot, by whatever path it is known.

    A copy has another identity. None if there is no such file.
    """
    try:
        info = path.stat()  # by name: opening it would cost this process its locks
    except OSError:
        return None
    return f"file {info.st_dev:x}:{info.st_ino}"


def connect_writer(
    path: Path, *, synchronous: Synchronous, busy_timeout_s: float
) -> apsw.Connection:
    """Open the one connection of this process that writes, with its settings proved.

    Raises:
        ConfigError: not a database, not writable, it cannot be set to WAL, or its -wal or -shm
            is not this process's own.
        DependencyError: SQLite cannot open it.
    """
    connection = _connect(path, apsw.SQLITE_OPEN_READWRITE, busy_timeout_s)
    try:
        _set_up(connection, path, synchronous)
        for suffix in OPEN_SUFFIXES:  # SQLite takes a log that is there, whoever made it
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
    """The lock of the processes that write the database at *path*, which takes them in turn.

    Raises:
        ConfigError: what stands there is not this process's own file.
        DependencyError: the disk did not do it.
    """
    place = path.with_name(path.name + "-turn")
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
    """A database in memory, for one process or for those that a test plays."""
    connection = apsw.Connection(":memory:", statementcachesize=_STATEMENT_CACHE)
    _plan_once(connection)
    return connection


def look_up(database: Database, sql: str, *params: Value) -> list[dict[str, Value]]:
    """What a query finds in a database of `open_memory`, by column."""
    cursor = database.cursor()
    found = cursor.execute(sql, params)
    try:
        names = [column[0] for column in cursor.get_description()]
    except apsw.ExecutionCompleteError:  # it has found nothing
        return []
    return [dict(zip(names, row, strict=True)) for row in found]


def set_common(connection: apsw.Connection) -> None:
    """Settings of every writing connection, in memory or on disk."""
    # A purged argument is a secret: its bytes are overwritten, not only unlinked.
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA foreign_keys=OFF")
    # Savepoints spill to a temporary file otherwise, on a disk that may be full.
    connection.execute("PRAGMA temp_store=MEMORY")


def _plan_once(connection: apsw.Connection) -> None:
    """Keep the plan of a prepared statement, whatever is bound to it.

    Else SQLite looks at values, a LIMIT's for one, and so prepares the statement anew at each
    execution, which costs many times what the statement itself does.
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


def _check_directory(directory: Path) -> None:
    network = network_file_system(directory)
    if network is not None:
        raise ConfigError(
            f"{directory} is on {network}, a file system that hosts share, where SQLite's locks "
            f"and shared memory do not work; give the store a path on a local disk"
        )
    info = directory.stat()
    if info.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"{directory} belongs to uid {info.st_uid} and this process runs as uid "
            f"{os.geteuid()}: its owner could take the store away; {run_as(info.st_uid)}, or give "
            f"the store a path in a directory of uid {os.geteuid()} or root"
        )
    if info.st_mode & stat.S_IWOTH:
        raise _shared(directory) if info.st_mode & stat.S_ISVTX else _writable(directory)


def _shared(directory: Path) -> ConfigError:
    """As /tmp, which must stay as it is."""
    return ConfigError(
        f"{directory} can be written by everyone: whoever is first to make a file there owns it "
        f"and reads what is in it; give the file a path in a directory of its own: "
        f"mkdir -m 700 {shlex.quote(str(directory / 'gracekit'))}"
    )


def _writable(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} can be written by everyone, who could replace what is in it; "
        f"run: chmod o-w {shlex.quote(str(directory))}"
    )


def _check_beside(path: Path) -> None:
    """One of `DIRECTORIES`, if it is there."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    quoted = shlex.quote(str(path))
    if stat.S_ISLNK(info.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link, and locks that prove who lives would be made elsewhere; "
            f"remove it: rm {quoted}"
        )
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path} is no directory, and locks are kept there; move it away")
    _check_owner_beside(path, info)


def _check_owner_beside(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid} and this process runs as uid {os.geteuid()}: its "
            f"owner decides which locks, that prove who lives, are in it; {run_as(info.st_uid)}, "
            f"or, if no service has made it, remove it: rm -r {shlex.quote(str(path))}"
        )
    if info.st_uid != os.geteuid() and info.st_mode & stat.S_IWOTH:
        raise _writable(path)


def run_as(uid: int) -> str:
    """How to become the owner of a file, which is the way out that harms nobody."""
    return f"run as uid {uid}, for example by: sudo -u '#{uid}'"


def close_to_group(path: Path) -> None:
    """Take back what only the group was given; see the module.

    What is judged is what is changed, whatever its name leads to by then. A descriptor that is
    only a path (O_PATH) reads nothing, and no lock goes when it is closed.

    Raises:
        ConfigError: it is not this process's own plain file.
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
    """What is at *path* is a plain file of ours, under one name and closed to others."""
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
    """The other way out. Not for root, whose file the service could not open any more."""
    me = os.geteuid()
    return "" if me == _ROOT else f", or, as root: chown {me} {shlex.quote(str(path))}"


def _create(path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        if path.lstat().st_size:
            return
    # Also for an empty file: who created it may have died before this line.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _refusal(path: Path, error: OSError) -> ConfigError | DependencyError:
    parent = shlex.quote(str(path.parent))
    there = next(one for one in path.absolute().parents if os.access(one, os.F_OK))
    if (kernel := kernel_file_system(there)) is not None:
        return ConfigError(
            f"no files can be kept in {there}, which is {kernel} of the kernel; give {path} "
            f"another path"
        )
    match error.errno:
        case errno.ENOENT:
            return ConfigError(
                f"the directory of {path} does not exist; create it: mkdir -p -m 700 {parent}"
            )
        case errno.ENOTDIR:
            return ConfigError(f"{path.parent} is not a directory; give {path} another path")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ConfigError(
                f"{path} cannot be created or opened ({error.strerror}); give the store a path "
                f"in a directory that uid {os.geteuid()} may write"
            )
        case _:
            return DependencyError(f"{path} cannot be created or opened: {error.strerror}")
