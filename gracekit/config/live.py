"""The settings of one run, a few of which may change while it lives.

`LiveSettings` is their one owner. Who needs such a value asks for `now` when it is used; who has to
act upon a change is told by `on_change`. Every other setting is what it was at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """One setting that reads otherwise than before.

    Attributes:
        name: As in flags and files.
        before: What it is, as an operator writes it.
        after: What it would be; None of a URL with a login is shown.
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
        settings: What it begins with.
        read: Reads them again from where they came from, in a thread; None where nothing does.

    Attributes:
        now: Replaced as a whole by `take`; may be read in any thread.
    """

    def __init__(self, settings: Settings, *, read: Callable[[], Settings] | None = None) -> None:
        self.now = settings
        self.read = read
        self._on_change: list[OnChange] = []

    def on_change(self, step: OnChange) -> None:
        """Have *step* called on the loop with the settings before and after each change."""
        self._on_change.append(step)

    def differences(self, found: Settings) -> list[Difference]:
        """What *found* says otherwise than `now`."""
        return list(_differences(self.now, found))

    def take(self, found: Settings) -> None:
        """Change what may change to what *found* says of it.

        Raises:
            ConfigError: that does not fit what stays as it is; nothing has changed.
        """
        before = self.now
        values = {name: getattr(found, name) for name in CHANGEABLE}
        origins = {name: where for name, where in before.origins.items() if name not in values}
        origins |= {name: where for name, where in found.origins.items() if name in values}
        try:
            self.now = replace(before, **values, origins=MappingProxyType(origins))
        except ConfigError as error:
            raise ConfigError(f"beside what only a restart changes, {error}") from error
        for step in self._on_change:
            step(before, self.now)


def _differences(now: Settings, found: Settings) -> Iterator[Difference]:
    before = {name: shown for name, shown, _ in now.describe()}
    after = {name: shown for name, shown, _ in found.describe()}
    for field in SETTINGS:
        # Not what is shown of it: two passwords are shown alike.
        if getattr(now, field) != getattr(found, field):
            name = option_name(field)
            yield Difference(
                name=name,
                before=before[name],
                after=after[name],
                is_changeable=field in CHANGEABLE,
            )
