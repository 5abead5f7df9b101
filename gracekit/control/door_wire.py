"""The messages of a run's door: one line of JSON each way.

    {"run_id": "4f…", "verb": "drain", "args": {"timeout": "60s"}}
    {"answer": {"run_id": "4f…", "phase": "draining"}}
    {"error": {"class": "RunEndedError", "message": "run 4f… of api-1 ended meanwhile…"}}

Both sides use this module; the command line needs nothing else of `control`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

from gracekit import errors
from gracekit.errors import BadMessageError, ConflictError, GracekitError, Parked

LONGEST_LINE: Final = 65_536
"""Most bytes of a line, with its line end; only the answer to `dump` may be longer."""
LONGEST_ANSWER: Final = 67_108_864
"""Most bytes of an answer; a dump has at most so many."""
PAGE_BYTES: Final = 40_000
"""Most JSON bytes of a page, unless one item is longer; the rest of an answer needs room too."""
LONGEST_ADDRESS: Final = 107
"""Most bytes of a path that the kernel takes as the address of a socket (`man 7 unix`)."""

# These cannot be made from a message alone: a ConflictError also needs a statement, and a Parked a
# task. No verb raises them.
_NEED_MORE: Final = (ConflictError, Parked)
_CLASSES: Final = MappingProxyType(
    {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, GracekitError) and kind not in _NEED_MORE
    }
)


class Ask(NamedTuple):
    """One verb, for one run."""

    run_id: str
    verb: str
    args: Mapping[str, Any]


def line_of_ask(ask: Ask) -> bytes:
    """*ask* as a line.

    Raises:
        BadMessageError: it is longer than `LONGEST_LINE`.
    """
    line = {"run_id": ask.run_id, "verb": ask.verb, "args": dict(ask.args)}
    return _line(line, LONGEST_LINE)


def read_ask(line: bytes) -> Ask:
    """The ask in a line.

    Raises:
        BadMessageError: the line is no ask; the message says why.
    """
    found = _read(line)
    run_id, verb, args = found.get("run_id"), found.get("verb"), found.get("args", {})
    if not (isinstance(run_id, str) and isinstance(verb, str) and isinstance(args, dict)):
        raise BadMessageError(
            'an ask is a line of JSON: {"run_id": "…", "verb": "status", "args": {}}'
        )
    return Ask(run_id=run_id, verb=verb, args=args)


def line_of_answer(answer: Mapping[str, Any]) -> bytes:
    """*answer* as a line.

    Raises:
        BadMessageError: it is longer than `LONGEST_ANSWER`.
    """
    return _line({"answer": dict(answer)}, LONGEST_ANSWER)


def line_of_error(error: Exception) -> bytes:
    """*error* as a line; a very long message is cut."""
    message = str(error)[: LONGEST_LINE // 16]  # \u escapes take 6 bytes of a UTF-16 unit
    return _line({"error": {"class": type(error).__name__, "message": message}}, LONGEST_LINE)


def read_answer(line: bytes) -> dict[str, Any]:
    """The answer in a line.

    Raises:
        GracekitError: the run has answered with an error, whose class and message this one has.
        BadMessageError: the line is no answer.
    """
    found = _read(line)
    answer, refusal = found.get("answer"), found.get("error")
    if isinstance(answer, dict):
        return answer
    if isinstance(refusal, dict):
        raise _error_named(str(refusal.get("class")), str(refusal.get("message")))
    raise BadMessageError("what came is neither an answer nor a refusal")


def _error_named(name: str, message: str) -> GracekitError:
    """An error of gracekit's class *name*; for other classes a GracekitError that names it."""
    kind = _CLASSES.get(name)
    return GracekitError(f"{name}: {message}") if kind is None else kind(message)


def page_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many of *items*, from the first on, as fit into a page; at least one."""
    size = PAGE_BYTES
    for number, item in enumerate(items):
        size -= len(json.dumps(item))
        if size < 0:
            return items[: max(1, number)]
    return items


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """An address for the socket at *path*, of any length; valid inside the block.

    Raises:
        OSError: the directory of a long path cannot be opened.
    """
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _line(value: Mapping[str, Any], longest: int) -> bytes:
    line = json.dumps(value, allow_nan=False).encode() + b"\n"
    if len(line) > longest:
        raise BadMessageError(
            f"a line of {len(line):,} bytes does not go through the door, which takes "
            f"{longest:,}; ask for less at a time"
        )
    return line


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"the line is no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise BadMessageError(f"the line is a JSON {type(found).__name__}, and no object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
