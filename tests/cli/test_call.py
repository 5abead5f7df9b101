"""`gracekit call` and `cast` against a process that serves."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cli.kit import Running, Started, gracekit, write_service

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("call")


@pytest.fixture(scope="module", autouse=True)
def service(directory: Path) -> Iterator[Running]:
    write_service(directory)
    with Running(directory, "--instance", "api-1") as run:
        yield run


def test_call_prints_the_result_as_json(directory):
    """What the handler returned, readable and harmless."""
    answer = gracekit(directory, "call", "compute", "echo", '--args={"value": {"ä": "\\u001b"}}')

    assert (answer.code, answer.json) == (0, {"ä": "\x1b"}), answer
    assert "\x1b" not in answer.out
    assert "ä" in answer.out


def test_an_id_is_an_idempotency_key(directory):
    """The same id twice is one task, answered twice."""
    words = ("call", "compute", "echo", "value=3", "--id", "order-1", "--json")

    answers = [gracekit(directory, *words) for _ in range(2)]

    assert [a.json for a in answers] == [{"request_id": "order-1", "result": 3}] * 2
    listed = gracekit(directory, "tasks", "--state", "all", "--json").json["tasks"]
    assert [t["request_id"] for t in listed].count("order-1") == 1


def test_what_the_handler_raised_is_told_by_class_and_message(directory):
    """Exit 1; no escape sequence of the message reaches the terminal, and no line of its own."""
    plain = gracekit(directory, "call", "compute", "boom")
    answer = gracekit(directory, "call", "compute", "boom", "--json")

    assert (plain.code, plain.out, answer.code) == (1, "", 1)
    assert plain.err == "Error: LookupError: no \\x1b[31msuch thing\n  Error: forged\n"
    (line,) = answer.err.splitlines()
    said = json.loads(line)["message"]
    assert said == "LookupError: no \\x1b[31msuch thing\\nError: forged"
    message = "no \x1b[31msuch thing\nError: forged"
    assert answer.json["error"] == {"class": "LookupError", "message": message}


_LONG: Final = [f"n{number}={'x' * 100_000}" for number in range(11)]
"""Arguments that are longer than what a client sends."""


@pytest.mark.parametrize("details", ["full", "message", "none"])
def test_a_request_that_was_refused_or_not_sent_is_5_and_a_handler_that_raised_1(
    tmp_path: Path, details
):
    """After 5 nothing has run; after 1 a second call under a new id would run it twice."""
    write_service(tmp_path)
    refused = [("ecko",), ("echo", "valu=1"), ("echo", "value=2", "--id", "order-2")]
    cases = {
        5: [*refused, ("echo", *_LONG), ("echo", "--version", "2.0")],
        1: [("boom",), ("slip",)],
    }
    with Running(tmp_path, GRACEKIT_ERROR_DETAILS=details):
        gracekit(tmp_path, "call", "compute", "echo", "--id", "order-2")

        got = {
            code: [gracekit(tmp_path, "call", "compute", *words) for words in all_words]
            for code, all_words in cases.items()
        }

    assert "NoSuchMethodError: " in got[5][0].err
    assert "TypeError: " in got[5][1].err
    assert "ConflictingRequestError: " in got[5][2].err
    assert "MessageTooLargeError: " in got[5][3].err
    assert "UnsupportedVersionError: " in got[5][4].err
    assert [{one.code for one in answers} for answers in got.values()] == [{5}, {1}], got


def test_cast_prints_the_request_id_once_it_is_kept(directory, service):
    """The id is all that a script needs to find the task again; host and fanout reach it too."""
    answer = gracekit(directory, "cast", "compute", "echo", "value=1")
    directed = gracekit(directory, "cast", "compute", "echo", "--host", "nobody-reads-here")
    fanned = gracekit(directory, "cast", "compute", "work", "vm=fan", "--fanout", "--json")
    service.wait_line("at work 'fan'")

    assert (answer.code, bool(re.fullmatch(r"[0-9a-f]{32}\n", answer.out))) == (0, True), answer
    assert (directed.code, "no service ever declared" in directed.err) == (4, True)
    assert "check the host too: no run has read there as host 'nobody-reads-here'. " in directed.err
    assert "The name of an instance is known on the ops topic only" in directed.err
    assert fanned.json["fanout"] is True


def test_a_cast_that_is_not_kept_says_so_as_a_call_does(directory):
    """With the error's class, which `docs/errors.md` explains, and the request id to send again."""
    nobody = ("cast", "compute", "echo", "--host", "nobody-reads-here", "--id", "order-9")
    plain = gracekit(directory, *nobody)
    answer = gracekit(directory, *nobody, "--json")

    assert (plain.code, plain.out, answer.code) == (4, "", 4)
    assert plain.err.startswith("Error: Undeliverable: no service ever declared ")
    assert answer.json["request_id"] == "order-9"
    assert answer.json["error"]["class"] == "Undeliverable"
    assert answer.json["error"]["message"].startswith("no service ever declared ")


@pytest.mark.parametrize("command", ["call", "cast"])
def test_an_empty_id_is_refused(directory, command: str):
    """`--id "$UNSET"` of a script would make each repetition a request of its own."""
    answer = gracekit(directory, command, "compute", "echo", "--id", "")

    assert (answer.code, answer.out) == (2, ""), answer
    assert "--id is empty: give one, or leave --id out to get a new one" in answer.err


def test_ctrl_c_names_the_request_which_runs_on(directory, service):
    """With its id the same command asks for the result. The signal ends it, so that a loop of a
    shell ends, too.
    """
    words = ("call", "compute", "work", "vm=ctrl-c", "--id", "order-7")
    with Started(directory, *words, terminal=True) as call:
        service.wait_line("at work 'ctrl-c'")
        call.type("\x03")
        code, said = call.wait(), call.rest()

    assert code == -signal.SIGINT
    assert "interrupted; request order-7 may run, or run on. The same command with --id" in said
    assert "Traceback" not in said


def test_no_answer_in_time_is_unreachable(directory, service):
    """Exit 4, and a word on what becomes of the request."""
    answer = gracekit(directory, "call", "compute", "work", "vm=slow", "--timeout", "200ms")

    assert answer.code == 4
    assert "runs on if a service has read it" in answer.err


def test_a_missing_transport_is_named_and_not_made(tmp_path: Path):
    """A wrong directory must not be answered by an empty file in it."""
    answer = gracekit(tmp_path, "cast", "compute", "echo")

    assert answer.code == 4
    assert f"there are no queues at {tmp_path / 'gracekit.db'}: no service has ever" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [("call",), ("cast",), ("cast", "--fanout"), ("cast", "--host", "node-1")]
)
def test_a_request_waits_for_the_queue_of_a_service_that_starts(tmp_path: Path, words):
    """So all lines of a first try can be pasted at once: neither the file nor the queue is there
    yet.
    """
    write_service(tmp_path)
    sending = Started(tmp_path, *words, "compute", "echo", "value=1")
    with sending, Running(tmp_path, "--host", "node-1"):
        code, said = sending.wait(), sending.rest()

    assert (code, "Error" in said) == (0, False), said
