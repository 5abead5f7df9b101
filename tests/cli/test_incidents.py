"""Who ordered what is read from the record; and which runs ended last."""

from __future__ import annotations

import ast
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from gracekit.cli.incidents import KINDS
from tests.cli.kit import ROOT, Running, gracekit, write_service

pytestmark = pytest.mark.process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_orders_of_operators_are_listed_with_who_and_why(directory: Path):
    """Newest first, also of runs that have ended, and of orders that no run carried out."""
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work")
        gracekit(directory, "quiet", "--reason", "a look")
        gracekit(directory, "resume", "--reason", "all is well")
        gracekit(directory, "drain", "--timeout", "100ms", "--reason", "the host moves")
        run.wait()
    gracekit(directory, "tasks", "cancel", "order-1", "--reason", "too late", "--yes")

    listed = gracekit(directory, "incidents", "--what", "operator", "--json").json["incidents"]
    shown = gracekit(directory, "incidents", "--what", "operator", "--limit", "2").out
    everything = gracekit(directory, "incidents", "--json").json["incidents"]
    status = gracekit(directory, "status").out

    assert [(one["what"], one["instance"]) for one in listed] == [
        ("operator_cancel", None),
        ("operator_drain", "api-1"),
        ("operator_resume", "api-1"),
        ("operator_quiet", "api-1"),
    ]
    reasons = ("too late", "the host moves", "all is well", "a look")
    assert [reason in one["detail"] for one, reason in zip(listed, reasons, strict=True)] == [
        *[True] * 4
    ]
    assert listed[0]["request_id"] == "order-1"
    assert all("@" in one["detail"] for one in listed)
    assert len(shown.splitlines()) == 3
    assert "handed_over" in {one["what"] for one in everything}
    assert "the host moves, by " in status.split("last exits")[1]


def test_a_store_without_incidents_says_so(directory: Path):
    """An empty table would leave the question open; a kind that there is not is refused."""
    with Running(directory) as run:
        answer = gracekit(directory, "incidents")
        none_of_a_kind = gracekit(directory, "incidents", "--what", "operator_c")
        unknown = gracekit(directory, "incidents", "--what", "resorce")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0

    assert (answer.code, answer.out) == (0, "no incidents\n")
    assert (none_of_a_kind.code, none_of_a_kind.out) == (0, "no incidents\n")
    assert (unknown.code, unknown.out) == (2, "")
    said = "no kind of incident begins with 'resorce'; did you mean resource?; they are adopted,"
    assert said in unknown.err


def kinds_in_sources() -> Iterator[str]:
    """The kinds of the incidents that gracekit puts on record, where its code has them as texts."""
    for path in (ROOT / "gracekit").rglob("*.py"):
        text = path.read_text()
        yield from re.findall(r"INSERT INTO incident .*\nSELECT \?\d?, (?:\?\d|''), '(\w+)'", text)
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call):
                yield from kinds_in_call(call)


def kinds_in_call(call: ast.Call) -> Iterator[str]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    words = [one.value for one in call.args[:4] if isinstance(one, ast.Constant)]
    named = [
        part.value.value
        for part in call.keywords
        if part.arg == "what" and isinstance(part.value, ast.Constant)
    ]
    words += named
    match name:
        case "tally" | "add_note" | "OrderIncident":
            yield from (str(word) for word in words[:1] if word)
        case "end":  # of a row, without an order
            yield from map(str, named)
        case "_note":  # of a verb
            yield from (f"operator_{word}" for word in words[:1] if str(word).isalpha())


def test_the_kinds_of_incidents_are_those_of_the_sources():
    """A kind that is missing there could not be asked for while there is none on record."""
    found = set(kinds_in_sources())

    assert {"adopted", "parked", "restored", "operator_drain", "pending_expired"} <= found
    assert found <= set(KINDS)


def test_an_end_that_the_store_did_not_take_is_read_from_the_lock_file(directory: Path):
    """Another process keeps the store locked: the run drains and notes its exit code beside it."""
    with Running(directory) as run:
        with contextlib.closing(apsw.Connection(str(directory / "gracekit-store.db"))) as store:
            store.execute("BEGIN IMMEDIATE")
            drained = gracekit(directory, "drain")
            code = run.wait()
        (last,) = gracekit(directory, "status", "--json").json["last_exits"]

    assert code == 0
    assert (drained.code, "verdict: drained" in drained.out) == (0, True), drained
    assert (last["verdict"], last["exit_code"]) == ("drained", 0)


def test_the_run_that_ended_last_is_shown_first(directory: Path):
    """It lived long, so others have begun after it; its crash is what an operator looks for."""
    with Running(directory, "--instance", "old") as old:
        for _ in range(5):
            with Running(directory, "--instance", "young") as young:
                young.process.send_signal(signal.SIGTERM)
                assert young.wait() == 0
        old.kill()

    exits = gracekit(directory, "status", "--json").json["last_exits"]

    assert [(one["instance"], one["verdict"]) for one in exits[:2]] == [
        ("old", "killed"),
        ("young", "drained"),
    ]
