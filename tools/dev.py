"""One door to every chore: demo, test, check, soak, bench, lock.

Needs nothing but Python and its pip. The pinned tools go once into
`.deps/<digest>/` by `pip install --target`, which works where the system
refuses `pip install` (PEP 668) and has neither venv nor uv. The digest covers
the lock and the interpreter, so a changed pin gets a fresh folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RUNTIME_LOCK: Final = ROOT / "requirements" / "runtime.lock"
DEV_LOCK: Final = ROOT / "requirements" / "dev.lock"

# By name, so that what happens to be installed beside this Python changes no test.
PLUGINS: Final = (
    "asyncio",
    "hypothesispytest",
    "looptime_chronometers",
    "looptime_plugin",
    "looptime_timeproxies",
    "randomly",
    "timeout",
    "xdist",
)

NO_PIP: Final = "this Python has no pip: apt-get install python3-pip (or your system's like)"


# -- the pinned tools -----------------------------------------------------------


def deps(lock: Path) -> Path:
    """The folder that holds exactly what *lock* pins; filled on first use."""
    folder = ROOT / ".deps" / _digest(lock)
    if not folder.is_dir():
        _install(lock, folder)
    return folder


def _digest(lock: Path) -> str:
    interpreter = f"{sys.implementation.cache_tag} {platform.machine()} {sys.platform}"
    return hashlib.sha256(interpreter.encode() + lock.read_bytes()).hexdigest()[:16]


def _install(lock: Path, folder: Path) -> None:
    """Install beside the place and rename: a folder that exists is complete."""
    if importlib.util.find_spec("pip") is None:
        sys.exit(NO_PIP)
    folder.parent.mkdir(exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix="half-", dir=folder.parent))
    print(f"installing {lock.relative_to(ROOT)} into .deps (once) ...", flush=True)
    options = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps")
    command = (sys.executable, "-m", "pip", "install", *options, "--require-hashes")
    # Settings that pip may have here (a virtualenv is a must, the home is the target) do not fit.
    environment = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
    try:
        code = subprocess.call((*command, "--target", half, "-r", lock), env=environment)
        if code != 0:
            sys.exit(f"pip could not install {lock.relative_to(ROOT)} (exit status {code})")
        half.chmod(0o755)
        _put(half, folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _put(half: Path, folder: Path) -> None:
    try:
        half.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process installed the same at the same time
            raise


# -- running --------------------------------------------------------------------


def run(lock: Path, *arguments: str | Path, **environment: str) -> int:
    """Run `python -m arguments` with what *lock* pins; its exit status."""
    path = os.pathsep.join((str(ROOT), str(deps(lock))))
    # Packages of the user must not shadow or warn: only the pins count.
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1", **environment}
    return subprocess.call((sys.executable, "-m", *arguments), cwd=ROOT, env=variables)


def pytest(*arguments: str, **environment: str) -> int:
    """Run pytest with the pinned plugins and no others."""
    plugins = [word for name in PLUGINS for word in ("-p", name)]
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return run(DEV_LOCK, "pytest", *plugins, *arguments, **environment)


def demo(arguments: Sequence[str]) -> int:
    """Show a drain and a restart on one machine."""
    return run(RUNTIME_LOCK, "gracekit", "demo", *arguments)


def test(arguments: Sequence[str]) -> int:
    """Run the tests; arguments go to pytest."""
    return pytest("-n", "2", *arguments)


def soak(arguments: Sequence[str]) -> int:
    """Run the same tests with large numbers, for hours rather than minutes."""
    return pytest("-n", "2", "--timeout=7200", *arguments, GRACEKIT_SOAK="1")


def check(arguments: Sequence[str]) -> int:
    """Lint, format, types and architecture; goes on to the end and tells all."""
    typed = [name for name in ("gracekit", "examples", "tests/typing") if _has_python(name)]
    steps = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", *typed))
    codes = [_step(step) for step in steps]
    return max(*codes, pytest("-q", "tests/test_architecture.py", *arguments))


def _has_python(name: str) -> bool:
    return any((ROOT / name).glob("**/*.py"))


def _step(arguments: Sequence[str]) -> int:
    print(f"-- {' '.join(arguments)}", flush=True)
    return run(DEV_LOCK, *arguments)


def bench(arguments: Sequence[str]) -> int:
    """Measure; results go to the terminal."""
    if not _has_python("benchmarks"):
        print("there is no benchmark yet")
        return 0
    return run(DEV_LOCK, "benchmarks", *arguments)


# -- the locks ------------------------------------------------------------------


def lock(arguments: Sequence[str]) -> int:
    """Write both locks anew from pyproject.toml; arguments go to pip-compile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = project["project"]["dependencies"]
    code = _compile(runtime, RUNTIME_LOCK, arguments)
    return code or _compile([*runtime, *_group(project, "dev")], DEV_LOCK, arguments)


def _group(project: dict[str, dict[str, list[str | dict[str, str]]]], name: str) -> list[str]:
    """The requirements of a dependency group and of those that it includes."""
    found: list[str] = []
    for entry in project["dependency-groups"][name]:
        found += [entry] if isinstance(entry, str) else _group(project, entry["include-group"])
    return found


def _compile(requirements: Sequence[str], target: Path, arguments: Sequence[str]) -> int:
    """Resolve into *target*, which names no host: only names, versions and hashes."""
    quiet = ("--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host")
    plain = ("--strip-extras", "--no-header", "--no-annotate", "--allow-unsafe", "--quiet")
    with tempfile.NamedTemporaryFile("w", suffix=".in") as source:
        source.write("\n".join(requirements) + "\n")
        source.flush()
        options = (*quiet, *plain, "--generate-hashes", "--output-file", str(target), *arguments)
        code = run(DEV_LOCK, "piptools", "compile", *options, source.name)
    print(f"{target.relative_to(ROOT)}: {'written' if code == 0 else 'failed'}")
    return code


COMMANDS: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "demo": demo,
    "test": test,
    "check": check,
    "soak": soak,
    "bench": bench,
    "lock": lock,
}


def main() -> int:
    """Run one command; what follows it goes to the tool behind it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=(function.__doc__ or "").partition("\n")[0], add_help=False)
    chosen, arguments = parser.parse_known_args()
    return COMMANDS[chosen.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
