"""Checks whether the user of a systemd unit may use the files of its service.

A directory that systemd creates for the service, such as its `StateDirectory=`, is checked only if
it exists.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from gracekit.config.admin import files_of
from gracekit.config.settings import Settings
from gracekit.config.urls import UrlKind, file_of, kind_of
from gracekit.config.values import parse_truth
from gracekit.doctor.finding import Finding, fail, ok, skip
from gracekit.doctor.machine.permissions import (
    READ,
    SEARCH,
    WRITE,
    Account,
    Obstacle,
    account_of,
    obstacle,
)
from gracekit.doctor.platform.start_command import StartCommand
from gracekit.errors import ConfigError

CHECK: Final = "User"
HOMES: Final = ("/home", "/root", "/run/user")
_OTHER_ROOT: Final = ("RootDirectory", "RootImage")
_MADE: Final = MappingProxyType(
    {
        "StateDirectory": "/var/lib",
        "CacheDirectory": "/var/cache",
        "LogsDirectory": "/var/log",
        "RuntimeDirectory": "/run",
    }
)
_MARKS: Final = "@-:+!|"  # systemd's prefixes of a command
_SCRIPT: Final = b"#!"
_BITS: Final = MappingProxyType(
    {
        "enter": SEARCH,
        "start": SEARCH,
        "read and start": READ | SEARCH,
        "read": READ,
        "write": READ | WRITE,
        "make files in": WRITE | SEARCH,
    }
)


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One file or directory that a service uses.

    Attributes:
        what: Its description: `the token file`.
        path: Its absolute path.
        verb: What the service does with it, a key of `_BITS`.
    """

    what: str
    path: Path
    verb: str

    @property
    def bits(self) -> int:
        """The required permissions: READ, WRITE and SEARCH, added up."""
        return _BITS[self.verb]

    def __str__(self) -> str:
        """`the token file /etc/compute.tokens`."""
        return f"{self.what} {self.path}"


def check_user(
    settings: Settings, name: str, unit: Mapping[str, str], given: StartCommand, words: list[str]
) -> Iterator[Finding]:
    """Report each file of the service that the unit's user may not use.

    Args:
        settings: Of the service.
        name: Of the unit.
        unit: Its directives.
        given: The settings in its command and variables.
        words: Its command line.
    """
    if any(unit.get(one) for one in _OTHER_ROOT):
        return
    uses = list(_uses(settings, unit, given, words))
    yield from _check_home(unit, name, uses)
    user = unit.get("User", "")
    if not user or _has_rights_of_root(unit):
        return
    if _is_true(unit.get("DynamicUser", "")):
        yield skip(CHECK, f"systemd makes a user for each start of {name}: files are not judged")
        return
    more = tuple(unit.get("SupplementaryGroups", "").split())
    account = account_of(user, unit.get("Group", ""), more)
    if account is None:
        yield skip(
            CHECK,
            f"this machine does not have the user {user} of {name}, or one of its groups, so "
            "doctor cannot tell which files the service may use",
            "make the user, or run doctor where the service runs",
        )
        return
    yield from _check_account(account, name, [one for one in uses if not _is_made(one, unit)])


def _has_rights_of_root(unit: Mapping[str, str]) -> bool:
    command = unit.get("ExecStart", "")
    marks = command[: len(command) - len(command.lstrip(_MARKS))]
    return "+" in marks or "CAP_DAC" in unit.get("AmbientCapabilities", "").upper()


def _check_account(account: Account, name: str, uses: list[Use]) -> Iterator[Finding]:
    met, unseen = dict[str, tuple[Obstacle, list[Use]]](), list[Use]()
    for use in uses:
        try:
            found = obstacle(account, use.path, use.bits)
        except OSError:
            unseen.append(use)
            continue
        if found is not None:
            met.setdefault(str(found.place), (found, []))[1].append(use)
    for found, blocked in met.values():
        yield _stopped(account, name, found, blocked)
    if unseen:
        shown = ", ".join(map(str, unseen))
        yield skip(CHECK, f"uid {os.geteuid()} may not look at {shown}", "run doctor as root")
    elif not met:
        yield ok(CHECK, f"{name}: {account.name} may use {len(uses)} files and directories")


def _stopped(account: Account, name: str, found: Obstacle, uses: list[Use]) -> Finding:
    who, quoted = f"{account.name}, the user of {name},", shlex.quote(str(found.place))
    own = [use for use in uses if _is_itself(use, found.place)]
    if not own:
        inside = ", ".join(dict.fromkeys(map(str, uses)))
        return fail(
            CHECK,
            f"{who} may not enter {found}, and the service uses what is behind it: {inside}",
            f"put it in another place, or, as root: chmod o+x {quoted}",
        )
    use = own[0]
    is_public = use.bits & SEARCH and not use.bits & WRITE  # a program, or a directory to be in
    mend = f"chmod o+{'r' * bool(use.bits & READ)}x" if is_public else f"chown {account.name}"
    seen = f"{who} may not {use.verb} {found}, {' and '.join(one.what for one in own)}"
    return fail(CHECK, seen, f"as root: {mend} {quoted}")


def _is_itself(use: Use, place: Path) -> bool:
    return use.path == place or use.path.resolve() == place


# -- what the service uses ---------------------------------------------------------------


def _uses(
    settings: Settings, unit: Mapping[str, str], given: StartCommand, words: list[str]
) -> Iterator[Use]:
    base = Path("/") / directory_of(unit)
    yield Use(what="the working directory", path=base, verb="enter")
    yield from _programs(words)
    if given.file is not None:
        yield Use(what="the settings file", path=base / given.file, verb="read")
    unknown = given.unknown(settings)
    for what, field in (("journal", "store_url"), ("queue", "transport_url")):
        url = getattr(settings, field)
        if field not in unknown and kind_of(url) is UrlKind.FILE:
            path = base / file_of(url)
            yield Use(what=f"the directory of the {what}", path=path.parent, verb="make files in")
            yield Use(what=f"the {what}", path=path, verb="write")
    if settings.admin_token_file and "admin_token_file" not in unknown:
        yield Use(what="the token file", path=base / settings.admin_token_file, verb="read")
    if "admin_tls" not in unknown:
        for file in files_of(settings.admin_tls or ""):
            yield Use(what="the TLS file", path=base / file, verb="read")


def directory_of(unit: Mapping[str, str]) -> str:
    """The unit's `WorkingDirectory=`; empty if there is none, or it is the user's home."""
    directory = unit.get("WorkingDirectory", "").removeprefix("-").removeprefix("!")
    return "" if directory == "~" else directory


def _programs(words: list[str]) -> Iterator[Use]:
    """The program, and its interpreter if it is a script."""
    program = Path(words[0]) if words else Path()
    if not program.is_absolute():
        return
    try:
        with program.open("rb") as file:
            first = file.readline(1000)
    except OSError:
        first = b""
    is_script = first.startswith(_SCRIPT)
    yield Use(what="the program", path=program, verb="read and start" if is_script else "start")
    named = first.removeprefix(_SCRIPT).split()[:1] if is_script else []
    for word in named:
        yield Use(what="the interpreter", path=Path(os.fsdecode(word)), verb="start")


def _is_made(use: Use, unit: Mapping[str, str]) -> bool:
    """Whether systemd will give it to the user at the next start.

    systemd creates the directory if it is missing. If the directory belongs to another user,
    systemd changes the owner of everything in it; if not, it leaves the contents unchanged.
    """
    for directive, above in _MADE.items():
        for word in unit.get(directive, "").split():
            made = Path(above) / word.partition(":")[0]
            if made == use.path or made in use.path.parents:
                return directive == "RuntimeDirectory" or not _belongs(made, unit)
    return False


def _belongs(place: Path, unit: Mapping[str, str]) -> bool:
    account = account_of(unit.get("User", ""))
    try:
        return account is not None and place.stat().st_uid == account.uid
    except OSError:
        return False


# -- homes -------------------------------------------------------------------------------


def _check_home(unit: Mapping[str, str], name: str, uses: list[Use]) -> Iterator[Finding]:
    """Report files that `ProtectHome=` hides from the service, whatever its user's permissions."""
    value = unit.get("ProtectHome", "").lower()
    opened = _paths(unit, "BindPaths", "BindReadOnlyPaths")
    if value == "read-only":
        uses = [use for use in uses if use.bits & WRITE]
        opened = _paths(unit, "BindPaths", "ReadWritePaths")
    elif value != "tmpfs" and not _is_true(value):
        return
    lost = [use for use in uses if _is_in_home(use.path) and not _is_below(use.path, opened)]
    if not lost:
        return
    does = "must write" if value == "read-only" else "uses"
    shown = ", ".join(dict.fromkeys(map(str, lost)))
    mend = (
        "name its directory in ReadWritePaths=" if value == "read-only" else "set it to read-only"
    )
    yield fail(
        "ProtectHome",
        f"{name}: ProtectHome={value}, and the service {does} {shown}",
        f"put it outside of {', '.join(HOMES)}, or {mend}",
    )


def _is_true(text: str) -> bool:
    try:
        return parse_truth(text)
    except ConfigError:
        return False


def _paths(unit: Mapping[str, str], *directives: str) -> list[Path]:
    words = [word for one in directives for word in unit.get(one, "").split()]
    # Entries may be `source:destination`, and have prefixes for missing paths.
    return [Path(word.lstrip("-+").partition(":")[0]) for word in words]


def _is_in_home(path: Path) -> bool:
    return _is_below(path, map(Path, HOMES)) or _is_below(path.resolve(), map(Path, HOMES))


def _is_below(path: Path, places: Iterable[Path]) -> bool:
    return any(place == path or place in path.parents for place in places)
