"""`gracekit health`: one probe of one run, by its door; for exec probes of Kubernetes and Docker.

A probe runs every few seconds, so this loads little and reads no store. It finds the runs by the
sockets in the run directory; a socket that no process listens at belongs to a dead run.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from pathlib import Path
from typing import Any, Final

import click

from gracekit.cli.main import ERROR, end
from gracekit.cli.options import CommonOptions, common, living_instance_argument
from gracekit.cli.text import json_text, safe
from gracekit.control.door_wire import LONGEST_LINE, Ask, address_of, line_of_ask, read_answer
from gracekit.errors import ConfigError, DependencyError, GracekitError, RunEndedError
from gracekit.runs.names import DOOR_SUFFIX
from gracekit.store.place import StorePlace, check_readable

PATIENCE_S: Final = 5.0
CONNECT_S: Final = 0.5

_probe = click.option(
    "--live", "probe", flag_value="live", help="Whether it is alive; if not, restart it."
)
_ready = click.option(
    "--ready",
    "probe",
    flag_value="ready",
    default="ready",
    help="Whether it takes new requests.  [default]",
)
_started = click.option(
    "--started", "probe", flag_value="started", help="Whether its start is over."
)


@click.command()
@living_instance_argument
@_probe
@_ready
@_started
@common
def health(options: CommonOptions, /, *, name: str | None, probe: str) -> None:
    """Ask a run of this host whether it is ready, is alive, or has started.

    INSTANCE may be left out if only one run lives. Prints `pass`, `warn` or `fail` and why. `warn`
    passes: the run serves, but an operator should look at it.

    Exit status: 0 it passes, 1 it fails, 4 no run answers, 2 usage, 78 configuration.
    """
    answer = _ask(options, name or options.instance or options.settings.instance, probe)
    if options.as_json:
        click.echo(json_text(answer))
    else:
        why = "; ".join(map(safe, answer["why"]))
        click.echo(": ".join(filter(None, (safe(answer["status"]), why))))
    if answer["status"] == "fail":
        click.get_current_context().exit(ERROR)


def _ask(options: CommonOptions, name: str | None, probe: str) -> dict[str, Any]:
    """The answer of the one run that is meant."""
    place = StorePlace(options.settings)
    if place.run_directory is None:
        raise ConfigError(
            f"{place.url} is in one process's memory and has no door; name a file with --store"
        )
    check_readable(place.run_directory)
    heard, silent = _hear(place.run_directory, probe)
    meant = [answer for answer in heard if name in {None, answer.get("instance"), _label(answer)}]
    if len(meant) == 1 and (name is not None or not silent):
        return meant[0]
    known = sorted(map(_label, heard))
    if len(meant) > 1 or (meant and silent):
        listed = [*map(safe, known), *[f"{silent} that did not answer"] * bool(silent)]
        which = "INSTANCE or SERVICE@INSTANCE" if name is None else "SERVICE@INSTANCE"
        raise click.UsageError(f"several runs live ({', '.join(listed)}): name one as {which}")
    if silent:
        raise DependencyError(f"a run is alive and did not answer within {PATIENCE_S:g} s")
    wanted = "no run" if name is None else f"no run of instance {name!r}"
    others = f"; others do: {', '.join(map(safe, known))}" if known else ""
    raise DependencyError(f"{wanted} of {place.name} answers{others}")


def _label(answer: dict[str, Any]) -> str:
    return f"{answer['service']}@{answer['instance']}"


class _Asked:
    """One connection, and what was received on it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.line = b""

    def read(self) -> bool:
        """Read what has arrived; true when nothing more will come."""
        try:
            piece = self.connection.recv(LONGEST_LINE)
        except OSError:  # it ended meanwhile
            piece = b""
        self.line += piece
        return not piece or self.line.endswith(b"\n")


def _hear(directory: Path, probe: str) -> tuple[list[dict[str, Any]], int]:
    """The answers of living runs, and how many did not answer in time."""
    deadline = time.monotonic() + PATIENCE_S
    answers: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for door in sorted(directory.glob(f"*{DOOR_SUFFIX}")):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if _is_asked(door, connection, probe):
                waiting.register(connection, selectors.EVENT_READ, _Asked(connection))
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                if key.data.read():
                    waiting.unregister(key.fileobj)
                    answers += _answer(key.data.line)
        return answers, len(waiting.get_map())


def _is_asked(door: Path, connection: socket.socket, probe: str) -> bool:
    """Ask the run behind *door*; false if it is dead, so that no process listens there."""
    connection.settimeout(CONNECT_S)
    run_id = door.name.removesuffix(DOOR_SUFFIX)
    try:
        with address_of(door) as address:
            connection.connect(address)
        connection.sendall(line_of_ask(Ask(run_id=run_id, verb="health", args={"probe": probe})))
    except (ConnectionRefusedError, FileNotFoundError, BrokenPipeError):
        return False
    except TimeoutError:
        pass  # it is alive with a full queue of askers: it counts as a run that does not answer
    except OSError as error:
        raise DependencyError(f"{door} cannot be asked: {error.strerror or error}") from error
    return True


def _answer(line: bytes) -> list[dict[str, Any]]:
    """What a run said, or nothing if it has ended; a refusal ends the command."""
    if not line:
        return []
    try:
        return [read_answer(line)]
    except RunEndedError:
        return []
    except GracekitError as error:
        end(safe(error), ERROR)
