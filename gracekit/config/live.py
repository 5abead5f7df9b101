"""The settings of one run, a few of which may change while it lives.

`LiveSettings` is their one owner. Code that needs such a value reads `now` each time it uses it;
code that has to act upon a change registers by `on_change`. Every other setting stays what it was
at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gracekit.config.settings import SETTINGS, Settings, option_name
from gracekit.errors import ConfigError

CHANGEABLE: Final = (
    "drain_timeout_s",
    "max_running",
    "progress_every_s",
    "log_format",
    "log_level",
)

OnChange = Callable[[Settings, Settings], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting whose value has changed where it is read from.

    Attributes:
        name: As in flags and files.
        before: The present value, as an operator writes it; a URL is shown without its login.
        after: The new value, shown in the same way.
        is_changeable: Whether it may change while the run lives.
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
        read: Reads them again from where they came from, in a thread; None if they cannot be.
        file: The file that *read* reads, if there is one.

    Attributes:
        now: The present settings. `take` replaces them as a whole; any thread may read them.
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
        """Have *step* called on the loop with the settings before and after each change."""
        self._on_change.append(step)

    def differences(self, found: Settings) -> list[Difference]:
        """The settings that differ between `now` and *found*."""
        return list(_differences(self.now, found))

    def take(self, found: Settings) -> None:
        """Take the values of *found* for the settings that may change.

        Raises:
            ConfigError: they do not fit the settings that stay; nothing has changed.
        """
        before = self.now
        values = {name: getattr(found, name) for name in CHANGEABLE}
        origins = {name: where for name, where in before.origins.items() if name not in values}
        origins |= {name: where for name, where in found.origins.items() if name in values}
        try:
            self.now = replace(before, **values, origins=MappingProxyType(origins))
        except ConfigError as error:
            raise ConfigError(f"with the settings that need a restart, {error}") from error
        for step in self._on_change:
            step(before, self.now)


def _differences(now: Settings, found: Settings) -> Iterator[Difference]:
    before = {name: shown for name, shown, _ in now.describe()}
    after = {name: shown for name, shown, _ in found.describe()}
    for field in SETTINGS:
        # Compare the values, not what is shown: two passwords are shown alike.
        if getattr(now, field) != getattr(found, field):
            name = option_name(field)
            yield Difference(
                name=name,
                before=before[name],
                after=after[name],
                is_changeable=field in CHANGEABLE,
            )
