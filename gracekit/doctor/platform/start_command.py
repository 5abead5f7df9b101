"""The settings that a unit or manifest gives to `gracekit run`, by options, variables and file."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from gracekit.config.loading import load
from gracekit.config.settings import BY_VARIABLE, SETTINGS, Settings, option_name, variable_name
from gracekit.config.values import PREFIX
from gracekit.doctor.finding import Finding, warn

_FIELDS: Final = MappingProxyType(
    {option_name(f.name): f for f in fields(Settings) if f.metadata["parse"]}
)
UNSET: Final = frozenset({"default", "service"})  # origins
_SHORT: Final = MappingProxyType({"store": "store_url", "transport": "transport_url"})


class StartCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in a command and its environment.

    Attributes:
        flags: Settings by option, without `--config`.
        variables: Variables of gracekit.
        file: The settings file; None for none.
        target: MODULE[:ATTR] of the service; empty if it does not start one by `gracekit run`.
        sources: Variables with hidden values, each with its source: `Secret images`.
        open_sources: Sources that may set any variable, such as an `EnvironmentFile=` that
            cannot be read here.
    """

    flags: Mapping[str, object]
    variables: Mapping[str, str]
    file: Path | None
    target: str = ""
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    open_sources: Sequence[str] = ()

    @property
    def says(self) -> list[str]:
        """The options, variables and file that are given, as written."""
        options = [f"--{name.replace('_', '-')}" for name in self.flags]
        file = [] if self.file is None else [f"--config {self.file}"]
        return [*options, *sorted(self.variables), *file]

    @property
    def has_hidden_file(self) -> bool:
        """Whether the settings file does not exist here; it may be on another machine."""
        return self.file is not None and not self.file.is_file()

    @property
    def hidden(self) -> list[str]:
        """All sources of settings that cannot be read here."""
        named = sorted(set(self.sources.values()))
        return [*named, *(source for source in self._open() if source not in named)]

    def load(self, settings: Settings) -> Settings:
        """The settings that such a run would have.

        Args:
            settings: The settings given to doctor: they have the service's defaults, and values
                that the operator gave for hidden settings.

        Raises:
            ConfigError: a start with them would be refused.
        """
        file = None if self.has_hidden_file else self.file
        variables = {**self.variables, **self._replaced(settings)}
        return load(self.flags, variables, file, defaults=settings.service_defaults)

    def unknown(self, settings: Settings) -> dict[str, str]:
        """The settings whose values are hidden, each with the source.

        Args:
            settings: As returned by `load`.
        """
        unset = {name for name in SETTINGS if settings.origin(name) in UNSET}
        found = dict.fromkeys(unset, " or ".join(self._open())) if self._open() else {}
        named = {BY_VARIABLE[one]: said for one, said in self.sources.items() if one in BY_VARIABLE}
        return found | {name: said for name, said in named.items() if name in unset}

    def _replaced(self, settings: Settings) -> dict[str, str]:
        """Variables for hidden settings, with the values that the operator gave."""
        found = {}
        for name, (_, shown, origin) in zip(SETTINGS, settings.describe(), strict=True):
            variable = variable_name(name)
            is_hidden = variable in self.sources or (
                self._open() and variable not in self.variables
            )
            # Not kill_after: the operator's own platform may have another.
            if is_hidden and origin not in UNSET and name != "kill_after_s":
                is_url = name.endswith("_url")  # shown without its password
                found[variable] = str(getattr(settings, name)) if is_url else shown
        return found

    def _open(self) -> list[str]:
        config = f"{PREFIX}CONFIG"
        file = [f"the settings file {self.file}"] if self.has_hidden_file else []
        file += [self.sources[config]] if config in self.sources else []
        return [*self.open_sources, *file]


def given_by(
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: str = "",
    *,
    sources: Mapping[str, str] = MappingProxyType({}),
    open_sources: Sequence[str] = (),
) -> StartCommand:
    """Read the settings from a command line and its environment.

    Args:
        words: The command line. Only options after `gracekit run` count, as other programs have
            options of the same names.
        environment: Of the command.
        directory: Working directory of the command.
        sources: Variables with hidden values, each with its source.
        open_sources: Sources that may set any variable.
    """
    of_run = _words_of_run(words)
    flags = dict(_options(of_run))
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    file = flags.pop("config", None) or ours.pop(f"{PREFIX}CONFIG", None)
    return StartCommand(
        flags=flags,
        variables=ours,
        file=Path(directory) / str(file) if file is not None else None,
        target=_target(of_run, environment),
        sources={name: said for name, said in sources.items() if name.startswith(PREFIX)},
        open_sources=open_sources,
    )


def _words_of_run(words: Sequence[str]) -> list[str]:
    """The words after `gracekit run`, also inside a shell's command; empty if it is missing."""
    flat = [part for word in words for part in (_split(word) if " " in word else [word])]
    for index, (program, command) in enumerate(itertools.pairwise(flat)):
        if Path(program).name == "gracekit" and command == "run":
            return flat[index + 2 :]
    return []


def _target(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """MODULE[:ATTR] among the words after `gracekit run`; empty if there are none."""
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            return word
        name = word.removeprefix("--").replace("-", "_")
        name = _SHORT.get(name, name)
        is_value = not is_value and (
            name in {"config", "app_dir"} or (name in _FIELDS and _FIELDS[name].type != "bool")
        )
    return environment.get(f"{PREFIX}APP", "") if words else ""


def check_target(given: StartCommand, target: str, where: str) -> Iterator[Finding]:
    """Warn if *where* starts another service than *target*; either may be empty.

    Args:
        given: Of the unit, manifest or Dockerfile.
        target: MODULE[:ATTR] that doctor was given.
        where: The unit, container or file.
    """
    ours, theirs = target.partition(":"), given.target.partition(":")
    is_other = ours[0] != theirs[0] or (ours[2] != theirs[2] and ours[2] and theirs[2])
    if target and given.target and is_other:
        seen = f"{where} starts {given.target}, and doctor was given {target}"
        yield warn("service", seen, "correct the name there, or run doctor with that service")


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
