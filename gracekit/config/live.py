"""The settings of one run, a few of which may change while it runs.

Only `LiveSettings` changes them. Code that uses such a value reads `now` each time; code that must
act on a change registers with `on_change`. All other settings keep their values from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from gracekit.config.settings import SETTINGS, Settings, option_name
from gracekit.errors import ConfigError

CHANGEABLE: Final = (
    "drain_timeout_s",
    "max_running",
    "progress_every_s",
    "log_format",
    "log_level",
)

AT_THE_START: Final = ", as it was at the start"
OnChange = Callable[[Settings, Settings], None]


class Difference(NamedTuple):
    """One setting whose value in the file, environment or flags differs from the present one.

    Attributes:
        name: Its name in flags and files.
        before: The present value, as an operator writes it; a URL is shown without its login.
        after: The new value, in the same form.
        is_changeable: Whether it may change during the run.
    """

    name: str
    before: str
    after: str
    is_changeable: bool

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


class LiveSettings:
    """The settings of one run, as they are now.

    Args:
        settings: The settings at the start.
        read: Reads all settings again from their sources, in a thread; None if that is not
            possible.
        file: The file that *read* reads, if any.

    Attributes:
        now: The present settings, an immutable object that `take` replaces; any thread may read
            it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        read: Callable[[], Settings] | None = None,
        file: Path | None = None,
    ) -> None:
        self.now = settings
        self.read = read
        self.file = file
        self._on_change: list[OnChange] = []

    def on_change(self, step: OnChange) -> None:
        """Call *step* on the loop with the settings before and after each change."""
        self._on_change.append(step)

    def differences(self, found: Settings) -> list[Difference]:
        """The settings that differ between `now` and *found*."""
        return list(_differences(self.now, found))

    def take(self, found: Settings) -> None:
        """Apply those values of *found* whose settings may change.

        Raises:
            ConfigError: they conflict with the other settings; nothing was changed.
        """
        before = self.now
        values = {name: getattr(found, name) for name in CHANGEABLE}
        kept = {name for name in SETTINGS if name not in values and _differs(before, found, name)}
        origins = {name: where for name, where in found.origins.items() if name not in kept}
        origins |= {name: _at_the_start(before.origin(name)) for name in kept}
        try:
            self.now = replace(before, **values, origins=MappingProxyType(origins))
        except ConfigError as error:
            raise ConfigError(f"with the settings that need a restart, {error}") from error
        for step in self._on_change:
            step(before, self.now)


def _at_the_start(origin: str) -> str:
    """The place of a value that was read there once, and is another one there now."""
    known = origin == "default" or origin.endswith(AT_THE_START)
    return origin if known else f"{origin}{AT_THE_START}"


def _differs(now: Settings, found: Settings, field: str) -> bool:
    # Compare the values, not the shown texts: two passwords look alike there.
    return bool(getattr(now, field) != getattr(found, field))


def _differences(now: Settings, found: Settings) -> Iterator[Difference]:
    before = {name: shown for name, shown, _ in now.describe()}
    after = {name: shown for name, shown, _ in found.describe()}
    for field in SETTINGS:
        if _differs(now, found, field):
            name = option_name(field)
            yield Difference(
                name=name,
                before=before[name],
                after=after[name],
                is_changeable=field in CHANGEABLE,
            )
