"""`gracekit`: the group of commands, each loaded by name when it is used.

Also the one place that turns errors into exit codes: 0, 1 error, 2 usage,
4 unreachable, 78 configuration; `run` has the others of `exits` too, `drain` adds 3.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from gracekit import streams
from gracekit.config.values import did_you_mean
from gracekit.errors import (
    ConfigError,
    DeclarationError,
    DependencyError,
    GracekitError,
    RunEndedError,
    Undeliverable,
    UnknownCommitError,
)
from gracekit.exits import ExitCode
from gracekit.telemetry.logs import said, take_hooks
from gracekit.version import VERSION

ERROR: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 4
DETACHED: Final = 130
"""As a shell says for a command that Ctrl-C has ended; what it watched goes on."""

_AS_JSON: Final = f"{__name__}.as_json"
"""Whether what is said on standard error is JSON, in the `meta` of click's contexts."""

# The help is here, so that `gracekit --help` loads no command.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "run": ("gracekit.cli.run:run", "Run a service until a signal ends it."),
        "call": ("gracekit.cli.call:call", "Send a request and print its result."),
        "cast": ("gracekit.cli.call:cast", "Send a request that nobody waits for."),
        "status": ("gracekit.cli.status:status", "Show the runs of a store and its accounts."),
        "exits": ("gracekit.cli.exits:exits", "List how runs have ended, and why."),
        "tasks": ("gracekit.cli.tasks:tasks", "List tasks of a store."),
        "pending": ("gracekit.cli.pending:pending", "List tasks that wait for capacity."),
        "holds": ("gracekit.cli.holds:holds", "List open holds, which keep hosts in a drain."),
        "incidents": (
            "gracekit.cli.incidents:incidents",
            "List orders of operators, and what was unusual.",
        ),
        "drain": ("gracekit.cli.drain:drain", "Drain a run and watch until it is gone."),
        "extend": ("gracekit.cli.quiet:extend", "Move a drain's deadline later."),
        "quiet": ("gracekit.cli.quiet:quiet", "Close a run's intake; `resume` undoes it."),
        "resume": ("gracekit.cli.quiet:resume", "Undo quiet, or a drain by command."),
        "reconcile": (
            "gracekit.cli.reconcile:reconcile",
            "Settle resources now, by the rules of a service.",
        ),
        "health": ("gracekit.cli.health:health", "Ask a run one probe: ready, live or started."),
        "dump": ("gracekit.cli.dump:dump", "Print a run's tasks with their stacks."),
        "hosts": (
            "gracekit.cli.hosts:hosts",
            "List the hosts of a store, or declare one gone.",
        ),
        "runs": ("gracekit.cli.runs:runs", "Declare a run gone."),
        "service": (
            "gracekit.cli.service:service",
            "Say whether an instance is to be up.",
        ),
        "keep": ("gracekit.cli.run:keep", "Run a command, and record how it ends."),
        "lease": ("gracekit.cli.lease:lease", "Declare leases, look at them, hold or force one."),
        "doctor": (
            "gracekit.cli.doctor:doctor",
            "Look for what would keep a service from stopping well.",
        ),
        "init": ("gracekit.cli.init:init", "Print a unit, manifests or a Dockerfile."),
        "prune": ("gracekit.cli.prune:prune", "Remove queues of hosts that are gone."),
        "store": (
            "gracekit.cli.store:store",
            "Back up a store in a file, or print the SQL of one in PostgreSQL.",
        ),
        "config": ("gracekit.cli.config:config", "Show settings, and where each value comes from."),
        "demo": ("gracekit.demo.command:demo", "Show a drain, a crash and a recovery."),
    }
)


class HintingGroup(click.Group):
    """A group that names the nearest command for a wrong one, or all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a hint."""
        names = self.list_commands(ctx)
        if not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in names:
            hint = did_you_mean(args[0], names) or f"; there are {', '.join(names)}"
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


class LazyGroup(HintingGroup):
    """A group whose commands are imported one at a time."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does. A command line that cannot be read is refused in JSON too, if it asks."""
        ctx.meta[_AS_JSON] = "--json" in (args[: args.index("--")] if "--" in args else args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Their names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does, from the table: no command is imported."""
        commands = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; gracekit's errors become a line and an exit code."""
        try:
            return super().invoke(ctx)
        except GracekitError as error:
            _fail(error)
        except click.ClickException as error:
            if not ctx.meta[_AS_JSON]:
                raise
            end(error.format_message(), error.exit_code)
        except UnicodeEncodeError:  # Python keeps bytes that are no UTF-8 as half characters
            end("an argument is not UTF-8, and no name on record is written otherwise", USAGE)
        except KeyboardInterrupt:
            # A shell that waits for this process sees that the user has interrupted it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


def _fail(error: GracekitError) -> NoReturn:
    words = str(error) or type(error).__name__
    if isinstance(error, UnknownCommitError):
        words += ": `gracekit incidents --what operator` shows whether the order is on record"
    end(words, exit_code_of(error))


def end(message: str, code: int) -> NoReturn:
    """End the command with a message on standard error; it may hold wire text."""
    tell(message)
    raise click.exceptions.Exit(code)


def tell(message: str, *, prefix: str = "Error: ") -> None:
    """Say *message* on standard error, with --json as a line of JSON; it may hold wire text.

    The level of that line is ERROR, and WARNING of what has no prefix: it ends no command.
    """
    level = logging.ERROR if prefix else logging.WARNING
    as_json = click.get_current_context().meta.get(_AS_JSON, False)
    words = said(message, as_json=as_json, level=level)
    click.echo(words if as_json else f"{prefix}{words}", err=True)


def exit_code_of(error: GracekitError) -> int:
    """Exit code of a command that ended with *error*."""
    match error:
        case ConfigError() | DeclarationError():
            return ExitCode.CONFIG
        case DependencyError() | Undeliverable() | TimeoutError() | RunEndedError():
            return UNREACHABLE
        case _:
            return ERROR


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:  # noqa: FBT001
    if asked:
        click.echo(f"gracekit {VERSION}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def cli() -> None:
    """Run services that stop, crash and restart without losing a request, and operate them.

    Options win over GRACEKIT_ variables, these over the file of --config, and
    that over defaults.
    """


def main() -> None:
    """Entry point of the `gracekit` script and of `python -m gracekit`."""
    # The interpreter's last collections would walk every module: a seventh of what `gracekit
    # status` costs. What is frozen is not walked; nothing needs it any more.
    atexit.register(gc.freeze)
    _open_closed_streams()
    take_hooks()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter must not turn a listing into a traceback.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        cli(prog_name="gracekit")
    except OSError as error:
        if not _is_of_echo(error):
            raise
        streams.say(f"Error: standard output cannot be written: {error.strerror or error}")
        # Not `sys.exit`: the interpreter would write the rest of the text once more, fail again,
        # and end with a code of its own.
        os._exit(ERROR)


def _is_of_echo(error: OSError) -> bool:
    """Whether a standard stream did not take what a command printed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is click.echo.__code__


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the calling process has closed.

    Python sets such a stream to None. Otherwise the next file or socket would get its number, and
    with it everything that is written to the stream by number.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode))
