"""The data for deploying a service on any platform: name, command, timeouts and settings.

`Plan` is the only place that computes the timeouts from the settings. So a unit and a manifest of
one service agree, and `gracekit doctor` has no complaint about either.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from gracekit.config.admin import AdminAddress, admin_address, files_of
from gracekit.config.settings import (
    SETTINGS,
    Settings,
    hard_limit_sum,
    last_breath_s,
    platform_stop_s,
    variable_name,
)
from gracekit.config.urls import UrlKind, file_of, file_url, holds_password, kind_of, shown_url
from gracekit.config.values import PREFIX, format_duration
from gracekit.errors import ConfigError
from gracekit.store.place import RUN_DIRECTORY

WATCHDOG_S: Final = 30
"""Seconds of a blocked event loop after which the platform restarts the service."""
START_MARGIN_S: Final = 30
"""Seconds that a start gets in addition to its hooks: for store, broker and recovery."""
RESTART_S: Final = 3
"""Seconds before a restart, as systemd gives up after five starts in ten seconds."""
WIDTH: Final = 96
"""Columns of a comment."""
NUMBERS: Final = "Where the numbers come from; print this again when a setting changes:"
LONGEST_NAME: Final = 31
"""The limit of Linux user names; StatefulSets may have 52 characters, and labels 63."""

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_APART: Final = re.compile(r"[^a-z0-9]+")
_OWN_LINE: Final = frozenset(
    {
        *("transport_url", "store_url", "run_directory", "kill_after_s"),
        *("admin", "admin_token_file", "admin_tls"),
    }
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One service to deploy.

    Attributes:
        name: The name of the unit, the user and the objects: a DNS label.
        target: `module:attr`, as `gracekit run` takes it.
        topic: Of the service.
        factory: Whether the attribute is a function that returns the Service.
        app_dir: Directory of the module on this machine.
        settings: The settings that a run would have.
        start_hooks: How many `on_start` hooks it has.
        config: The settings file, if there is one.
    """

    name: str
    topic: str
    target: str
    factory: bool
    app_dir: Path
    settings: Settings
    start_hooks: int
    config: Path | None = None

    # -- times, in seconds -------------------------------------------------------------

    @property
    def stop_s(self) -> int:
        """From the platform's SIGTERM to its SIGKILL; at least 1 s above the kernel's alarm."""
        return max(platform_stop_s(self.settings), math.ceil(self.settings.kill_after_s or 0))

    @property
    def start_s(self) -> int:
        """The platform's timeout for a start that does not ask for more time."""
        hooks_s = self.settings.start_timeout_s * max(1, self.start_hooks)
        return math.ceil(hooks_s) + START_MARGIN_S

    def reasons(self, stop_name: str, start_name: str) -> list[str]:
        """The origins of the numbers, one sentence for each.

        Args:
            stop_name: The platform's name for `stop_s`.
            start_name: The platform's name for `start_s`.
        """
        alarm = format_duration(last_breath_s(self.settings))
        each = format_duration(self.settings.start_timeout_s)
        count = self.start_hooks
        hooks = f"each of {count} on_start hooks" if count > 1 else "on_start"
        limit = f"Hard limit: {hard_limit_sum(self.settings)}."
        begin = f"{start_name} = {self.start_s}: start_timeout {each} for {hooks}, and"
        return [
            f"{limit} The kernel ends a process that hangs at {alarm}.",
            f"{stop_name} = {self.stop_s}: at least 1 s above that, rounded up.",
            f"{PREFIX}KILL_AFTER = {self.stop_s}: the same number, so that each start checks it.",
            f"{begin} {START_MARGIN_S} s for store, broker and what earlier runs left.",
        ]

    # -- settings ----------------------------------------------------------------------

    def given(self, *, with_file: bool) -> dict[str, str]:
        """Variables for settings that were set, without URLs, `admin`, its files and `kill_after`.

        Args:
            with_file: Whether to include values of the settings file; needed if the deployed run
                will not read that file.
        """
        found = {}
        for field, (_, value, origin) in zip(SETTINGS, self.settings.describe(), strict=True):
            is_unset = getattr(self.settings, field) is None
            is_set = not is_unset and origin not in {"default", "service"}
            if is_set and field not in _OWN_LINE and (with_file or not _is_file(origin)):
                found[variable_name(field)] = value
        return found

    def host_files(self, *, with_file: bool) -> dict[str, tuple[Path, ...]]:
        """Variables for the secrets of the HTTP endpoint, with their files on this machine.

        A relative path from a flag or a variable is relative to this process's working directory;
        one from a settings file, to the application's directory.

        Args:
            with_file: Whether to include files that a settings file names.
        """
        settings = self.settings
        named = {
            "admin_token_file": (settings.admin_token_file,) * bool(settings.admin_token_file),
            "admin_tls": files_of(settings.admin_tls or ""),
        }
        found = {}
        for field, names in named.items():
            is_in_file = _is_file(settings.origin(field))
            base = self.app_dir if is_in_file else Path.cwd()
            if names and (with_file or not is_in_file):
                found[variable_name(field)] = tuple(base / (name or "") for name in names)
        return found

    def files(self, directory: str) -> dict[str, str]:
        """Variables for the store and the queue, if they are files.

        Relative paths are put into *directory*.
        """
        return {
            variable_name(field): file_url(_inside(directory, file_of(url)))
            for field, url in self._urls()
            if kind_of(url) is UrlKind.FILE
        }

    def runs(self, directory: str) -> dict[str, str]:
        """The variable for the run directory, if it is not beside the store.

        A relative path is put into *directory*.
        """
        named = self.settings.run_directory or (RUN_DIRECTORY if self.has_server else "")
        place = str(_inside(directory, Path(named)))
        return {variable_name("run_directory"): place} if named else {}

    def runs_inside(self, directory: str) -> dict[str, str]:
        """As `runs`, but an absolute path outside *directory* is moved into it."""
        found = self.runs(directory).items()
        return {name: str(_moved(directory, PurePosixPath(path))) for name, path in found}

    def files_inside(self, directory: str) -> dict[str, str]:
        """As `files`, but absolute paths outside *directory* are moved into it, keeping the name.

        Raises:
            ConfigError: store and queue would be the same file.
        """
        found = {
            variable: file_url(_moved(directory, PurePosixPath(file_of(url))))
            for variable, url in self.files(directory).items()
        }
        if len(set(found.values())) < len(found):
            names = " and ".join(found)
            raise ConfigError(
                f"{names} would both be {file_of(*set(found.values()))}: a container keeps files "
                f"in {directory} by their names, so give them different ones"
            )
        return found

    def other_urls(self) -> dict[str, str]:
        """Variables for URLs that name no file and hold no password."""
        return {
            variable_name(field): url
            for field, url in self._urls()
            if kind_of(url) is not UrlKind.FILE and not holds_password(url)
        }

    def secret(self) -> dict[str, str]:
        """Variables for URLs with a password, each with its URL as it may be shown.

        Raises:
            ConfigError: a URL has control characters.
        """
        return {
            variable_name(field): printable(shown_url(url), "a comment")
            for field, url in self._urls()
            if holds_password(url)
        }

    def comes_from_file(self, variable: str) -> bool:
        """Whether the URL of *variable* comes from the settings file."""
        field = variable.removeprefix(PREFIX).lower()
        return self.config is not None and _is_file(self.settings.origin(field))

    @property
    def has_files(self) -> bool:
        """Whether store or queue are files, which must outlive the process."""
        return any(kind_of(url) is UrlKind.FILE for _, url in self._urls())

    @property
    def has_server(self) -> bool:
        """Whether the store is on a server of its own."""
        return kind_of(self.settings.store_url) is UrlKind.DATABASE

    @property
    def keeps_files(self) -> bool:
        """Whether files must outlive the process: store, queue, or the locks of runs."""
        return self.has_files or self.has_server

    @property
    def has_door(self) -> bool:
        """Whether runs have a door, which `gracekit health` asks."""
        return kind_of(self.settings.store_url) is not UrlKind.MEMORY

    @property
    def admin(self) -> AdminAddress | None:
        """The address of its HTTP endpoint; None if it is off."""
        return admin_address(self.settings.admin)

    def _urls(self) -> tuple[tuple[str, str], ...]:
        settings = self.settings
        return (("transport_url", settings.transport_url), ("store_url", settings.store_url))


def name_for(topic: str, given: str | None) -> str:
    """The name for user, unit and objects: *given*, or made from *topic*.

    Raises:
        ConfigError: it is no DNS label, or too long for a user.
    """
    name = _APART.sub("-", topic.lower()).strip("-") if given is None else given
    if _NAME.fullmatch(name) and len(name) <= LONGEST_NAME:
        return name
    whose = f"--name {given!r}" if given is not None else f"{name!r}, made of the topic {topic!r},"
    raise ConfigError(
        f"{whose} is no name for a user, a unit and objects of Kubernetes: write 1 to "
        f"{LONGEST_NAME} of a-z, 0-9 and -, with a letter first and no - at the end; give another "
        "one by --name"
    )


def commented(head: str, reasons: Iterable[str]) -> Iterator[str]:
    """Comment lines, with `#`: *head*, and each of *reasons* as a paragraph."""
    yield f"# {head}"
    for reason in reasons:
        yield from textwrap.wrap(
            reason,
            WIDTH,
            initial_indent="# - ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def printable(text: str, where: str) -> str:
    """*text*, checked: a line break in it could add a directive or a key.

    Raises:
        ConfigError: it has control characters.
    """
    if not text.isprintable():
        raise ConfigError(f"{text!r} has characters that cannot stand in {where}")
    return text


def _is_file(origin: str) -> bool:
    """Whether *origin*, from `Settings.origin`, is a settings file."""
    return not origin.startswith(("flag ", PREFIX)) and origin not in {"default", "service"}


def _inside(directory: str, path: Path) -> PurePosixPath:
    """*path* if it is absolute, otherwise a file in *directory*."""
    place = PurePosixPath(path)
    return place if place.is_absolute() else PurePosixPath(directory) / "-".join(place.parts)


def _moved(directory: str, path: PurePosixPath) -> PurePosixPath:
    """*path* if it is below *directory*, otherwise the file of that name in *directory*."""
    is_below = path.is_relative_to(directory) and ".." not in path.parts
    return path if is_below else PurePosixPath(directory) / path.name
