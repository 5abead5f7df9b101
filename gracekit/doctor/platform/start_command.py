"""The settings that a unit or manifest gives to `gracekit run`: by options, variables and file."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gracekit.config.loading import load
from gracekit.config.settings import Settings, option_name
from gracekit.config.values import PREFIX

_FIELDS: Final = MappingProxyType(
    {option_name(f.name): f for f in fields(Settings) if f.metadata["parse"]}
)
_SHORT: Final = MappingProxyType({"store": "store_url", "transport": "transport_url"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """What a command and its environment say.

    Attributes:
        flags: Settings by option, without `--config`.
        variables: Those of gracekit.
        file: The settings file; None for none.
    """

    flags: Mapping[str, object]
    variables: Mapping[str, str]
    file: Path | None

    @property
    def says(self) -> list[str]:
        """What is set, as it is written there."""
        options = [f"--{name.replace('_', '-')}" for name in self.flags]
        file = [] if self.file is None else [f"--config {self.file}"]
        return [*options, *sorted(self.variables), *file]

    @property
    def has_hidden_file(self) -> bool:
        """Whether a settings file is named that is not here: it may be on another machine."""
        return self.file is not None and not self.file.is_file()

    def load(self, defaults: Mapping[str, object]) -> Settings:
        """The settings of such a run, but for a hidden file.

        Args:
            defaults: Those of the service.

        Raises:
            ConfigError: a start would be refused.
        """
        file = None if self.has_hidden_file else self.file
        return load(self.flags, self.variables, file, defaults=defaults)


def given_by(
    words: Sequence[str], environment: Mapping[str, str], directory: str = ""
) -> StartCommand:
    """What *words*, a command line, and *environment* say.

    Args:
        words: Options count behind `gracekit run` alone, as other programs have such too.
        environment: Of the command.
        directory: Where the command runs.
    """
    flags = dict(_options(_words_of_run(words)))
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    file = flags.pop("config", None) or ours.pop(f"{PREFIX}CONFIG", None)
    return StartCommand(
        flags=flags, variables=ours, file=Path(directory) / str(file) if file is not None else None
    )


def _words_of_run(words: Sequence[str]) -> list[str]:
    """Those behind `gracekit run`, also inside the command of a shell; none if it is not there."""
    flat = [part for word in words for part in (_split(word) if " " in word else [word])]
    for index, (program, command) in enumerate(itertools.pairwise(flat)):
        if Path(program).name == "gracekit" and command == "run":
            return flat[index + 2 :]
    return []


def _split(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()


def _options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        written, equals, value = word[2:].partition("=")
        name = written.replace("-", "_")
        name = _SHORT.get(name, name)
        positive = name.removeprefix("no_")
        if positive in _FIELDS and _FIELDS[positive].type == "bool":
            yield positive, positive == name
        elif name in _FIELDS or name == "config":
            yield name, value if equals else (words[index + 1 : index + 2] or [""])[0]
