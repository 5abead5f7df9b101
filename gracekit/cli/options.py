"""Options that commands share, and the flags that are made from `Settings`.

The values of options go through `config.load` like those of every other source, so that one place
judges them and reports everything that is wrong at once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pwd
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from gracekit.config.loading import load
from gracekit.config.settings import Settings, option_name, variable_name
from gracekit.config.urls import absolute, file_url
from gracekit.config.values import parse_duration
from gracekit.errors import ConfigError
from gracekit.store.place import check_readable

P = ParamSpec("P")
R = TypeVar("R")

_METAVARS: Final = (("float", "DURATION"), ("int", "N"))
_MOST_LISTED: Final = 1_000_000
_ATTRIBUTE: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)

store_option: Final = click.option(
    "--store",
    "--store-url",
    "store_url",
    metavar="URL",
    help=f"URL of the service's store: {file_url('file')} or postgresql://..."
    "  [env: GRACEKIT_STORE_URL]",
)
transport_option: Final = click.option(
    "--transport",
    "--transport-url",
    "transport_url",
    metavar="URL",
    help=f"URL of the service's transport: {file_url('file')}, or amqp://... of a broker.  "
    "[env: GRACEKIT_TRANSPORT_URL]",
)
instance_option: Final = click.option(
    "--instance",
    metavar="NAME",
    help="Name of one instance of the service.  [env: GRACEKIT_INSTANCE]",
)
living_instance_argument: Final = click.argument("name", metavar="[INSTANCE]", required=False)
config_option: Final = click.option(
    "--config",
    envvar="GRACEKIT_CONFIG",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of settings: TOML with `name = value` lines.  [env: GRACEKIT_CONFIG]",
)
factory_option: Final = click.option(
    "--factory", is_flag=True, help="ATTR is a function that returns the Service."
)


class _Directory(click.Path):
    """An existing directory; click would say of one that is closed to this user that it is not."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """As click does.

        Raises:
            ConfigError: the directory belongs to another user, and is closed to this one.
        """
        check_readable(absolute(Path(value)))
        return super().convert(value, param, ctx)


app_dir_option: Final = click.option(
    "--app-dir",
    type=_Directory(),
    default=".",
    help="Directory that MODULE and its own modules are imported from first. Anyone who can write "
    "there decides what runs.  [default: the working directory]",
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def limit_option(
    default: int = 50, meaning: str = "At most so many.", *, name: str = "--limit"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The option `--limit` of a listing, or another one that counts."""
    return click.option(
        name,
        type=click.IntRange(1, _MOST_LISTED),
        default=default,
        show_default=True,
        help=meaning,
    )


def reason_option(meaning: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The option `--reason`, which must not be empty: others read it on record."""
    return click.option(
        "--reason", metavar="TEXT", required=True, callback=_need_words, help=meaning
    )


def who() -> str:
    """The operator, for the record: `uid 1000 (alice)@host`, as the kernel knows it.

    LOGNAME and USER are not used, because anyone can set them.
    """
    uid = os.getuid()
    try:
        name = f" ({pwd.getpwuid(uid).pw_name})"
    except KeyError:  # a container's user often has no name
        name = ""
    return f"uid {uid}{name}@{socket.gethostname()}"


why_option: Final = click.option(
    "--reason", metavar="TEXT", default="", help="Why, for the record and the log."
)


def _need_words(_ctx: click.Context, _parameter: click.Parameter, given: str) -> str:
    if not given.strip():
        raise click.BadParameter("it is empty; write in a few words what others should know")
    return given


def need_duration(
    _ctx: click.Context, _parameter: click.Parameter, given: str | None
) -> str | None:
    """Refuse an option that is no duration; settings are judged by `load`, and are 78."""
    if given is not None:
        try:
            parse_duration(given)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
    return given


def _refuse_options_before_the_verb(ctx: click.Context) -> None:
    """Options of the listing say nothing to a verb, and must not be taken for its own.

    Raises:
        UsageError: there are some.
    """
    given = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"write {', '.join(given)} after {ctx.invoked_subcommand!r}, if it takes that"
        )


class CommonOptions(NamedTuple):
    """The options of every command for operators.

    Attributes:
        settings: From options, environment, file and defaults.
        instance: Of the option alone; the environment's is in the settings.
        as_json: Print JSON.
    """

    settings: Settings
    instance: str | None
    as_json: bool


def common(command: Callable[Concatenate[CommonOptions, P], R]) -> Callable[..., R]:
    """Give *command* the shared options; it takes them as one `CommonOptions`.

    A group is not called if a verb follows it.
    """

    @functools.wraps(command)
    def wrapped(
        *,
        store_url: str | None,
        transport_url: str | None,
        instance: str | None,
        config: Path | None,
        as_json: bool,
        **rest: Any,
    ) -> Any:
        ctx = click.get_current_context()
        if ctx.invoked_subcommand is not None:
            _refuse_options_before_the_verb(ctx)
            return None
        flags = {"store_url": store_url, "transport_url": transport_url, "instance": instance}
        settings = load(flags, os.environ, config)
        return command(CommonOptions(settings=settings, instance=instance, as_json=as_json), **rest)  # type: ignore[call-arg]

    shared = (store_option, transport_option, instance_option, config_option, json_option)
    return _with(shared, wrapped)


def setting_flags(command: Callable[P, R]) -> Callable[P, R]:
    """Give *command* one option for each setting, named and explained as in `Settings`."""
    meanings = _meanings()
    shared = {"store_url": store_option, "transport_url": transport_option}
    flags = [
        shared.get(field.name) or _flag(field, meanings.get(field.name, ""))
        for field in dataclasses.fields(Settings)
        if field.metadata["parse"] is not None
    ]
    return _with(flags, command)


def _with(options: Any, command: Callable[P, R]) -> Callable[P, R]:
    # Decorators are applied bottom up: the last one applied comes first in the help.
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def _flag(field: dataclasses.Field[Any], meaning: str) -> Callable[[Any], Any]:
    name = option_name(field.name).replace("_", "-")
    text = f"{meaning}  [env: {variable_name(field.name)}]"
    if field.type == "bool":
        return click.option(f"--{name}/--no-{name}", field.name, default=None, help=text)
    metavar = next((word for kind, word in _METAVARS if kind in str(field.type)), "TEXT")
    return click.option(f"--{name}", field.name, metavar=metavar, help=text)


def _meanings() -> Mapping[str, str]:
    """Setting to its sentence in the docstring of `Settings`."""
    _, _, attributes = (inspect.getdoc(Settings) or "").partition("Attributes:\n")
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
