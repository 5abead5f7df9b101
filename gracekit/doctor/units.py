"""Checks of systemd units: how they stop and start the service.

A unit is read from a file, or from `systemctl show`, which includes drop-ins and
defaults. Directives keep their names and values.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from gracekit.config.settings import Settings, platform_stop_s
from gracekit.config.values import format_duration
from gracekit.doctor.finding import Finding, fail, ok, skip, warn
from gracekit.doctor.grace import check_promise, compare, doubted, refused
from gracekit.doctor.start_command import (
    StartCommand,
    check_wait,
    given_by,
    hides_signals,
    split,
    waits_s,
)
from gracekit.errors import ConfigError
from gracekit.exits import ExitCode

DEFAULT_STOP_S: Final = 90.0  # systemd's DefaultTimeoutStopSec
SYSTEMCTL_TIMEOUT_S: Final = 5.0

Directives = Mapping[str, str]

_ADDED: Final = frozenset({"Environment", "EnvironmentFile"})
_SPECIFIER: Final = re.compile(r"%(.)")
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_SPAN_UNITS: Final = {
    "": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "us": 1e-6, "usec": 1e-6, "ms": 1e-3, "msec": 1e-3,
    "m": 60.0, "min": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0, "w": 604800.0, "week": 604800.0,
}  # fmt: skip


def time_span(text: str) -> float | None:
    """Parse systemd's time spans (`90`, `1min 30s`, `infinity`) to seconds; None if it is none."""
    text = text.strip().lower()
    if text == "infinity":
        return math.inf
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        return None
    if any(unit not in _SPAN_UNITS for _, unit in parts):
        return None
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in parts)


# -- reading units ----------------------------------------------------------------


def check_unit(settings: Settings, unit: str) -> Iterator[Finding]:
    """Check a unit, given by its file or its name."""
    path = Path(unit)
    if not path.exists():
        yield from _check_named(settings, unit)
        return
    directives = parse_unit(path.read_text(encoding="utf-8", errors="replace"))
    if not directives:
        yield fail("unit", f"{path} has no [Service] section", "name the service's own unit")
        return
    yield from check_directives(settings, path.name, directives)


def _check_named(settings: Settings, unit: str) -> Iterator[Finding]:
    shown = show_unit(unit)
    if shown is None:
        yield fail(
            "unit",
            f"there is no file {unit}, and systemctl knows no such unit here: nothing was judged",
            "give --unit the path of the unit's file",
        )
    else:
        yield from check_directives(settings, unit, shown)


def parse_unit(text: str) -> Directives:
    """The [Service] section of a unit file; a later line overrides, and an empty one resets.

    Directives that accumulate, such as `Environment=`, are joined with blanks. `%%` becomes `%`,
    and any other specifier becomes its letter: `%i` becomes `i`.
    """
    section, found = "", dict[str, str]()
    for line in text.replace("\\\n", " ").splitlines():
        words = line.strip()
        if words.startswith("["):
            section = words
        elif section == "[Service]" and "=" in words and words[0] not in "#;":
            name, _, value = words.partition("=")
            name, value = name.strip(), value.strip()
            more = f"{found.get(name, '')} {value}".strip() if name in _ADDED and value else value
            found[name] = more
    if "TimeoutSec" in found:
        found.setdefault("TimeoutStopSec", found["TimeoutSec"])
        found.setdefault("TimeoutStartSec", found["TimeoutSec"])
    return {name: _SPECIFIER.sub(r"\1", value) for name, value in found.items()}


def show_unit(name: str) -> Directives | None:
    """The unit with drop-ins and defaults, from systemctl; None if that is not available."""
    systemctl = shutil.which("systemctl")
    if systemctl is None or name.startswith("-"):
        return None
    try:
        done = subprocess.run(  # noqa: S603 - an absolute path, and a name that is no option
            [systemctl, "show", "--", name if "." in name else f"{name}.service"],
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    found = {name: value for name, _, value in pairs}
    if done.returncode != 0 or found.get("LoadState") != "loaded":
        return None
    for shown, directive in (
        ("TimeoutStopUSec", "TimeoutStopSec"),
        ("TimeoutStartUSec", "TimeoutStartSec"),
    ):
        found[directive] = found.get(shown, "")
    return found


# -- checks -----------------------------------------------------------------------


def check_directives(settings: Settings, name: str, unit: Directives) -> Iterator[Finding]:
    """Check all directives of a unit that affect a stop, a crash or a start."""
    environment, hidden = _environment(unit)
    given = given_by(_words(unit), environment, _directory_of(unit), open_sources=hidden)
    for file in hidden:
        yield skip("settings", f"{name} reads {file}, which is not here", "run doctor where it is")
    settings = yield from judged_by(settings, given, name)
    wait = waits_s(_words(unit), environment)
    in_time = _check_stop(settings, name, unit, given, wait)
    yield doubted(in_time, given, given.unknown(settings))
    limit, said = _stop_limit(unit), f"TimeoutStopSec of {name}"
    if limit is not None:
        yield from check_promise(settings, given, limit_s=limit, said=said, knob="TimeoutStopSec")
    yield _check_kill_mode(name, unit)
    yield _check_command(name, unit)
    yield from check_wait(_words(unit), environment, name)
    yield _check_restart(name, unit)
    yield _check_start(settings, name, unit)


def judged_by(
    settings: Settings, given: StartCommand, where: str
) -> Generator[Finding, None, Settings]:
    """Return the settings of a run by *where*; doctor's own if *where* gives none."""
    if given.has_hidden_file:
        seen = f"{where} names the settings file {given.file}, which is not here"
        yield skip("settings", seen, "run doctor where it is, or with its options")
    if not given.says:
        return settings
    try:
        settings = given.load(settings)
    except ConfigError as error:
        found = refused("settings", given, error)
        yield from (msgspec.structs.replace(one, seen=f"{where}: {one.seen}") for one in found)
        return settings
    yield ok("settings", f"{where} says {', '.join(given.says)}, and is judged by that")
    return settings


def _directory_of(unit: Directives) -> str:
    """Its `WorkingDirectory=`; empty if there is none, or it is the user's home."""
    directory = unit.get("WorkingDirectory", "").removeprefix("-").removeprefix("!")
    return "" if directory == "~" else directory


def _words(unit: Directives) -> list[str]:
    """The words of its command, without systemd's prefixes."""
    command = unit.get("ExecStart", "")
    match = re.search(r"argv\[\]=(.*?) ;", command)  # as systemctl shows it
    return split((match[1] if match else command).lstrip("@-:+!"))


def _environment(unit: Directives) -> tuple[dict[str, str], list[str]]:
    """The variables that it sets, also by its files; and the files that cannot be read here."""
    variables, hidden = dict[str, str](), list[str]()
    for word in split(unit.get("Environment", "")):
        name, _, value = word.partition("=")
        variables[name] = value
    named = unit.get("EnvironmentFile") or unit.get("EnvironmentFiles", "")
    for word in re.sub(r"\(ignore_errors=\w+\)", "", named).split():
        file = Path(word.removeprefix("-"))
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            hidden.append(str(file))
            continue
        for line in lines:
            name, equals, value = line.strip().partition("=")
            if equals and name[0] not in "#;":
                variables[name.strip()] = " ".join(split(value))
    return variables, hidden


def _check_stop(
    settings: Settings, name: str, unit: Directives, given: StartCommand, wait_s: float
) -> Finding:
    value, limit = unit.get("TimeoutStopSec", ""), _stop_limit(unit)
    least = platform_stop_s(settings, before_s=wait_s)
    if limit is None:
        return fail("TimeoutStopSec", f"{value!r} of {name} is no time span", f"write {least}s")
    default = "" if value else " (the default of systemd)"
    said = f"TimeoutStopSec of {name}{default}"
    return compare(
        settings,
        check="TimeoutStopSec",
        limit_s=limit,
        said=said,
        knob="TimeoutStopSec",
        spent={"uvicorn": wait_s},
        promised_s=settings.kill_after_s if given.says else None,
    )


def _stop_limit(unit: Directives) -> float | None:
    """Seconds from SIGTERM to SIGKILL; None if the unit's text is no time span."""
    value = unit.get("TimeoutStopSec", "")
    limit = time_span(value) if value else DEFAULT_STOP_S
    return math.inf if limit == 0 else limit  # 0 turns the limit off


def _check_kill_mode(name: str, unit: Directives) -> Finding:
    mode, number = unit.get("KillMode") or "control-group", unit.get("KillSignal") or "SIGTERM"
    if not begins_drain(number):
        return fail(
            "KillSignal",
            f"{name} stops with {number}, and a drain begins with SIGTERM, SIGINT or SIGQUIT",
            "leave KillSignal out, or set KillSignal=SIGTERM",
        )
    match mode:
        case "mixed":
            return ok("KillMode", f"{name}: mixed, so SIGTERM reaches the service alone")
        case "none" | "process":
            return warn(
                "KillMode",
                f"{name}: {mode}, which leaves child processes behind that may go on acting",
                "set KillMode=mixed",
            )
        case _:
            return warn(
                "KillMode",
                f"{name}: {mode}, so child processes of running handlers get SIGTERM at once, "
                "in the middle of a drain",
                "set KillMode=mixed",
            )


def begins_drain(number: str) -> bool:
    """Whether the signal with that name or number starts a drain."""
    return number.upper().removeprefix("SIG") in {"TERM", "15", "INT", "2", "QUIT", "3"}


def _check_command(name: str, unit: Directives) -> Finding:
    words = _words(unit)
    if hides_signals(words):
        return fail(
            "ExecStart",
            f"{name} starts a shell that starts the service: SIGTERM goes to the shell",
            "name the program itself, or begin the shell's command with exec",
        )
    return ok("ExecStart", f"{name} starts {words[0] if words else 'nothing'} itself")


def _check_restart(name: str, unit: Directives) -> Finding:
    restart = unit.get("Restart") or "no"
    never = unit.get("RestartPreventExitStatus", "").split()
    forced = unit.get("RestartForceExitStatus", "").split()
    success = unit.get("SuccessExitStatus", "").split()
    handed_over, config = str(int(ExitCode.HANDED_OVER)), str(int(ExitCode.CONFIG))
    if restart == "no":
        return warn(
            "Restart",
            f"{name}: no, so after a crash nothing is settled until somebody starts it",
            "set Restart=on-failure",
        )
    if config not in never:
        return warn(
            "Restart",
            f"{name} restarts after exit {config} (wrong configuration), which will not help",
            f"set RestartPreventExitStatus={config}",
        )
    if handed_over not in success or handed_over not in forced:
        return warn(
            "Restart",
            f"{name} takes exit {handed_over} (handed over) for a failure, or does not start "
            "again after it",
            f"set SuccessExitStatus={handed_over} and RestartForceExitStatus={handed_over}",
        )
    return ok("Restart", f"{name}: {restart}; {config} ends it, {handed_over} is a good end")


def _check_start(settings: Settings, name: str, unit: Directives) -> Finding:
    value = unit.get("TimeoutStartSec", "")
    limit = (time_span(value) or math.inf) if value else DEFAULT_STOP_S
    if not unit.get("Type", "simple").startswith("notify"):
        return warn(
            "Type",
            f"{name} is Type={unit.get('Type', 'simple')}: systemd takes it for started before "
            "it is ready, and a drain cannot ask for more time",
            "set Type=notify and NotifyAccess=main",
        )
    if "--keep-evidence" in _words(unit) and unit.get("NotifyAccess") != "all":
        return fail(
            "NotifyAccess",
            f"{name} keeps evidence, so the service is a child of its main process, and systemd "
            "does not hear it",
            "set NotifyAccess=all, or leave --keep-evidence out: ExecStopPost tells systemd's word",
        )
    if settings.start_timeout_s >= limit:
        return warn(
            "TimeoutStartSec",
            f"start_timeout = {format_duration(settings.start_timeout_s)} (of each on_start hook) "
            f"should be below TimeoutStartSec of {name} = {format_duration(limit)}",
            "raise TimeoutStartSec, or lower GRACEKIT_START_TIMEOUT",
        )
    shown = "infinite" if math.isinf(limit) else format_duration(limit)
    return ok("TimeoutStartSec", f"{name}: {shown}, above start_timeout")
