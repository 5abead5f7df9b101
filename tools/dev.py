"""One door to every chore: `make help` lists them, and each is a function of this file.

Needs nothing but Python and its pip. The pinned tools go once into
`.deps/<digest>/`, an environment made by hand: `pip install --target` works
where the system refuses `pip install` (PEP 668) and has neither venv nor uv,
and a link to Python beside a `pyvenv.cfg` makes that Python see the pins and
this project alone, also in the processes that tests start. The digest covers
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RUNTIME_LOCK: Final = ROOT / "requirements" / "runtime.lock"
DEV_LOCK: Final = ROOT / "requirements" / "dev.lock"
MUTATE_LOCK: Final = ROOT / "requirements" / "mutate.lock"
DOCS_LOCK: Final = ROOT / "requirements" / "docs.lock"
OSLO_LOCK: Final = ROOT / "requirements" / "oslo.lock"
API_LOCK: Final = ROOT / "requirements" / "api.lock"
WSGI_LOCK: Final = ROOT / "requirements" / "wsgi.lock"
PEERS_LOCK: Final = ROOT / "requirements" / "peers.lock"
POSTGRES_PEERS_LOCK: Final = ROOT / "requirements" / "postgres-peers.lock"

# oslo.service asks for eventlet although its threads do without; a peer that cannot import it
# is sure to run on real threads.
LEFT_OUT: Final = ("dnspython", "eventlet")

_SHADOWING: Final = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}  # could hide the pins

# The tests start hundreds of processes; without bytecode on disk each compiles what it imports.
_SLOWING: Final = {"PYTHONDONTWRITEBYTECODE"}

# On two processors, as the tests wait for two thirds of their time. Each worker gets a part of the
# tests, and one that has run its own takes over some of another's.
WORKERS: Final = ("-n", "6", "--dist", "worksteal")
QUICK: Final = ("-q", "-m", "not process and not server")
TYPED: Final = ("gracekit", "examples", "benchmarks", "tests/typing")

NO_PIP: Final = "this Python has no pip: apt-get install python3-pip (or your system's like)"

# Debian's packages that the tests start private servers of, by a program that each brings.
NEEDED: Final = {
    "rabbitmq-server": "rabbitmq-server",
    "postgres": "postgresql",
    "/lib/systemd/systemd": "systemd",
}

# 100 MB, and only a soak runs its test.
NEEDED_TO_SOAK: Final = {"promtool": "prometheus"}

# The packages would start a broker and a database of the system, and Erlang's epmd on all
# addresses, now and at each boot: against the first a policy, unless the machine has one; against
# the others "disable", and no cluster is created, unless the machine's settings say so.
INSTALL: Final = """
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
clusters=/etc/postgresql-common/createcluster.conf
clean_up() {
    ! [ "$has_policy" ] || rm -f $policy
    ! [ "$has_clusters" ] || sed -i '/^create_main_cluster = false$/d' $clusters
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM
if ! [ -e $policy ]; then
    has_policy=yes
    printf '#!/bin/sh\\nexit 101\\n' > $policy
    chmod 755 $policy
fi
units=
case " $* " in
    *" rabbitmq-server "*)
        units=rabbitmq-server
        command -v epmd || units="$units epmd.socket epmd.service"
        ;;
esac
case " $* " in *" prometheus "*) units="$units prometheus" ;; esac
install() {
    set -- apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
    "$@" || { apt-get update && "$@"; }
}
for package in "$@"; do
    if [ $package = postgresql ]; then
        install postgresql-common || exit 1
        if ! grep -qs '^create_main_cluster' $clusters; then
            has_clusters=yes
            echo 'create_main_cluster = false' >> $clusters
        fi
    fi
    install $package || exit 1
done
[ -z "$units" ] || ! command -v systemctl || systemctl disable $units || :
"""


# -- the pinned tools -----------------------------------------------------------


def python(lock: Path) -> Path:
    """A Python that sees exactly what *lock* pins, and this project; made on first use."""
    folder = ROOT / ".deps" / _digest(lock)
    if not folder.is_dir():
        _install(lock, folder)
    return folder / "bin" / "python3"


def _digest(lock: Path) -> str:
    interpreter = f"{sys.implementation.cache_tag} {platform.machine()} {_base()}"
    return hashlib.sha256(interpreter.encode() + lock.read_bytes()).hexdigest()[:16]


def _base() -> Path:
    return Path(sys.executable).resolve()


def _install(lock: Path, folder: Path) -> None:
    """Install beside the place and rename: a folder that exists is complete."""
    if importlib.util.find_spec("pip") is None:
        sys.exit(NO_PIP)
    folder.parent.mkdir(exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix="half-", dir=folder.parent))
    print(f"installing {lock.relative_to(ROOT)} into .deps (once) ...", flush=True)
    try:
        code = _pip(lock, _environment(half))
        if code != 0:
            sys.exit(f"pip could not install {lock.relative_to(ROOT)} (exit status {code})")
        half.chmod(0o755)
        _put(half, folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _environment(folder: Path) -> Path:
    """Make *folder* what `venv` would make, and return where its packages go."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(_base())
    (folder / "pyvenv.cfg").write_text(
        f"home = {_base().parent}\ninclude-system-site-packages = false\n"
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    # Seen from site-packages this is ROOT: the project can be imported in every folder.
    (packages / "project.pth").write_text("../../../../..\n")
    return packages


def _pip(lock: Path, target: Path) -> int:
    """Install *lock* into the folder *target*; pip's exit status."""
    options = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps")
    command = (sys.executable, "-m", "pip", "install", *options, "--require-hashes")
    # Settings that pip may have here (a virtualenv is a must, the home is the target) do not fit.
    variables = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
    return subprocess.call((*command, "--target", target, "-r", lock), env=variables)


def _put(half: Path, folder: Path) -> None:
    try:
        half.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process installed the same at the same time
            raise


# -- the servers that the tests start -------------------------------------------


def servers(arguments: Sequence[str], needed: Mapping[str, str] = NEEDED) -> None:
    """Have RabbitMQ, PostgreSQL and systemd, and install what is missing.

    Without them there is no run of all tests: one that skips theirs would look like one that
    passed them. A run of chosen tests goes on, and those that need them fail and say so.
    """
    if problem := _install_servers(needed):
        if not arguments:
            sys.exit(problem)
        print(problem, file=sys.stderr)


def _missing(needed: Mapping[str, str]) -> list[str]:
    """Names of the packages whose program is not there."""
    places = [os.environ.get("PATH", os.defpath)]
    places += ["/usr/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    path = os.pathsep.join(places)
    return [package for name, package in needed.items() if shutil.which(name, path=path) is None]


def _install_servers(needed: Mapping[str, str]) -> str:
    """Install Debian's packages that are missing; what stood against it, or nothing."""
    if not (packages := _missing(needed)):
        return ""
    names = " ".join(packages)
    need = f"the tests need {names}, which they start for themselves"
    if shutil.which("apt-get") is None:
        return f"{need}: install them by your system's means, RabbitMQ with erl_call"
    if (root := _as_root()) is None:
        return f"{need}: sudo apt-get install --no-install-recommends {names}"
    print(f"installing {names} by apt-get (once) ...", flush=True)
    command = (*root, "/bin/sh", "-c", INSTALL, "install", *packages)
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        return ""
    return f"{done.stdout}{need}: apt-get could not install them (see above)"


def _as_root() -> tuple[str, ...] | None:
    """What to write before a command that root is to run; None if root is out of reach."""
    if os.geteuid() == 0:
        return ()
    sudo = ("sudo", "-n")
    if shutil.which("sudo") and subprocess.call((*sudo, "true"), stderr=subprocess.DEVNULL) == 0:
        return sudo
    return None


# -- running --------------------------------------------------------------------


def run(lock: Path, *arguments: str | Path, **environment: str) -> int:
    """Run `python -m arguments` with what *lock* pins; its exit status."""
    left_out = _SHADOWING | _SLOWING
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.call(
        (python(lock), "-m", *arguments), cwd=ROOT, env={**variables, **environment}
    )


def demo(arguments: Sequence[str]) -> int:
    """Show a drain and a restart on one machine."""
    return run(RUNTIME_LOCK, "gracekit", "demo", *arguments)


def test(arguments: Sequence[str]) -> int:
    """Run the tests; arguments go to pytest."""
    servers(arguments)
    others()
    return run(DEV_LOCK, "pytest", *WORKERS, *arguments)


def others() -> None:
    """Make the environments of the tests' peers now, because a test has too little time for it."""
    for lock_of_peers in (OSLO_LOCK, API_LOCK, WSGI_LOCK):
        python(lock_of_peers)


def quick(arguments: Sequence[str]) -> int:
    """Run the tests that start no process and no server: the loop to work in."""
    return run(DEV_LOCK, "pytest", *WORKERS, *QUICK, *arguments)


def cover(arguments: Sequence[str]) -> int:
    """Run the tests of `quick`; fail if they leave out too much of what they can reach."""
    run(DEV_LOCK, "coverage", "erase")
    code = run(DEV_LOCK, "coverage", "run", "-m", "pytest", *WORKERS, *QUICK)
    code = code or run(DEV_LOCK, "coverage", "combine", "--quiet")
    return code or run(DEV_LOCK, "coverage", "report", *arguments)


def soak(arguments: Sequence[str]) -> int:
    """Run the tests on uvloop, then on asyncio with large numbers, for hours; tells all."""
    servers(arguments, NEEDED | NEEDED_TO_SOAK)
    others()
    code = run(DEV_LOCK, "pytest", *WORKERS, "--uvloop", *arguments)
    # Large numbers compute more and wait less, so fewer workers have enough to do.
    options = (*WORKERS, "-n", "3", "--timeout=7200", *arguments)
    return max(code, run(DEV_LOCK, "pytest", *options, GRACEKIT_SOAK="1"))


def check(arguments: Sequence[str]) -> int:
    """Lint, format, types and architecture; goes on to the end and tells all."""
    typed = [name for name in TYPED if _has_python(name)]
    steps = (
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy", "--strict", *typed),
        ("pytest", "-q", "tests/test_architecture.py", *arguments),
    )
    return max([_step(step) for step in steps])


def _has_python(name: str) -> bool:
    return any((ROOT / name).glob("**/*.py"))


def _step(arguments: Sequence[str]) -> int:
    print(f"-- {' '.join(arguments)}", flush=True)
    return run(DEV_LOCK, *arguments)


def dist(arguments: Sequence[str]) -> int:
    """Build the wheel and the source archive into dist/."""
    return run(DEV_LOCK, "hatchling", "build", "--directory", "dist", *arguments)


def docs(arguments: Sequence[str]) -> int:
    """Write what repeats the code, then build the documentation; each warning of Sphinx fails."""
    target = ROOT / "build" / "docs"
    options = ("-q", "-W", "--keep-going", "-b", "html", "-d", str(ROOT / "build" / "doctrees"))
    code = run(DOCS_LOCK, "tools.pages")
    code = code or run(DOCS_LOCK, "sphinx", *options, *arguments, "docs", str(target))
    if code == 0:
        print(f"{target.relative_to(ROOT)}/index.html")
    return code


def bench(arguments: Sequence[str]) -> int:
    """Measure; results go to the terminal."""
    if not _has_python("benchmarks"):
        print("there is no benchmark yet")
        return 0
    return run(DEV_LOCK, "benchmarks", *arguments)


def bench_postgres(arguments: Sequence[str]) -> int:
    """Measure a store in PostgreSQL, beside other libraries in an environment of their own."""
    servers(arguments)
    return run(DEV_LOCK, "benchmarks.postgres", *arguments)


def bench_rabbitmq(arguments: Sequence[str]) -> int:
    """Measure workers on RabbitMQ, beside other libraries in environments of their own."""
    servers(())
    return run(DEV_LOCK, "benchmarks.rabbitmq", *arguments)


def mutate(arguments: Sequence[str]) -> int:
    """Break the core on purpose, and list what no test notices; see tests/MUTATION.md."""
    if "--sql" in arguments:
        rest = [argument for argument in arguments if argument != "--sql"]
        return run(MUTATE_LOCK, "tools.mutate_sql", *rest)
    code = run(MUTATE_LOCK, "mutmut", "run", "--max-children", "1", *arguments)
    if code or arguments:  # of mutants that were named it has told
        return code
    return run(MUTATE_LOCK, "mutmut", "results")


# -- the locks ------------------------------------------------------------------


def lock(arguments: Sequence[str]) -> int:
    """Write the locks anew from pyproject.toml; arguments go to pip-compile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = project["project"]["dependencies"]
    code = _compile(runtime, RUNTIME_LOCK, arguments)
    groups = (("dev", DEV_LOCK), ("docs", DOCS_LOCK), ("mutate", MUTATE_LOCK))
    for name, target in groups:
        code = code or _compile([*runtime, *_group(project, name)], target, arguments)
    left_out = [option for name in LEFT_OUT for option in ("--unsafe-package", name)]
    options = ("--no-allow-unsafe", *left_out, *arguments)
    code = code or _compile([*runtime, *_group(project, "oslo")], OSLO_LOCK, options)
    code = code or _compile(_group(project, "api"), API_LOCK, arguments)
    code = code or _compile([*runtime, *_group(project, "wsgi")], WSGI_LOCK, arguments)
    code = code or _compile(_group(project, "peers"), PEERS_LOCK, arguments)
    return code or _compile(_group(project, "postgres-peers"), POSTGRES_PEERS_LOCK, arguments)


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


def show_help(_: Sequence[str]) -> int:
    """List the commands."""
    for name, command in COMMANDS.items():
        print(f"make {name:<15} {(command.__doc__ or '').strip().partition(chr(10))[0]}")
    return 0


COMMANDS: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "help": show_help,
    "demo": demo,
    "test": test,
    "quick": quick,
    "cover": cover,
    "check": check,
    "soak": soak,
    "docs": docs,
    "dist": dist,
    "bench": bench,
    "bench-postgres": bench_postgres,
    "bench-rabbitmq": bench_rabbitmq,
    "mutate": mutate,
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
