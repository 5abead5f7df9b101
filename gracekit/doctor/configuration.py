"""Checks of the settings, by themselves and against each other."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from gracekit.config.settings import Settings, hard_limit_sum, last_breath_s, option_name, rules
from gracekit.config.urls import holds_password
from gracekit.config.values import format_duration
from gracekit.doctor.finding import Finding, Level, ok, warn


def check_settings(settings: Settings) -> list[Finding]:
    """List the settings that differ from the defaults; loading has validated them already."""
    changed = [name for name, _, origin in settings.describe() if origin != "default"]
    remedy = "take the option out of the file, where it has no effect"
    return [
        ok("settings", f"all are valid; not the default: {', '.join(changed) or 'none'}"),
        *(warn("oslo.config", text, remedy) for text in settings.doubts),
    ]


def check_secrets(settings: Settings) -> Iterator[Finding]:
    """Check whether other users can read passwords in a settings file."""
    for name in ("transport_url", "store_url"):
        file, _, line = settings.origin(name).rpartition(":")
        if not (line.isdecimal() and holds_password(getattr(settings, name))):
            continue
        mode = stat.S_IMODE(Path(file).stat().st_mode)
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            yield warn(
                "settings file",
                f"{file} has mode {mode:04o} and holds the password of {option_name(name)}: every "
                "user of this machine can read it",
                f"chmod 600 {shlex.quote(file)}, and change the password",
            )
        else:
            yield ok("settings file", f"{file} holds a password, and has mode {mode:04o}")


def check_hard_limit(settings: Settings) -> Finding:
    """Report how long a stop takes at most."""
    alarm = format_duration(last_breath_s(settings))
    return ok("hard limit", f"{hard_limit_sum(settings)}, and the kernel's alarm at {alarm}")


def check_inequalities(settings: Settings) -> Iterator[Finding]:
    """Check each rule between two settings."""
    for rule in rules(settings):
        name = option_name(rule.about[0])
        if rule.holds:
            yield ok(name, rule.said("is"))
        else:
            level = Level.FAIL if rule.refused else Level.WARN
            seen = f"{rule.said('should be')}: {rule.because}"
            yield Finding(check=name, level=level, seen=seen, remedy=rule.remedy)


def check_settle(settings: Settings) -> Iterator[Finding]:
    """Check the settle time: a dead process's last request may still be on its way to a backend."""
    wait = settings.startup_reconciliation_wait_seconds
    check = "reconciliation"
    if not settings.startup_reconciliation_enabled:
        yield warn(
            check,
            "startup_reconciliation_enabled = false: a start does not settle what earlier runs "
            "left, and their resources stay refused",
            "set GRACEKIT_STARTUP_RECONCILIATION_ENABLED=true, unless another run does it",
        )
    elif wait:
        yield ok(check, f"an unclean task is looked at {format_duration(wait)} after its adoption")
    else:
        yield warn(
            check,
            "0s: after a crash a task is probed or run again while the dead process's last "
            "request may still be on its way to a backend",
            "set GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS to what a backend's answer may take",
        )
