"""The unit of systemd that runs a service: `gracekit init systemd`.

Each directive that restricts the service was tested under a real systemd (`tests/systemd/`), with
the door, SQLite's locks and signals from the user. Two that are often recommended are left
out: ProtectProc, because a run inspects other processes to see which runs are alive, and
MemoryDenyWriteExecute, because it breaks libraries that handlers may use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from gracekit.config.settings import variable_name
from gracekit.config.urls import file_of
from gracekit.config.values import PREFIX, format_duration
from gracekit.deploy.plan import NUMBERS, RESTART_S, WATCHDOG_S, Plan, commented, printable
from gracekit.errors import ConfigError
from gracekit.exits import ExitCode

RELOADS_SINCE: Final = 253
"""The first version of systemd with Type=notify-reload."""
VERSION_TIMEOUT_S: Final = 5.0
HARDENING: Final = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "PrivateDevices=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)
_USER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}|[0-9]{1,10}")
_BARE: Final = re.compile(r"[\w%+,./:=@$*-]+")
_HOMES: Final = ("/home", "/root", "/run/user")
_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - compared with paths, not written to


class UnitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's choices for a unit, beside the settings.

    Attributes:
        instances: How many run at the same time; None for a plain unit instead of a template.
        version: The version of the systemd that will run it.
        user: The user that the process runs as.
        program: The command line of `gracekit` on the target machine.
        interpreter: Path of the Python that runs it, with all links resolved, as a virtual
            environment's is a link.
    """

    instances: int | None
    version: int
    user: str
    program: tuple[str, ...]
    interpreter: Path


def installed_version() -> int | None:
    """The version of systemd on this machine; None without systemd."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - an absolute path
            [systemctl, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"systemd (\d+)", done.stdout)
    return None if found is None else int(found[1])


def this_program() -> tuple[str, ...]:
    """The command line of this `gracekit`, usable in any directory: its script or interpreter.

    With `-P` Python does not import modules from the working directory before gracekit starts.
    """
    script = Path(sys.executable).parent / "gracekit"
    return (str(script),) if script.is_file() else (sys.executable, "-P", "-m", "gracekit")


def unit(plan: Plan, options: UnitOptions) -> str:
    """The text of the unit, or of the template unit.

    Raises:
        ConfigError: the instances of a template would share a name, a port or a socket, or a text
            has characters that a unit cannot contain.
    """
    _check_user(options.user)
    lines = [*_head(plan, options), ""]
    lines += ["[Unit]", f"Description={_plain(plan.target)}, a service on gracekit"]
    lines += ["Wants=network-online.target", "After=network-online.target", ""]
    lines += ["[Service]", *_service(plan, options), "", "[Install]", "WantedBy=multi-user.target"]
    return "\n".join([*lines, "", *commented(NUMBERS, _reasons(plan)), ""])


def _check_user(user: str) -> None:
    if not _USER.fullmatch(user):
        raise ConfigError(
            f"--user {user!r} is no name of a user: give a number, or 1 to 31 of A-Z, a-z, 0-9, "
            "_, . and -, first a letter or _"
        )


def _head(plan: Plan, options: UnitOptions) -> Iterator[str]:
    """How to install the unit."""
    is_template = options.instances is not None
    file = f"{plan.name}@.service" if is_template else f"{plan.name}.service"
    started = plan.name
    if is_template:
        last = (options.instances or 1) - 1
        started = f"{plan.name}@{{0..{last}}}" if last else f"{plan.name}@0"
    yield f"# {file}: printed by gracekit init systemd. As root:"
    yield "#"
    yield f"#   useradd --system --user-group --no-create-home {options.user}"
    yield f"#   cp {file} /etc/systemd/system/"
    yield "#   systemctl daemon-reload"
    yield f"#   systemctl enable --now {started}"
    for variable, shown in _secrets(plan).items():
        yield "#"
        yield f"# {variable} ({shown}) holds a password, so it is not in this file."
        yield f"# Write a line {variable}=... into {_secret_file(plan)}, which only root"
        yield "# may read (chmod 600)."


def _service(plan: Plan, options: UnitOptions) -> Iterator[str]:
    yield f"Type={'notify-reload' if options.version >= RELOADS_SINCE else 'notify'}"
    yield "NotifyAccess=main"
    yield f"User={options.user}"
    yield f"WorkingDirectory={_to_the_end(str(plan.app_dir))}"
    yield f"ExecStart={_command(plan, options)}"
    if options.instances is not None or plan.settings.instance is not None:
        yield f"ExecCondition={_line(*options.program, 'service', 'wanted', plan.topic)}"
    yield f"ExecStopPost={_line(*options.program, 'exits', 'record', '--systemd')}"
    if options.version < RELOADS_SINCE:
        yield "ExecReload=/bin/sh -c 'kill -HUP $MAINPID'"
    yield from _environment(plan, options)
    yield ""
    yield "# SIGTERM goes to the service alone; a final SIGKILL also to processes it has started."
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={plan.stop_s}"
    yield f"TimeoutStartSec={plan.start_s}"
    yield f"WatchdogSec={WATCHDOG_S}"
    yield "Restart=on-failure"
    yield f"RestartSec={RESTART_S}"
    yield f"SuccessExitStatus={int(ExitCode.HANDED_OVER)}"
    yield f"RestartForceExitStatus={int(ExitCode.HANDED_OVER)}"
    yield f"RestartPreventExitStatus={int(ExitCode.CONFIG)}"
    yield ""
    yield f"StateDirectory={plan.name}"
    yield "StateDirectoryMode=0700"
    yield f"RuntimeDirectory={_runtime(plan, options)}"
    yield from _writable(plan)
    yield ""
    yield "# Tried with a service that answers and drains. Remove lines that stop your handlers."
    yield from _places(plan, options)
    yield from HARDENING


def _command(plan: Plan, options: UnitOptions) -> str:
    return _line(*options.program, "run", plan.target, *["--factory"] * plan.factory)


def _line(*words: str) -> str:
    return " ".join(_word(word).replace("$", "$$") for word in words)


# -- settings ---------------------------------------------------------------------------


def _environment(plan: Plan, options: UnitOptions) -> Iterator[str]:
    variables = plan.files(_state(plan)) | _urls_of_servers(plan) | plan.runs(_state(plan))
    variables |= plan.given(with_file=False)
    for name, paths in plan.host_files(with_file=False).items():
        variables[name] = ",".join(map(str, paths))
    if plan.config is not None:
        variables[f"{PREFIX}CONFIG"] = str(plan.config.resolve())
    if plan.admin is not None and options.instances is None:
        variables[variable_name("admin")] = str(plan.admin)
    variables[variable_name("kill_after_s")] = str(plan.stop_s)
    for name, value in variables.items():
        yield f"Environment={_word(f'{name}={value}')}"
    if options.instances is not None:
        yield from _of_instances(plan, options)
    if _secrets(plan):
        yield f"EnvironmentFile={_secret_file(plan)}"


def _of_instances(plan: Plan, options: UnitOptions) -> Iterator[str]:
    """The variables that differ between the instances of a template; `%i` is the instance."""
    if plan.settings.instance is not None:
        raise ConfigError(
            f"instance = {plan.settings.instance} names one process, but each instance of a "
            "template needs its own name: leave GRACEKIT_INSTANCE out"
        )
    yield f"Environment={variable_name('instance')}=%H-%i"
    if (admin := plan.admin) is None:
        return
    if admin.path is None:
        raise ConfigError(
            f"admin = {admin} is one port, which several instances cannot share: write "
            f"--admin unix:/run/{plan.name}/admin.sock, and each gets a socket of its own"
        )
    place = f"unix:/run/{_runtime(plan, options)}/{_plain(admin.path.name)}"
    yield "Environment=" + _quoted(f"{variable_name('admin')}={place}")


def _urls_of_servers(plan: Plan) -> dict[str, str]:
    urls = plan.other_urls()
    return {name: url for name, url in urls.items() if not plan.comes_from_file(name)}


def _secrets(plan: Plan) -> dict[str, str]:
    """The secrets that are not in the settings file."""
    return {name: shown for name, shown in plan.secret().items() if not plan.comes_from_file(name)}


def _secret_file(plan: Plan) -> str:
    return f"/etc/{plan.name}.env"


# -- places -----------------------------------------------------------------------------


def _state(plan: Plan) -> str:
    return f"/var/lib/{plan.name}"


def _runtime(plan: Plan, options: UnitOptions) -> str:
    # systemd removes the directory when the instance ends, so each instance needs its own.
    return plan.name if options.instances is None else f"{plan.name}/%i"


def _writable(plan: Plan) -> Iterator[str]:
    """`ReadWritePaths=` for directories in the settings outside the service's own directories."""
    own = (PurePosixPath(_state(plan)), PurePosixPath("/run", plan.name))
    places = [PurePosixPath(file).parent for file in _written(plan)]
    others = [place for place in places if not any(one in (place, *place.parents) for one in own)]
    for place in dict.fromkeys(others):
        yield f"ReadWritePaths={_word(str(place))}"


def _places(plan: Plan, options: UnitOptions) -> Iterator[str]:
    """Protect homes and temporary files, unless the service uses files there.

    If homes are read-only, `ReadWritePaths=` permits the directories that the service writes to.
    """
    named = [*_written(plan), *_read(plan, options)]
    used = [*named, *(path.resolve() for path in named)]
    in_home = any(_is_in(path, _HOMES) for path in used)
    yield f"ProtectHome={'read-only' if in_home else 'yes'}"
    if not any(_is_in(path, _TEMPORARY) for path in used):
        yield "PrivateTmp=yes"


def _written(plan: Plan) -> Iterator[Path]:
    """The paths that the service writes: store, queue, locks and the HTTP endpoint's socket."""
    yield from map(file_of, plan.files(_state(plan)).values())
    yield from map(Path, plan.runs(_state(plan)).values())
    if plan.admin is not None and plan.admin.path is not None:
        yield plan.admin.path


def _read(plan: Plan, options: UnitOptions) -> Iterator[Path]:
    """The paths that the service reads: program, application, and files in the settings."""
    yield from (plan.app_dir, Path(options.program[0]), options.interpreter)
    if plan.config is not None:
        yield plan.config.absolute()
    for paths in plan.host_files(with_file=True).values():
        yield from paths


def _is_in(path: Path, places: Sequence[str]) -> bool:
    return any(Path(place) in (path, *path.parents) for place in places)


# -- text -------------------------------------------------------------------------------


def _reasons(plan: Plan) -> Iterator[str]:
    yield from plan.reasons("TimeoutStopSec", "TimeoutStartSec")
    yield "A start, and a drain that makes progress, ask systemd for more time by themselves."
    every = format_duration(min(plan.settings.look_every_s, WATCHDOG_S / 2))
    yield (
        f"WatchdogSec = {WATCHDOG_S}: the event loop feeds the watchdog every {every}. If it is "
        "blocked for longer, systemd kills the service and starts it again."
    )
    yield f"RestartSec = {RESTART_S}: systemd gives up after five starts in ten seconds."
    if plan.has_server:
        yield (
            "FailureAction=reboot-force in [Unit] resets the machine if not even the kernel can "
            "end the process (state D). Without it, such a process may act beside another host."
        )
    yield (
        "Exit codes: 75 is a good end with work left, so systemd starts the service again; 78 is "
        "a wrong configuration, which a restart does not mend."
    )


def _plain(text: str) -> str:
    """*text* for a directive that does not support quotes.

    Raises:
        ConfigError: it has control characters.
    """
    return printable(text, "a unit").replace("%", "%%")


def _to_the_end(text: str) -> str:
    """As `_plain`, for the end of a line.

    Raises:
        ConfigError: also for a final backslash, which joins the next line, or a blank, which is
            lost.
    """
    if text.endswith(("\\", " ")):
        raise ConfigError(f"{text!r} ends in a character that cannot stand in a unit: rename it")
    return _plain(text)


def _word(text: str) -> str:
    """*text* as one word of a directive, quoted if necessary."""
    return _quoted(_plain(text))


def _quoted(text: str) -> str:
    """As `_word`, but percent signs in *text* stay specifiers."""
    if _BARE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
