"""What every platform has to know of a service: its name, its command, its times, its settings.

The times follow from the settings in one place, `Plan`, so that a unit and a manifest of one
service agree, and `gracekit doctor` finds nothing in either.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from gracekit.config.admin import AdminAddress, admin_address
from gracekit.config.settings import SETTINGS, Settings, hard_limit_sum, variable_name
from gracekit.config.urls import UrlKind, file_of, file_url, holds_password, kind_of, shown_url
from gracekit.config.values import PREFIX, format_duration
from gracekit.doctor.configuration import last_breath_s
from gracekit.errors import ConfigError

WATCHDOG_S: Final = 30
"""An event loop that did not turn for so long is stuck: the platform starts the service again."""
START_MARGIN_S: Final = 30
"""Beside its hooks a start opens store and broker, and takes over what dead runs left."""
RESTART_S: Final = 3
"""Pause before a restart: systemd gives a service up that starts five times in ten seconds."""
WIDTH: Final = 96
"""Columns of a comment."""
NUMBERS: Final = "Which number follows from which; print this again when a setting changes:"
LONGEST_NAME: Final = 31
"""Of a Linux user; a StatefulSet's name may have 52 characters, and its label is cut at 63."""

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_APART: Final = re.compile(r"[^a-z0-9]+")
_OWN_LINE: Final = frozenset({"transport_url", "store_url", "kill_after_s", "admin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One service as it is to be deployed.

    Attributes:
        name: Of the unit, the user, the objects: a DNS label.
        target: `module:attr`, as `gracekit run` takes it.
        factory: Whether the attribute is called for the Service.
        app_dir: Where the module is, on this machine.
        settings: As a run of it would have them.
        start_hooks: How many `on_start` hooks it has.
        config: The settings file, if there is one.
    """

    name: str
    target: str
    factory: bool
    app_dir: Path
    settings: Settings
    start_hooks: int
    config: Path | None = None

    # -- times, in seconds -------------------------------------------------------------

    @property
    def stop_s(self) -> int:
        """From the platform's SIGTERM to its SIGKILL: above the kernel's alarm, by one second."""
        needed = math.ceil(last_breath_s(self.settings) + 1)
        return max(needed, math.ceil(self.settings.kill_after_s or 0))

    @property
    def start_s(self) -> int:
        """Until a start counts as failed, if it does not ask for more."""
        hooks_s = self.settings.start_timeout_s * max(1, self.start_hooks)
        return math.ceil(hooks_s) + START_MARGIN_S

    def reasons(self, stop_name: str, start_name: str) -> list[str]:
        """Which number follows from which, a sentence each.

        Args:
            stop_name: How the platform calls `stop_s`.
            start_name: How it calls `start_s`.
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
        """Variables for what was set by hand, without URLs, `admin` and `kill_after`.

        Args:
            with_file: Whether a settings file counts, because a run will not have it.
        """
        found = {}
        for field, (_, value, origin) in zip(SETTINGS, self.settings.describe(), strict=True):
            is_set = value != "unset" and origin not in {"default", "service"}
            if is_set and field not in _OWN_LINE and (with_file or not _is_file(origin)):
                found[variable_name(field)] = value
        return found

    def files(self, directory: str) -> dict[str, str]:
        """Variables for the store and the queue where these are files, and both in *directory*.

        Absolute paths stay where they are.
        """
        return {
            variable_name(field): file_url(_inside(directory, file_of(url)))
            for field, url in self._urls()
            if kind_of(url) is UrlKind.FILE
        }

    def other_urls(self) -> dict[str, str]:
        """Variables for URLs that name no file and are not the default; without those in `secret`.

        A store in memory is one of them.
        """
        return {
            variable_name(field): url
            for field, url in self._urls()
            if kind_of(url) is not UrlKind.FILE and not holds_password(url)
        }

    def secret(self) -> dict[str, str]:
        """Variables whose values hold a password, with what may be shown of these."""
        return {
            variable_name(field): shown_url(url)
            for field, url in self._urls()
            if holds_password(url)
        }

    def comes_from_file(self, variable: str) -> bool:
        """Whether the settings file says that URL."""
        field = variable.removeprefix(PREFIX).lower()
        return self.config is not None and _is_file(self.settings.origin(field))

    @property
    def has_files(self) -> bool:
        """Whether store or queue are files, which must outlive the process."""
        return any(kind_of(url) is UrlKind.FILE for _, url in self._urls())

    @property
    def has_door(self) -> bool:
        """Whether `gracekit health` finds a run: its door is beside the file of its store."""
        return kind_of(self.settings.store_url) is UrlKind.FILE

    @property
    def admin(self) -> AdminAddress | None:
        """Where its HTTP endpoint listens; None for nowhere."""
        return admin_address(self.settings.admin)

    def _urls(self) -> tuple[tuple[str, str], ...]:
        settings = self.settings
        return (("transport_url", settings.transport_url), ("store_url", settings.store_url))


def name_for(topic: str, given: str | None) -> str:
    """The name that user, unit and objects get: *given*, or made from *topic*.

    Raises:
        ConfigError: it is no DNS label, or too long for a user.
    """
    name = _APART.sub("-", topic.lower()).strip("-") if given is None else given
    if _NAME.fullmatch(name) and len(name) <= LONGEST_NAME:
        return name
    whose = f"--name {given!r}" if given is not None else f"the topic {topic!r} gives {name!r}, and"
    raise ConfigError(
        f"{whose} is no name for a user, a unit and objects of Kubernetes: 1 to {LONGEST_NAME} of "
        "a-z, 0-9 and -, first a letter, last none of -; give another one by --name"
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


def _is_file(origin: str) -> bool:
    """Whether `Settings.origin` names a line of a file."""
    return not origin.startswith(("flag ", PREFIX)) and origin not in {"default", "service"}


def _inside(directory: str, path: Path) -> PurePosixPath:
    """An absolute *path* itself; else a file in *directory*."""
    place = PurePosixPath(path)
    return place if place.is_absolute() else PurePosixPath(directory) / "-".join(place.parts)
