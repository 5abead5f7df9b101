"""`gracekit run`: a service as a process of its own; `gracekit keep`: a command below a parent."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from gracekit.cli.app import load_service, what_failed
from gracekit.cli.options import (
    app_dir_option,
    config_option,
    factory_option,
    setting_flags,
)
from gracekit.config.live import LiveSettings
from gracekit.config.loading import load, load_again, load_for_log, read_settings_file
from gracekit.config.settings import Settings, variable_name
from gracekit.config.urls import absolute
from gracekit.errors import ConfigError, DeclarationError, GracekitError
from gracekit.exits import ExitCode, explained
from gracekit.runs.end_records import FailedStart, note_start
from gracekit.runtime.process_life import run_service
from gracekit.store.files import make_directory
from gracekit.store.location import StoreLocation
from gracekit.telemetry.logs import change_format, logging_around, said


@click.command()
@click.argument("target", metavar="MODULE[:ATTR]", envvar="GRACEKIT_APP")
@factory_option
@app_dir_option
@config_option
@click.option(
    "--keep-evidence",
    is_flag=True,
    help="Run below a small parent that records how the process ends.",
)
@click.option("--json", "as_json", is_flag=True, help="Log JSON lines, also on a terminal.")
@setting_flags
@click.pass_context
def run(
    ctx: click.Context,
    /,
    target: str,
    *,
    factory: bool,
    app_dir: Path,
    config: Path | None,
    keep_evidence: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run the service MODULE:ATTR until a signal ends it.

    Without ATTR it is `svc`, else `app`. SIGTERM and Ctrl-C drain the service; a
    second Ctrl-C, or SIGQUIT, hands its tasks over at once. SIGHUP reads the
    settings again, unless standard input is a terminal. The log goes to standard
    output: text on a terminal, JSON lines elsewhere.

    Exit status: 0 drained, 75 unfinished tasks are in the journal, 78 wrong
    configuration, 69 broker or store unreachable, 70 internal error.
    """
    if as_json:
        flags["log_format"] = flags["log_format"] or "json"
    # The application may change the working directory, and the file is read again on SIGHUP.
    file = None if config is None else absolute(config)
    tell = partial(_tell, as_json=_is_json(flags["log_format"]))
    try:
        # Once for both, because a pipe, as in `--config <(command)`, gives its text only once.
        found = None if config is None else read_settings_file(config)
        if keep_evidence:
            _keep_evidence(StoreLocation(load(flags, os.environ, found)))
        with _logging(load_for_log(flags, os.environ, found)):
            service = load_service(target, factory=factory, app_dir=app_dir)
        settings = load(flags, os.environ, found, defaults=service.defaults)
    except (ConfigError, DeclarationError) as error:
        tell(explained(error))
        _note_failed(target, flags, error, ExitCode.CONFIG)
        ctx.exit(ExitCode.CONFIG)
    except Exception as failure:  # noqa: BLE001 - the application's own, shown with its traceback
        raised, when = what_failed(failure)
        trace = "".join(traceback.format_exception(raised.with_traceback(_from_app(raised))))
        tell(f"{target}: the module raised {type(raised).__name__} {when}:", trace)
        code = ExitCode.CONFIG if isinstance(raised, ImportError) else ExitCode.INTERNAL
        _note_failed(target, flags, raised, code)
        ctx.exit(code)
    read = partial(load_again, flags, os.environ, file, service.defaults)
    live = LiveSettings(settings, read=read, file=file)
    live.on_change(_change_log)
    ctx.exit(run_service(service, live))


def _note_failed(
    target: str, flags: Mapping[str, Any], error: BaseException, code: ExitCode
) -> None:
    """Let `gracekit exits` show a start that failed before its settings and service were known."""
    names = ("store_url", "run_directory", "host", "instance")
    env = {name: os.environ[name] for name in map(variable_name, names) if name in os.environ}
    with contextlib.suppress(GracekitError):  # these may be what is wrong
        settings = load({name: flags.get(name) for name in names}, env)
        start = FailedStart(
            service=target,
            instance=settings.instance,
            at=time.time(),
            code=int(code),
            reason=(str(error) or type(error).__name__)[:500],
            run_id="",
        )
        note_start(StoreLocation(settings).run_directory, start)


def _keep_evidence(location: StoreLocation) -> NoReturn:
    """Replace this process by a parent of the same without `--keep-evidence`."""
    if (directory := location.run_directory) is None:
        raise ConfigError("--keep-evidence needs a store that outlives the process: name a --store")
    make_directory(directory, with_parent=location.is_shared)
    words = [word for word in sys.argv[1:] if word != "--keep-evidence"]
    become_keeper(directory, [sys.executable, "-m", "gracekit", *words])


@contextlib.contextmanager
def _logging(settings: Settings) -> Iterator[None]:
    """The log of the process: as the module configures it, but for the settings that were given."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    overrides = settings.origin("log_format") != "default"
    with logging_around(settings.log_format, level=level, overrides=overrides):
        yield
    if settings.origin("log_level") != "default":
        logging.getLogger().setLevel(level)


def _change_log(before: Settings, now: Settings) -> None:
    if now.log_format != before.log_format:
        change_format(now.log_format)
    if now.log_level != before.log_level:
        logging.getLogger().setLevel(now.log_level.upper())


def _is_json(flag: object) -> bool:
    """Whether the log is asked to be JSON; known before the settings are read, and may be wrong."""
    return str(flag or os.environ.get(variable_name("log_format"))).lower() == "json"


def _tell(text: str, trace: str = "", *, as_json: bool) -> None:
    text = text if as_json else f"Error: {text}"
    click.echo(said(text, trace=trace, as_json=as_json), err=True)


def _from_app(error: BaseException) -> Any:
    """The traceback from the application's first frame on; None if there is none of it.

    A SyntaxError has none: it names the file and the line itself.
    """
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("gracekit.cli", "importlib")):
            return step
        step = step.tb_next
    return None


# -- the small parent -----------------------------------------------------------------------


@click.command()
@click.option(
    "--record",
    "place",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to write how it ended: one line of JSON. A directory gets a file for each process.",
)
@click.argument("command", metavar="-- CMD ...", nargs=-1, required=True, type=click.UNPROCESSED)
def keep(*, place: Path, command: tuple[str, ...]) -> None:
    """Run CMD below a small parent that keeps the evidence of its end.

    The record says how CMD ended, whether the kernel killed for lack of memory,
    and who sent the first signal that stops. It is there before this command
    ends, as CMD ends. Signals are passed on. If the parent dies alone, CMD goes
    on without a record.
    """
    become_keeper(absolute(place), command)


def become_keeper(place: Path, command: Sequence[str]) -> NoReturn:
    """Replace this process by the small parent of *command*."""
    sys.stdout.flush()
    words = [sys.executable, "-P", "-m", "gracekit.keeper", str(place), *command]
    os.execv(sys.executable, words)  # noqa: S606 - no shell is wanted
