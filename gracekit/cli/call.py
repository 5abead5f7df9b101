"""`gracekit call` and `gracekit cast`: requests from a shell."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import click

from gracekit import backoff
from gracekit.cli.main import ERROR, UNREACHABLE, end, exit_code_of, tell
from gracekit.cli.options import CommonOptions, common, need_duration
from gracekit.cli.order_progress import ASKED
from gracekit.cli.text import json_text, safe, verbatim_json
from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.config.urls import UrlKind, file_url, kind_of
from gracekit.errors import (
    DependencyError,
    GracekitError,
    Parked,
    RemoteError,
    Undeliverable,
    UnknownCommitError,
)
from gracekit.journal.outbox import utc_text
from gracekit.rpc.client import ClientView, RpcClient
from gracekit.rpc.connect import queue_file
from gracekit.rpc.failures import REFUSED, is_foreign
from gracekit.rpc.plain import MAX_DEPTH

NOT_RUN: Final = 5
STARTS_WITHIN_S: Final = 10.0
"""A queue that is not there is waited for, as its service may have just been started."""
_FEATURES: Final = (
    click.argument("topic"),
    click.argument("method"),
    click.argument("words", metavar="[NAME=VALUE]...", nargs=-1),
    click.option("--args", "args_text", metavar="JSON", help="Arguments, as a JSON object."),
    click.option(
        "--host",
        metavar="NAME",
        help="Send to the runs of this host only (their setting `host`); with --ops it may also be "
        "the name of an instance.",
    ),
    click.option("--ops", is_flag=True, help="Send to the ops topic."),
    click.option("--namespace", metavar="TEXT", help="Interface namespace."),
    click.option("--version", metavar="X.Y", help="Interface version asked for.  [default: 1.0]"),
    click.option("--id", "request_id", metavar="TEXT", help="Request id, an idempotency key."),
)


def _request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for feature in reversed(_FEATURES):
        command = feature(command)
    return command


@click.command()
@_request_options
@click.option(
    "--timeout",
    metavar="DURATION",
    default="60s",
    show_default=True,
    callback=need_duration,
    help="How long to wait for the answer.",
)
@common
def call(
    options: CommonOptions,
    /,
    *,
    topic: str,
    method: str,
    words: tuple[str, ...],
    args_text: str | None,
    timeout: str,
    request_id: str | None,
    **target: Any,
) -> None:
    """Call METHOD of the service TOPIC and print its result as JSON.

    VALUE is JSON if it reads as JSON, else text: `n=3`, `name=vm-1`,
    `tag='"3"'`.

    If the task waits for capacity, its version and deadline are shown. Call again
    with its --id to get the result.

    Exit status: 0 done, 1 the handler raised (class and message are shown), or the
    task was ended otherwise, 3 it waits for capacity, 4 no answer, 5 the request was
    refused or not sent, and nothing was run, 2 usage, 78 configuration.
    """
    args = arguments(words, args_text)
    request_id = _given_or_new(request_id)

    async def send(client: RpcClient) -> Any:
        view = _prepare(client, request_id=request_id, timeout=timeout, pending=True, **target)
        return await view.call(method, **args)

    try:
        result = asyncio.run(_with_client(options.settings, topic, send))
    except KeyboardInterrupt:
        _tell_interrupted(request_id)
        raise
    except Parked as parked:
        _tell_parked(parked, request_id, as_json=options.as_json)
    except Exception as error:  # noqa: BLE001 - a remote one may be any builtin
        _tell_failure(error, request_id, as_json=options.as_json)
    shown = {"request_id": request_id, "result": result} if options.as_json else result
    click.echo(verbatim_json(shown))


@click.command()
@_request_options
@click.option("--fanout", is_flag=True, help="Send it to every instance that runs now.")
@common
def cast(
    options: CommonOptions,
    /,
    *,
    topic: str,
    method: str,
    words: tuple[str, ...],
    args_text: str | None,
    fanout: bool,
    request_id: str | None,
    **target: Any,
) -> None:
    """Send METHOD to the service TOPIC and print the request id once it is confirmed.

    There is no answer, and the request never expires: a service that is down takes
    it when it starts. VALUE is as for `gracekit call`.
    """
    args = arguments(words, args_text)
    request_id = _given_or_new(request_id)
    if fanout and target["host"] is not None:
        raise click.UsageError("--fanout goes to every host; leave out --host, or --fanout")

    async def send(client: RpcClient) -> None:
        view = _prepare(client, request_id=request_id, **target)
        await (view.fanout(method, **args) if fanout else view.cast(method, **args))

    try:
        asyncio.run(_with_client(options.settings, topic, send))
    except KeyboardInterrupt:
        _tell_interrupted(request_id)
        raise
    except GracekitError as error:
        _tell_failure(error, request_id, as_json=options.as_json)
    shown = {"request_id": request_id, "fanout": fanout}
    click.echo(verbatim_json(shown) if options.as_json else safe(request_id))


def _given_or_new(request_id: str | None) -> str:
    if request_id == "":
        raise click.UsageError("--id is empty: give one, or leave --id out to get a new one")
    return Clock().new_request_id() if request_id is None else request_id


def _prepare(client: RpcClient, **options: Any) -> ClientView:
    return client.prepare(**{name: value for name, value in options.items() if value is not None})


async def _with_client(settings: Settings, topic: str, send: Callable[[RpcClient], Any]) -> Any:
    if queue_file(settings.transport_url) is None:
        check_transport(settings.transport_url)
    client = RpcClient(
        settings.transport_url,
        topic,
        ops_topic=settings.ops_topic_of(topic),
        exchange=settings.exchange,
        declare_profile=settings.declare_profile,
    )
    until = time.monotonic() + STARTS_WITHIN_S
    async with client:
        while True:
            try:
                return await send(client)
            except Undeliverable:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(backoff.PUBLISH_S)


def check_transport(url: str) -> None:
    """Refuse what no other process can reach, before an empty file is made of a wrong name.

    Raises:
        DependencyError: there is no such file, or it is a process's own memory.
    """
    if kind_of(url) is UrlKind.MEMORY:
        raise DependencyError(f"{url} is the memory of one process; name its --transport file")
    path = queue_file(url)
    if path is not None and not path.exists():
        raise DependencyError(
            f"there is no transport at {path}: start the service first, which makes it, or name "
            f"the right one with --transport {file_url('/path/to/gracekit.db')} or "
            "GRACEKIT_TRANSPORT_URL"
        )


def arguments(
    words: tuple[str, ...], args_text: str | None, *, option: str = ""
) -> Mapping[str, Any]:
    """The request's arguments from `name=value` words and a JSON object; *option* is theirs.

    Raises:
        click.UsageError: a word has no `=`, a name comes twice, or the JSON is no object.
    """
    where = f"{option} " if option else ""
    args: dict[str, Any] = _object(args_text) if args_text is not None else {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{where}{word!r} is not NAME=VALUE")
        if key in args:
            raise click.UsageError(f"{where}argument {key!r} is given twice")
        args[key] = _value(key, value)
    return args


def _object(text: str) -> dict[str, Any]:
    try:
        value = _read_json(text, "--args")
    except ValueError as error:
        raise click.UsageError(f"--args is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise click.UsageError(f"--args must be a JSON object, not {type(value).__name__}")
    return value


def _value(name: str, text: str) -> Any:
    try:
        return _read_json(text, f"argument {name!r}")
    except ValueError:
        return text


def _read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise click.UsageError(
            f"{what} nests too deeply to be read, and no service takes more than {MAX_DEPTH} "
            "levels; give a file's name or another reference to such data"
        ) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _tell_interrupted(request_id: str) -> None:
    """That a request which may have been sent is not taken back, and what its id is."""
    shown = safe(shlex.quote(request_id))
    tell(
        f"interrupted; request {shown} may run, or run on. The same command with --id {shown} is "
        "the same request",
        prefix="\n",
    )


def _tell_parked(parked: Parked, request_id: str, *, as_json: bool) -> NoReturn:
    """That a task waits, until when, and how to look at it."""
    if as_json:
        shown = {
            "task_id": parked.task_id,
            "version": parked.version,
            "deadline": utc_text(parked.deadline),
        }
        click.echo(json_text({"request_id": request_id, "parked": shown}))
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(parked.deadline))
    task_id = safe(shlex.quote(parked.task_id))
    tell(
        f"task {task_id} is parked: it waits for capacity until {until} UTC, as version "
        f"{parked.version}. On the host of its store `gracekit tasks show {task_id}` shows it, "
        "and `gracekit pending` lists all that wait. The same call with "
        f"--id {task_id} asks for its result",
        prefix="",
    )
    raise click.exceptions.Exit(ASKED)


def _tell_failure(error: Exception, request_id: str, *, as_json: bool) -> NoReturn:
    """The class and message of what went wrong, here or there, and an exit status."""
    name, message, code = type(error).__name__, str(error), ERROR
    if isinstance(error, RemoteError):
        name = ".".join(filter(None, (error.exc_module, error.exc_class)))
        message = message.removeprefix(f"{error.exc_class}: ")
    elif f"remote traceback:\n{REFUSED}" in getattr(error, "__notes__", ()):
        code = NOT_RUN
    elif isinstance(error, GracekitError) and not is_foreign(error):
        code = exit_code_of(error)
        if code == ERROR:
            code = UNREACHABLE if isinstance(error, UnknownCommitError) else NOT_RUN
    if as_json:
        shown = {"class": name, "message": message}
        click.echo(json_text({"request_id": request_id, "error": shown}))
    end(f"{name}: {message}", code)
