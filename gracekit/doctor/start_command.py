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
from gracekit.config.settings import BY_VARIABLE, SETTINGS, Settings, option_name
from gracekit.config.values import PREFIX, format_duration
from gracekit.doctor.finding import Finding, fail, ok

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
        hidden_variables: Variables with values that are not known here, as in a Secret.
        open_sources: Sources that may set any variable, such as an `EnvironmentFile=` that
            cannot be read here.
    """

    flags: Mapping[str, object]
    variables: Mapping[str, str]
    file: Path | None
    hidden_variables: frozenset[str] = frozenset()
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
        return [*sorted(self.hidden_variables), *self._open()]

    def load(self, settings: Settings) -> Settings:
        """The settings that such a run would have, as far as they are not hidden.

        Args:
            settings: The settings given to doctor: they have the service's defaults.

        Raises:
            ConfigError: a start with them would be refused.
        """
        file = None if self.has_hidden_file else self.file
        return load(self.flags, self.variables, file, defaults=settings.service_defaults)

    def unknown(self, settings: Settings) -> frozenset[str]:
        """The settings whose values are hidden.

        Args:
            settings: As returned by `load`.
        """
        unset = frozenset(name for name in SETTINGS if settings.origin(name) in UNSET)
        named = {BY_VARIABLE[one] for one in self.hidden_variables if one in BY_VARIABLE}
        return unset if self._open() else unset & named

    def _open(self) -> list[str]:
        file = [f"the settings file {self.file}"] if self.has_hidden_file else []
        config = {f"{PREFIX}CONFIG"} & self.hidden_variables
        return [*self.open_sources, *file, *config]


def given_by(
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: str = "",
    *,
    hidden_variables: frozenset[str] = frozenset(),
    open_sources: Sequence[str] = (),
) -> StartCommand:
    """Read the settings from a command line and its environment.

    Args:
        words: The command line. Only options after `gracekit run` count, as other programs have
            options of the same names.
        environment: Of the command.
        directory: Working directory of the command.
        hidden_variables: Variables with values that are not known here.
        open_sources: Sources that may set any variable.
    """
    flags = dict(_options(_words_of_run(words)))
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    file = flags.pop("config", None) or ours.pop(f"{PREFIX}CONFIG", None)
    return StartCommand(
        flags=flags,
        variables=ours,
        file=Path(directory) / str(file) if file is not None else None,
        hidden_variables=frozenset(n for n in hidden_variables if n.startswith(PREFIX)),
        open_sources=open_sources,
    )


def _words_of_run(words: Sequence[str]) -> list[str]:
    """The words after `gracekit run`, also inside a shell's command; empty if it is missing."""
    flat = _flat(words)
    for index, (program, command) in enumerate(itertools.pairwise(flat)):
        if Path(program).name == "gracekit" and command == "run":
            return flat[index + 2 :]
    return []


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
