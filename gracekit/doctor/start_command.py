"""The command of a unit, a pod or an image: the settings it gives, a shell in it, uvicorn.

If `sh -c "program ..."` is the direct child of the platform, the shell does not pass SIGTERM on:
the service never gets it, and is killed at the end of the grace period. uvicorn keeps the signals
of its process. At SIGTERM it waits for the HTTP requests that it answers, and only then ends the
lifespan of the application, in which the service drains.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

import msgspec

from gracekit.config.loading import load
from gracekit.config.settings import BY_VARIABLE, SETTINGS, Settings, option_name, variable_name
from gracekit.config.values import PREFIX, format_duration
from gracekit.doctor.finding import Finding, fail, ok, warn

_FIELDS: Final = MappingProxyType(
    {option_name(f.name): f for f in fields(Settings) if f.metadata["parse"]}
)
UNSET: Final = frozenset({"default", "service"})  # origins
_SHORT: Final = MappingProxyType({"store": "store_url", "transport": "transport_url"})
SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_WAIT: Final = "--timeout-graceful-shutdown"
_WAIT_BY_ENV: Final = "UVICORN_TIMEOUT_GRACEFUL_SHUTDOWN"
_BEFORE: Final = frozenset({"-m", "env", "exec", "run"})
"""Words before the name of a program that another one starts, as in `python -m uvicorn`."""


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
    flat = _flat(words)
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
        given: Of the unit or manifest.
        target: MODULE[:ATTR] that doctor was given.
        where: The unit, container or file.
    """
    ours, theirs = target.partition(":"), given.target.partition(":")
    is_other = ours[0] != theirs[0] or (ours[2] != theirs[2] and ours[2] and theirs[2])
    if target and given.target and is_other:
        seen = f"{where} starts {given.target}, and doctor was given {target}"
        yield warn("service", seen, "correct the name there, or run doctor with that service")


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


def split(text: str) -> list[str]:
    """The words of a command, as a shell reads them."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _flat(words: Sequence[str]) -> list[str]:
    """The words, with those of a shell's command one by one."""
    return [part for word in words for part in (split(word) if " " in word else [word])]


# -- a shell in between ---------------------------------------------------------------


def is_shell(words: Sequence[str]) -> bool:
    """Whether a command line begins with a shell's name, or a login shell's, as in `-bash`."""
    return bool(words) and PurePosixPath(words[0].lstrip("-")).name in SHELLS


def is_interactive(words: Sequence[str]) -> bool:
    """Whether *words* are a shell without a command and without a script."""
    return is_shell(words) and _operands(words) == (None, [])


def hides_signals(words: Sequence[str]) -> bool:
    """Whether *words* are a shell with `-c` whose last command is not an `exec`.

    With `sh -c "exec program"` the program replaces the shell. Some shells also do so
    for a single command without exec, but that is not relied on.
    """
    if not is_shell(words):
        return False
    command, _ = _operands(words)
    return command is not None and not _ends_in_exec(command)


def _operands(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command of `-c`; or None, and the script with its arguments."""
    rest, has_command = list(words[1:]), False
    while rest and rest[0][:1] in {"-", "+"} and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        if not option.startswith("--"):
            has_command = has_command or "c" in option
            if option.endswith("o"):  # `-o pipefail`, `-euo pipefail`
                rest = rest[1:]
    return (" ".join(rest), []) if has_command else (None, rest)


def _ends_in_exec(command: str) -> bool:
    command = command.strip().strip("'\"")
    last = command.replace("&&", ";").replace("\n", ";").split(";")[-1]
    return split(last)[:1] == ["exec"]


# -- uvicorn ------------------------------------------------------------------------


def check_wait(
    words: Sequence[str], environment: Mapping[str, str], where: str, *, check: str = "uvicorn"
) -> Iterator[Finding]:
    """Check that uvicorn, if the command starts it, waits a limited time for HTTP requests.

    Args:
        words: The command line.
        environment: The variables that are known of it.
        where: The unit, container or file.
        check: Name of the finding.
    """
    if not _is_uvicorn(words):
        return
    wait_s = _limit_s(words, environment)
    if wait_s is not None:
        shown = format_duration(wait_s)
        yield ok(check, f"{where}: it waits at most {shown} for HTTP requests before the drain")
    else:
        yield fail(
            check,
            f"{where} starts uvicorn without {_WAIT}: it waits for HTTP requests that are being "
            "answered, by default for ever, before the drain begins",
            f"add {_WAIT} 3, and its seconds to the platform's limit",
        )


def waits_s(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds for which uvicorn waits before the drain; 0 for no uvicorn, or for no limit."""
    return (_limit_s(words, environment) or 0.0) if _is_uvicorn(words) else 0.0


def _limit_s(words: Sequence[str], environment: Mapping[str, str]) -> float | None:
    value, flat = environment.get(_WAIT_BY_ENV, ""), _flat(words)
    for index, word in enumerate(flat):
        name, equals, rest = word.partition("=")
        if name == _WAIT:
            value = rest if equals else "".join(flat[index + 1 : index + 2])
    return float(value) if value.isdecimal() else None


def _is_uvicorn(words: Sequence[str]) -> bool:
    names = [PurePosixPath(word).name for word in _flat(words)]
    return any(
        word == "uvicorn" and (index == 0 or names[index - 1] in _BEFORE)
        for index, word in enumerate(names)
    )
