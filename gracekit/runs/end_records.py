"""What others know of the end of a run, beside its row: its parent, systemd, its crash, its cgroup.

Each writes a file into the run directory. Whoever adopts the run, or comes by later, copies it into
the row, once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from gracekit.keeper import LISTED
from gracekit.life import Identity
from gracekit.process import private

BY_SYSTEMD: Final = "exit-systemd-{invocation}.json"
STARTS: Final = "failed-starts.jsonl"
OLD_S: Final = 86400.0
LONGEST_STARTS: Final = 65536
"""Bytes."""
_FATAL: Final = re.compile(rb"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME: Final = re.compile(rb'File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's word on the end of a process.

    Attributes:
        how: exited, killed (by a signal), dumped (the same, and it left a core).
        status: Its exit code, or the number of the signal.
        oom_kills: How many processes of its memory cgroup the kernel killed meanwhile.
        sender: Who sent the first signal that stops; None if none came, or nobody knows.
        by: Who has recorded it.
        pid, start_ticks, boot_id: Of the process; None where its writer does not know.
        invocation: systemd's id of its start; None where its writer does not know.
    """

    how: str
    status: int
    oom_kills: int = 0
    sender: str | None = None
    by: str
    pid: int | None = None
    start_ticks: int | None = None
    boot_id: str | None = None
    invocation: str | None = None

    def __str__(self) -> str:
        """`killed by SIGSEGV, says its parent`."""
        if self.how == "exited":
            return f"exited with {self.status}, says {self.by}"
        try:
            name = signal.Signals(self.status).name
        except ValueError:
            name = f"signal {self.status}"
        core = ", and left a core" if self.how == "dumped" else ""
        return f"killed by {name}{core}, says {self.by}"


def read_end(directory: Path, identity: Identity, invocation: str | None) -> EndRecord | None:
    """The record about that process in *directory*; None if there is none, or none of this boot."""
    for name in end_names(identity, invocation):
        found = _read(directory / name)
        if found is not None and _is_about(found, identity, invocation):
            return found
    return None


def _is_about(found: EndRecord, identity: Identity, invocation: str | None) -> bool:
    """Whether all that the record says of the process fits."""
    known = (identity.boot_id, identity.pid, identity.start_ticks, invocation)
    said = (found.boot_id, found.pid, found.start_ticks, found.invocation)
    return all(word in {None, fact} for word, fact in zip(said, known, strict=True))


def end_names(identity: Identity, invocation: str | None) -> list[str]:
    """Names of the files that tell how that process ended."""
    names = [LISTED.format(pid=identity.pid, start_ticks=identity.start_ticks)]
    return [*names, BY_SYSTEMD.format(invocation=invocation)] if invocation else names


def late_records(directory: Path) -> Iterator[tuple[Path, EndRecord]]:
    """All records in *directory*."""
    for file in sorted(directory.glob("exit-*.json")):
        if (found := _read(file)) is not None:
            yield file, found


def is_old(file: Path) -> bool:
    """Whether it was written more than a day ago."""
    with contextlib.suppress(OSError):
        return time.time() - file.stat().st_mtime > OLD_S
    return False


def _read(file: Path) -> EndRecord | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_bytes_of(file), type=EndRecord)
    return None


def _bytes_of(file: Path) -> bytes:
    """The beginning of a regular file; others may put anything else into the directory.

    Raises:
        OSError: it cannot be read, or is none.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as opened:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(file))
        return opened.read(2 * LONGEST_STARTS)


def read_crash(file: Path) -> str | None:
    """`Segmentation fault in copy (copier.py:12)`, of what faulthandler wrote; None if nothing."""
    with contextlib.suppress(OSError):
        text = _bytes_of(file)
        if (fatal := _FATAL.search(text)) is not None:
            crash = fatal[1].decode(errors="replace")
            if (frame := _FRAME.search(text, fatal.end())) is not None:
                path, line, function = (part.decode(errors="replace") for part in frame.groups())
                crash += f" in {function} ({Path(path).name}:{line})"
            return crash[:200]
    return None


def invocation(env: Mapping[str, str] = os.environ) -> str | None:
    """Systemd's id of this start of its unit; None if this is not its main process, or the child
    of that.
    """
    main = env.get("SYSTEMD_EXEC_PID")
    is_main = not main or main in {str(os.getpid()), str(os.getppid())}
    return env.get("INVOCATION_ID") if is_main else None


class FailedStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start that ended before its run was on record.

    Attributes:
        at: Wall time.
        code: Exit code.
        reason: The error, as the log has it.
        run_id: Id that its run would have had, or has, if it came so far.
    """

    service: str
    instance: str | None
    at: float
    code: int
    reason: str
    run_id: str

    @property
    def why(self) -> str:
        """The word of `gracekit exits`."""
        return {78: "config", 69: "dependency"}.get(self.code, "failed")

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return msgspec.structs.asdict(self) | {"why": self.why}


def note_start(directory: Path | None, start: FailedStart) -> None:
    """Append it to the file of this host; the first half goes when it is long."""
    if directory is None or not directory.is_dir() or directory.is_symlink():
        return  # there was none yet, or it is not ours
    file = directory / STARTS
    with contextlib.suppress(OSError):
        if file.exists() and file.stat().st_size > LONGEST_STARTS:
            lines = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join(lines[len(lines) // 2 :]))
        with open(file, "ab", opener=private) as text:
            text.write(msgspec.json.encode(start) + b"\n")


def read_starts(directory: Path, instance: str | None = None) -> list[FailedStart]:
    """Those of this host, oldest first; of one instance, or of all."""
    found = list[FailedStart]()
    with contextlib.suppress(OSError):
        for line in _bytes_of(directory / STARTS).splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(line, type=FailedStart))
    return [one for one in found if instance in {None, one.instance}]
