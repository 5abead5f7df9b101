"""Reading settings: flags take precedence over environment, file and defaults, in this order."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gracekit.config.settings import (
    BY_OPTION,
    BY_VARIABLE,
    NOT_OURS,
    SETTINGS,
    Settings,
    option_name,
    problems_of,
    variable_name,
)
from gracekit.config.urls import holds_password
from gracekit.config.values import PREFIX, Problem, did_you_mean, nearest
from gracekit.errors import ConfigError

LOG_SETTINGS: Final = frozenset({"log_format", "log_level"})
LONGEST_FILE: Final = 1_000_000
"""Most characters of a settings file. A longer one is no settings file, or an endless device."""
_NEEDED_BEFORE: Final = LOG_SETTINGS | frozenset(
    {
        *("transport_url", "store_url", "host", "instance"),
        *("ops_topic", "exchange", "declare_profile"),
    }
)
"""Settings that the command line or the log needs before, or without, importing a service."""


class SettingsFile(NamedTuple):
    """The contents of a settings file.

    Attributes:
        file: Its path.
        text: Its text; empty if the file is refused.
        entries: The settings in it.
        is_pipe: Whether it is a pipe, which can be read only once.
        problem: Why the file is refused; empty if it is not.
    """

    file: Path
    text: str = ""
    entries: Mapping[str, Any] = MappingProxyType({})
    is_pipe: bool = False
    problem: str = ""


def read_settings_file(file: Path) -> SettingsFile:
    """Read *file*; problems are returned, not raised."""
    import tomllib  # noqa: PLC0415 - most processes read no file

    try:
        with file.open(encoding="utf-8") as opened:
            who = _who_may_write(opened.fileno(), file)
            is_pipe = stat.S_ISFIFO(os.fstat(opened.fileno()).st_mode)
            text = opened.read(LONGEST_FILE + 1)
        if len(text) > LONGEST_FILE:
            raise ValueError(f"it has more than {LONGEST_FILE:,} characters")  # noqa: TRY301
        entries = tomllib.loads(text)
    except OSError as error:
        return SettingsFile(
            file=file,
            problem=f"cannot read the settings in {file}: {error.strerror or error}; name a file "
            "that this user may read",
        )
    except ValueError as error:
        return SettingsFile(
            file=file,
            problem=f"cannot read the settings in {file}: {error}; it must be TOML: write one "
            '`name = "value"` a line',
        )
    if who:
        return SettingsFile(file=file, problem=who)
    return SettingsFile(file=file, text=text, entries=entries, is_pipe=is_pipe)


def load(
    flags: Mapping[str, object] = MappingProxyType({}),
    env: Mapping[str, str] | None = None,
    file: Path | SettingsFile | None = None,
    *,
    defaults: Mapping[str, object] = MappingProxyType({}),
    oslo: Any = None,
) -> Settings:
    """Read settings from flags, environment and file; the rest are defaults.

    Args:
        flags: Settings by name; a value of None means "not given".
        env: The environment; None for this process's own.
        file: A TOML file of `name = value` lines, or its contents; None for none.
        defaults: The service's defaults, `Service.defaults`.
        oslo: A parsed `cfg.ConfigOpts` of oslo.config; *file* takes precedence, see
            `Settings.from_oslo`.

    Raises:
        ConfigError: at least one value is wrong or unknown; the message names them all.
    """
    return _read(flags, env, file, defaults, oslo).finish()


def load_again(
    flags: Mapping[str, object],
    env: Mapping[str, str] | None,
    file: Path | None,
    defaults: Mapping[str, object],
) -> Settings:
    """As `load`, for a service that runs.

    Raises:
        ConfigError: as `load`, and if *file* is a pipe that was read to its end at the start.
    """
    found = None if file is None else read_settings_file(file)
    if found is not None and found.is_pipe and not found.text:
        raise ConfigError(
            f"{file} is a pipe and is empty now: its settings were read at the start, and cannot "
            "be read again; start the service with --config and a regular file"
        )
    return load(flags, env, found, defaults=defaults)


def load_for_log(
    flags: Mapping[str, object],
    env: Mapping[str, str] | None,
    file: Path | SettingsFile | None,
) -> Settings:
    """Read the settings for the log, before the service and its defaults are imported.

    All given values are checked, and everything that the service's defaults cannot correct is
    refused here, so that all problems are reported together.

    Raises:
        ConfigError: as `load`, for the given values and the rules between them.
    """
    return _read(flags, env, file, {}).finish_for_log()


def _read(
    flags: Mapping[str, object],
    env: Mapping[str, str] | None,
    file: Path | SettingsFile | None,
    defaults: Mapping[str, object],
    oslo: Any = None,
) -> _Reader:
    reader = _Reader()
    reader.read_defaults(defaults)
    if oslo is not None:
        reader.read_oslo(oslo)
    if file is not None:
        reader.read_file(read_settings_file(file) if isinstance(file, Path) else file)
    reader.read_environment(os.environ if env is None else env)
    reader.read_flags(flags)
    return reader


def check_defaults(defaults: Mapping[str, object]) -> None:
    """Check each default of a service by itself; a start checks all settings together.

    Raises:
        ConfigError: at least one is wrong, unknown, or must not be a service's default; the
            message names them all.
    """
    reader = _Reader()
    reader.read_defaults(defaults)
    reader.complain()


def _who_may_write(fd: int, file: Path) -> str:
    """Which other users may change the opened settings file, and the remedy; empty if none.

    Our own group and root's group are allowed: with a umask of 002 files are writable for the
    group, and images are built so.
    """
    info, me, quoted = os.fstat(fd), os.geteuid(), shlex.quote(str(file))
    if info.st_uid not in {0, me}:
        who = f"belongs to uid {info.st_uid} and this process runs as uid {me}"
        remedy = f"run as uid {info.st_uid}, or, as root: chown {me} {quoted}"
    elif info.st_mode & stat.S_IWOTH:
        who, remedy = "can be written by everybody", f"run: chmod o-w {quoted}"
    elif info.st_mode & stat.S_IWGRP and info.st_gid not in {0, os.getegid()}:
        who, remedy = f"can be written by group {info.st_gid}", f"run: chmod g-w {quoted}"
    else:
        return ""
    return f"{file} {who}, and what it says decides where requests go; {remedy}"


class _Reader:
    """Collects values, from the weakest source to the strongest, and the problems of all."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._lines: dict[str, str] = {}  # the line of the file that gives a value, in words
        self._problems: list[str] = []
        self._unread: set[str] = set()  # given, but the value could not be read
        self._doubts: list[str] = []
        self._defaults: Mapping[str, object] = MappingProxyType({})

    def read_defaults(self, defaults: Mapping[str, object]) -> None:
        self._defaults = defaults
        for key, value in defaults.items():
            name = BY_OPTION.get(key, key)
            if name in _NEEDED_BEFORE:
                self._unread.add(name)
                self._problems.append(
                    f"{key} is no default of a service: it is needed before the service is "
                    f"imported; set {variable_name(name)}"
                )
            else:
                self._take_option(key, value, "service", f"{key} in the service's defaults")

    def read_oslo(self, conf: Any) -> None:
        from gracekit.config.oslo import read_oslo  # noqa: PLC0415 - few come from OpenStack

        try:
            found = read_oslo(conf)
        except ConfigError as error:
            self._unread |= set(SETTINGS)
            self._problems.append(f"oslo.config: {error}")
            return
        self._doubts += found.doubts
        for name, value in found.values.items():
            if not (name in found.by_code and name in self._values):
                self._take(name, value, found.origins[name], found.origins[name])

    def read_file(self, found: SettingsFile) -> None:
        if found.problem:
            self._unread |= set(SETTINGS)  # the file could set any of them
            self._problems.append(found.problem)
        file = found.file
        for key, value in found.entries.items():
            if isinstance(value, dict):
                self._unread |= {BY_OPTION.get(name, name) for name in value}
                self._problems.append(
                    f"[{key}] in {file}: settings stand in no table, one `name = value` a line; "
                    f"take the line [{key}] away"
                )
                continue
            line = _line_of(key, found.text)
            label = f"{key} in {file}, line {line}" if line else f"{key} in {file}"
            self._take_option(key, value, f"{file}:{line}", label, in_file=True)

    def read_environment(self, env: Mapping[str, str]) -> None:
        ours = (key for key in sorted(env) if key.startswith(PREFIX))
        for key in ours:
            if key in BY_VARIABLE:
                self._take(BY_VARIABLE[key], env[key], key, key)
            elif not NOT_OURS.fullmatch(key):
                self._miss(key, BY_VARIABLE)
                self._problems.append(f"unknown variable {key}{did_you_mean(key, BY_VARIABLE)}")

    def read_flags(self, flags: Mapping[str, object]) -> None:
        for key, value in flags.items():
            if value is not None:
                if key not in SETTINGS and key not in BY_OPTION:  # no option: a keyword
                    self._take_option(key, value, key, key)
                    continue
                label = f"--{option_name(key).replace('_', '-')}"
                if key.endswith("_url") and holds_password(str(value)):
                    self._unread.add(key)
                    self._problems.append(
                        f"{label} holds a password, which everybody sees who lists processes: set "
                        f"{variable_name(key)}, or write it into a settings file"
                    )
                    continue
                self._take_option(key, value, f"flag {label}", label)

    def _take_option(
        self, key: str, value: object, origin: str, label: str, *, in_file: bool = False
    ) -> None:
        name = key if key in SETTINGS else BY_OPTION.get(key)
        if name is None:
            self._miss(key, BY_OPTION)
            self._problems.append(f"unknown setting {label}{did_you_mean(key, BY_OPTION)}")
        else:
            self._take(name, value, origin, label)
            if in_file and self._origins.get(name) == origin:
                self._lines[name] = label

    def _miss(self, key: str, known: Mapping[str, str]) -> None:
        """Mark the setting that a misspelt *key* may mean as unread, as its value is unknown."""
        meant = nearest(key, known)
        self._unread |= set() if meant is None else {known[meant]}

    def _take(self, name: str, value: object, origin: str, label: str) -> None:
        try:
            self._values[name] = SETTINGS[name].metadata["parse"](value)
        except ConfigError as error:
            self._unread.add(name)
            self._problems.append(f"{label}: {error}")
        else:
            self._unread.discard(name)  # a weaker source's error is overridden
            self._origins[name] = origin
            self._lines.pop(name, None)

    def finish(self) -> Settings:
        """Return the settings; raise ConfigError with all problems if there are any."""
        return self._finish(known=SETTINGS.keys(), only=SETTINGS)

    def finish_for_log(self) -> Settings:
        """Return the log's settings; skip the rules about settings that defaults may still give."""
        return self._finish(known=self._values.keys() | _NEEDED_BEFORE, only=LOG_SETTINGS)

    def _finish(self, *, known: Collection[str], only: Collection[str]) -> Settings:
        judged = set(known) - self._unread
        found = problems_of(self._values)
        self._problems += [self._with_lines(one) for one in found if one.about <= judged]
        self.complain()
        return Settings(
            **{name: value for name, value in self._values.items() if name in only},
            origins=MappingProxyType(self._origins),
            service_defaults=self._defaults,
            doubts=tuple(self._doubts),
        )

    def _with_lines(self, problem: Problem) -> str:
        """The problem, with the lines of the file that cause it."""
        lines = [self._lines[name] for name in sorted(problem.about) if name in self._lines]
        return f"{problem.text} ({' and '.join(lines)})" if lines else problem.text

    def complain(self) -> None:
        if self._problems:
            raise ConfigError("\n".join(self._problems))


def _line_of(key: str, text: str) -> int:
    """The number of the line that sets *key* in a TOML file, from 1; 0 if not found."""
    wanted = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
    numbers = (number for number, line in enumerate(text.splitlines(), 1) if wanted.match(line))
    return next(numbers, 0)


def setting_named(word: str) -> str:
    """The name in flags and files of the setting that *word* means.

    Args:
        word: A setting with or without its unit, with - or _, or a variable's name.

    Raises:
        ConfigError: there is no such setting; the message names the nearest.
    """
    name = BY_VARIABLE.get(word) or word.removeprefix("--").replace("-", "_")
    name = name if name in SETTINGS else BY_OPTION.get(name, "")
    if name:
        return option_name(name)
    known = BY_VARIABLE if word.startswith(PREFIX) else BY_OPTION
    raise ConfigError(f"unknown setting {word}{did_you_mean(word, known)}")
