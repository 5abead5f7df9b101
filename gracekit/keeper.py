"""The small parent that keeps the kernel's word on how its child ended.

`python -P -m gracekit.keeper PLACE CMD...` is what `gracekit keep` and `gracekit run
--keep-evidence` become. It passes on the signals that are sent to it, ends as its child ends, and
before that writes a record into PLACE. If it dies alone, the child goes on without evidence. It
loads nothing else of gracekit.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

LISTED: Final = "exit-{pid}-{start_ticks}.json"
"""Name of a record in a directory of records."""
_NOT_STARTED: Final = 126
_FROM_KERNEL: Final = 0x80
"""`si_code` of what a terminal sends."""
_IGNORED_BY_PYTHON: Final = {signal.SIGPIPE, signal.SIGXFSZ}
_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_JOB_CONTROL: Final = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_STOPS: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
_HOW: Final = {os.CLD_EXITED: "exited", os.CLD_KILLED: "killed", os.CLD_DUMPED: "dumped"}


def keep(place: Path, command: list[str]) -> NoReturn:
    """Run *command*, record its end in *place*, and end as it has ended.

    A *place* that is a directory gets a record of its own for each process.
    """
    heeded = signal.valid_signals() - _FAULTS - {signal.SIGKILL, signal.SIGSTOP}
    if os.isatty(0):
        heeded -= _JOB_CONTROL  # Ctrl-Z stops both, as a shell expects
    # Blocked here alone: the child begins with the mask of before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would reap the child
    os.environ.pop("WATCHDOG_PID", None)  # systemd's watchdog is fed by the child
    counter = oom_counter()
    oom_before = oom_kills(counter)
    try:
        if not place.is_dir():
            place.unlink(missing_ok=True)  # of an earlier process
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=before, setsigdef=_IGNORED_BY_PYTHON
        )
    except (OSError, ValueError) as error:
        sys.stderr.write(f"Error: {command[0]} cannot be run: {error}\n")
        sys.exit(_NOT_STARTED)
    record: dict[str, Any] = {
        "pid": child,
        "start_ticks": _start_ticks(child),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "sender": None,
    }
    while (end := _end_of(child)) is None:
        info = signal.sigwaitinfo(heeded)
        if info.si_signo == signal.SIGCHLD or _child_has_it(child, info):
            continue
        if info.si_signo in _STOPS and info.si_code != _FROM_KERNEL and record["sender"] is None:
            record["sender"] = _name_of(info)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, info.si_signo)
    record |= {"how": _HOW[end.si_code], "status": end.si_status, "at": time.time()}
    record |= {"oom_kills": max(0, oom_kills(counter) - oom_before), "by": "its parent"}
    try:
        write(place / LISTED.format(**record) if place.is_dir() else place, record)
    except OSError as error:  # not worth another end than the child's
        sys.stderr.write(f"Error: {place} cannot be written: {error.strerror}\n")
    os.waitpid(child, 0)
    _end_as(end.si_code, end.si_status)


def _child_has_it(child: int, info: Any) -> bool:
    """Whether a terminal has sent it, which sends a signal to all of its foreground group; but that
    it was closed, only to the leader of its session.
    """
    is_leader = info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    return info.si_code == _FROM_KERNEL and os.getpgid(child) == os.getpgrp() and not is_leader


def _end_of(child: int) -> Any:
    """How *child* has ended, without reaping it; None if it lives. Reaps orphans."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, options)) is not None:
        if ended.si_pid == child:
            return ended
        os.waitpid(ended.si_pid, 0)
    return None


def _end_as(code: int, status: int) -> NoReturn:
    if code == os.CLD_EXITED or os.getpid() == 1:
        os._exit(status if code == os.CLD_EXITED else 128 + status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one
    if status not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {status})
    os.kill(os.getpid(), status)
    os._exit(128 + status)


def write(file: Path, record: dict[str, Any]) -> None:
    """Write *record* so that *file* has it whole or not at all, also after a crash of the machine.

    Raises:
        OSError: it could not be written.
    """
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(half, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as text:
            json.dump(record, text)
            text.flush()
            os.fsync(text.fileno())
        half.replace(file)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def oom_counter() -> Path | None:
    """The file of the memory cgroup of this process that counts kills for memory; None without."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                file = Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
            else:
                file = Path(f"/sys/fs/cgroup{path}/memory.events")
            if file.is_file():
                return file
    return None


def oom_kills(counter: Path | None) -> int:
    """How many processes the kernel has killed for memory there; 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if counter is not None:
            counts = dict(line.split() for line in counter.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _start_ticks(pid: int) -> int:
    """When it was started: with its pid and the boot, its identity."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _name_of(info: Any) -> str:
    """`pid 1 (systemd), uid 0`: who has sent a signal."""
    try:
        name = f" ({Path(f'/proc/{info.si_pid}/comm').read_text().strip()})"
    except OSError:  # it has ended, or is in another namespace
        name = ""
    return f"pid {info.si_pid}{name}, uid {info.si_uid}"


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
