"""Checks of Dockerfiles: the start command, the stop signal and the user.

The time limit of a stop is not in the image: `docker run --stop-timeout` sets it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from gracekit.config.settings import Settings
from gracekit.doctor.finding import Finding, fail, ok, warn
from gracekit.doctor.start_command import (
    check_target,
    check_wait,
    given_by,
    hides_signals,
    split,
)
from gracekit.doctor.units import begins_drain, judged_by
from gracekit.errors import ConfigError


class ImagePlan(msgspec.Struct):
    """The contents of a Dockerfile's last stage.

    Attributes:
        command: ENTRYPOINT and CMD as one command line; the shell form begins with `/bin/sh -c`.
        variables: From ENV.
        user: None if it is the base image's.
        stop_signal: None if it is the base image's.
        directory: WORKDIR.
    """

    command: list[str] = msgspec.field(default_factory=list)
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    stop_signal: str | None = None
    directory: str = ""


def check_dockerfile(settings: Settings, path: Path, target: str = "") -> Iterator[Finding]:
    """Check a Dockerfile for anything that prevents a drain.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not any(name == "FROM" for name, _ in _instructions(text)):
        remedy = "name the Dockerfile of the service's image"
        yield fail("Dockerfile", f"{path} is no Dockerfile: it has no line FROM", remedy)
        return
    image = read_dockerfile(text)
    given = given_by(image.command, image.variables, image.directory)
    yield from check_target(given, target, path.name)
    yield from judged_by(settings, given, path.name)
    yield _check_command(image, path.name)
    yield from check_wait(image.command, image.variables, path.name)
    yield _check_signal(image, path.name)
    yield _check_user(image, path.name)


def read_dockerfile(text: str) -> ImagePlan:
    """Parse the last stage of *text*; earlier stages only build."""
    image, entry, command = ImagePlan(), list[str](), list[str]()
    for name, rest in _instructions(text):
        match name:
            case "FROM":
                image, entry, command = ImagePlan(), [], []
            case "ENTRYPOINT":
                entry = _command(rest)
            case "CMD":
                command = _command(rest)
            case "ENV":
                image.variables |= _variables(rest)
            case "USER":
                image.user = rest
            case "STOPSIGNAL":
                image.stop_signal = rest
            case "WORKDIR":
                image.directory = str(PurePosixPath(image.directory or "/", rest))
    # In its shell form ENTRYPOINT ignores CMD.
    image.command = entry if _is_shell_form(entry) else [*entry, *command]
    return image


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's name and arguments, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name.upper(), rest.strip()


def _list(text: str) -> list[str]:
    """The words of `["a", "b"]`; empty for any other form."""
    try:
        words = json.loads(text)
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def _command(text: str) -> list[str]:
    return _list(text) or ["/bin/sh", "-c", text]


def _is_shell_form(words: list[str]) -> bool:
    return words[:2] == ["/bin/sh", "-c"]


def _variables(text: str) -> Mapping[str, str]:
    """Parse `A=b C="d e"`, or the old form `A b`."""
    name, _, value = text.partition(" ")
    if "=" not in name:
        return {name: value.strip()}
    pairs = (word.partition("=") for word in split(text))
    return {name: value.replace("\\$", "$") for name, _, value in pairs}


# -- the checks -------------------------------------------------------------------------


def _check_command(image: ImagePlan, name: str) -> Finding:
    remedy = 'write it as a list: CMD ["gracekit", "run", "MODULE:ATTR"]'
    if not image.command:
        return warn("CMD", f"{name} does not say what it starts", remedy)
    if hides_signals(image.command):
        return fail(
            "CMD",
            f"{name} starts a shell that starts the service: SIGTERM reaches only the shell, and "
            "when the stop timeout is over the service is killed without a drain",
            remedy,
        )
    return ok("CMD", f"{name} starts {image.command[0]} itself")


def _check_signal(image: ImagePlan, name: str) -> Finding:
    number = image.stop_signal or "SIGTERM"
    if begins_drain(number):
        return ok("STOPSIGNAL", f"{name}: {number} begins a drain")
    return fail(
        "STOPSIGNAL",
        f"{name} stops with {number}, and a drain begins with SIGTERM, SIGINT or SIGQUIT",
        "write STOPSIGNAL SIGTERM",
    )


def _check_user(image: ImagePlan, name: str) -> Finding:
    if (image.user or "root").partition(":")[0] not in {"root", "0"}:
        return ok("USER", f"{name}: {image.user}")
    return warn(
        "USER",
        f"{name} names no USER but root, so the service runs as the base image's, usually root",
        "make a user, and name it by number, as in USER 10001:10001",
    )
