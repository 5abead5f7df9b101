"""A real systemd as PID 1 of private namespaces, up in half a second.

`machine.sh` makes it. What is private, and why:

- pid, mount and cgroup namespaces, because systemd expects to be the only PID 1 and to own the
  cgroup tree. It begins in a new cgroup that is the root of its namespace, so two such machines,
  or one and the system's own systemd, do not disturb each other. The tree is mounted as cgroup2
  alone: on a machine that also has version 1, systemd would write into shared hierarchies.
- `/run`, `/tmp`, `/var/tmp` and `/var/lib`, where systemd and units make directories.
- `/dev`, because systemd logs to `/dev/console`, which is a pseudoterminal that is read here: at
  debug level it logs each notification that it receives. Its other logs drop lines at that level.
- `/proc/sys` is read-only, because systemd would set limits of the whole kernel.

The application is in `/srv/app`, this project in `/srv/project`, so that a user who may not enter
the developer's home can run them; of a home only the interpreter in it is mounted, at its own
path. `container=lxc` keeps systemd from mounting what it needs on real hardware. All this needs
root; other users need `sudo -n`.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
SYSTEMD: Final = "/lib/systemd/systemd"
APP: Final = Path("/srv/app")
USER: Final = "nobody"
TARGETS: Final = ("basic", "sysinit", "shutdown", "network-online", "multi-user")
WAIT_S: Final = 30.0

_NOTIFIED: Final = re.compile(r"(\S+): Got notification message from PID \d+ \((.*)\)")
_OF_SERVICES: Final = re.compile(r" \S+\.service: ")


class Machine:
    """One systemd, its units, and one application that its services run.

    Args:
        directory: A temporary directory of its own.

    Attributes:
        app: Directory of the application; services see it as `/srv/app`.
        lib: Directory that services see as `/var/lib`.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self.lib = directory / "lib"
        self._units = directory / "units"
        self.app = directory / "app"
        for made in (self.lib, self._units, self.app):
            made.mkdir(parents=True)
            made.chmod(0o755)
        for target in TARGETS:
            (self._units / f"{target}.target").write_text(f"[Unit]\nDescription={target}\n")
        self._log = bytearray()

    # -- its life --------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Machine]:
        """Run the machine while the context is open; nothing is left afterwards."""
        console, slave = pty.openpty()
        tty.setraw(slave)
        reader = threading.Thread(target=self._read, args=(console,))
        reader.start()
        words = ("unshare", "--mount", "--propagation", "private", "sh", HERE / "machine.sh")
        given = (self._dir, ROOT, os.ttyname(slave), sys.base_prefix)
        holder = subprocess.Popen(
            [*_as_root(), *map(str, words + given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            self._pid = self._first_process(holder.stdout.readline())
            self.until(lambda: self.ctl("is-system-running", check=False) == "running", "it is up")
            yield self
        finally:
            holder.stdin.close()
            holder.stdout.close()
            code = holder.wait(WAIT_S)
            os.write(slave, b"\0")
            reader.join()
            os.close(slave)
            os.close(console)
            self._remove_files()
        assert code == 0, self.log

    def _read(self, console: int) -> None:
        while not self._log.endswith(b"\0"):
            self._log += os.read(console, 65536)

    def _first_process(self, line: bytes) -> int:
        assert line, "no namespaces: see standard error"
        children = Path(f"/proc/{int(line)}/task/{int(line)}/children")
        self.until(children.read_text, "PID 1 begins")
        return int(children.read_text())

    def _remove_files(self) -> None:
        """Remove files of the service's user, which the tests' user may not remove."""
        if os.geteuid() != 0:
            subprocess.run([*_as_root(), "rm", "-rf", self.lib, self.app], check=True)

    def until(self, condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
        """Wait until *condition* is true."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}\n{self.log}"
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What systemd has logged at its debug level."""
        return self._log.decode(errors="replace")

    # -- what tests do with it -------------------------------------------------------

    def add_app(self, source: Path) -> None:
        """Put a module into the application's directory."""
        shutil.copy(source, self.app)

    def add_unit(self, name: str, text: str, **changes: str) -> None:
        """Write a unit and load it; *changes* of its [Service] section are a drop-in."""
        (self._units / name).write_text(text)
        dropin = self._units / f"{name}.d"
        dropin.mkdir(exist_ok=True)
        lines = [f"{directive}={value}" for directive, value in changes.items()]
        (dropin / "test.conf").write_text("\n".join(["[Service]", *lines, ""]))
        self.ctl("daemon-reload")

    def ctl(self, *words: str, check: bool = True) -> str:
        """Run systemctl; returns what it printed."""
        return self.run("systemctl", *words, check=check)

    def run(self, *words: str, check: bool = True) -> str:
        """Run a program there as root; returns what it printed."""
        inside = (*_as_root(), "nsenter", "-t", str(self._pid), "-m", "-p", "-C")
        done = subprocess.run([*inside, *words], capture_output=True, text=True, check=False)
        said = f"{words}: {done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, f"{said}{self.tail()}"
        return done.stdout.strip()

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.ctl("show", "-p", ",".join(names), unit).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def wait_for(self, unit: str, within_s: float = WAIT_S, **wanted: str) -> None:
        """Wait until properties of a unit have these values."""

        def is_so() -> bool:
            return self.show(unit, *wanted) == wanted

        self.until(is_so, f"{unit} is {wanted}", within_s)

    def wait_for_log(self, text: str) -> None:
        """Wait until a service has written *text*."""
        self.until(lambda: text in self._written(), text)

    def told(self, unit: str) -> list[str]:
        """Each notification that systemd has received from *unit*, in their order."""
        return [found[2] for found in _NOTIFIED.finditer(self.log) if found[1] == unit]

    def gracekit(self, *words: str, env: Mapping[str, str]) -> str:
        """Run the command line there as the service's user; returns what it printed."""
        user = ("setpriv", f"--reuid={USER}", "--regid=nogroup", "--clear-groups", "--no-new-privs")
        variables = ("env", "-C", str(APP), *(f"{name}={value}" for name, value in env.items()))
        return self.run(*user, *variables, python(), "-P", "-m", "gracekit", *words)

    def tail(self) -> str:
        """The last lines that systemd logged of services, and what these have written."""
        logged = [line for line in self.log.splitlines() if _OF_SERVICES.search(line)]
        return "\n".join(["", *logged[-30:], self._written()])[-6000:]

    def _written(self) -> str:
        return "".join(path.read_text() for path in self.lib.glob("*.log"))


def python() -> str:
    """The interpreter of the tests, where services see it."""
    program = Path(sys.executable)
    if program.is_relative_to(ROOT):
        return str(Path("/srv/project") / program.relative_to(ROOT))
    return str(program)


def what_is_missing() -> str | None:
    """Why no such machine can be made here; None if one can."""
    if shutil.which(SYSTEMD) is None:
        return f"there is no {SYSTEMD}: apt-get install --no-install-recommends systemd"
    try:
        subprocess.run(
            [*_as_root(), "unshare", "--mount", "--pid", "--cgroup", "--fork", "true"],
            capture_output=True,
            text=True,
            check=True,
        )
    except OSError as error:
        return f"private namespaces need root, or sudo without a password: {error}"
    except subprocess.CalledProcessError as error:
        return f"private namespaces need root, or sudo without a password: {error.stderr.strip()}"
    return None


def _as_root() -> tuple[str, ...]:
    return () if os.geteuid() == 0 else ("sudo", "-n")
