"""Why a run has stopped: one table over the evidence, in which the first row that fits decides."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gracekit.exits import Verdict
from gracekit.life import Identity
from gracekit.runs.end_records import EndRecord, late_records, read_crash, read_end
from gracekit.runs.run import WATCHED, Run
from gracekit.runs.why import TABLE, explain, why


def run(**known: Any) -> Run:
    """A dead run of which nothing is known but *known*."""
    unknown = dict.fromkeys(Run.__struct_fields__)
    identity = Identity(boot_id="boot", pid_ns=1, pid=7, start_ticks=7)
    return Run(**unknown | {"identity": identity, "verdict": Verdict.KILLED} | known)


def kernel(how: str, status: int, oom_kills: int = 0) -> EndRecord:
    return EndRecord(how=how, status=status, oom_kills=oom_kills, by="its parent")


KILLED = kernel("killed", signal.SIGKILL)
SEGV = kernel("dumped", signal.SIGSEGV)
SILENT = {"gone_by": "run 2", "gone_reason": f"{WATCHED} 30 s, seen by run 2"}
REPLACED = {"gone_by": "run 2", "gone_reason": "its process has ended, as the next one has seen"}
EVIDENCE: list[tuple[str, dict[str, Any]]] = [
    ("operator_stop", {"stop_source": "operator", "exit_code": 0}),
    ("operator_stop", {"stop_source": "operator", "kernel": KILLED}),  # cut off on its way
    ("planned_stop", {"stop_source": "rollout", "exit_code": 75}),
    ("user_stop", {"stop_source": "user", "exit_code": 0}),
    ("host_stop", {"stop_source": "signal", "host_stop": True, "exit_code": 0}),
    ("signal_stop", {"stop_source": "signal", "exit_code": 0}),
    ("signal_stop", {"stop_source": "signal", "host_stop": False, "rebooted": True}),
    ("config", {"exit_code": 78}),
    ("dependency", {"exit_code": 69}),
    ("failed", {"exit_code": 70}),
    ("failed", {"stop_source": "error", "kernel": KILLED}),
    ("gone", {"gone_by": "uid 0 (root)@node", "gone_reason": "it burnt"}),
    ("unknown", {"verdict": Verdict.UNKNOWN}),
    ("host_reboot", {"rebooted": True}),
    ("host_reboot", {"rebooted": True, **SILENT}),  # it had power again later
    ("fenced", SILENT),
    ("fenced", {"kernel": KILLED, **SILENT}),  # by its own timer
    ("fenced", {"kernel": kernel("exited", 70), **SILENT}),
    ("crash_signal", {"kernel": SEGV, **SILENT}),  # on another host, whose word came later
    ("oom", {"kernel": kernel("killed", signal.SIGKILL, oom_kills=1), **SILENT}),
    ("oom", {"kernel": kernel("killed", signal.SIGKILL, oom_kills=2)}),
    # The kernel killed a child for memory, and not this one.
    ("crash_signal", {"kernel": kernel("dumped", signal.SIGSEGV, oom_kills=1)}),
    ("crash_exit", {"kernel": kernel("exited", 1, oom_kills=1)}),
    ("killed", {"kernel": KILLED, "crash": "Segmentation fault in a child"}),
    ("crash_signal", {"kernel": kernel("killed", signal.SIGABRT)}),
    ("crash_signal", {"crash": "Segmentation fault in copy (copier.py:3)"}),
    ("early_signal", {"kernel": kernel("killed", signal.SIGTERM)}),
    ("killed", {"kernel": KILLED}),
    ("killed", {"kernel": KILLED, **REPLACED}),
    ("crash_exit", {"kernel": kernel("exited", 3)}),
    ("crash_exit", {"kernel": kernel("exited", 0)}),
    ("died", {}),
    ("died", REPLACED),
    ("died", {"host_stop": True}),  # missing evidence is never a user's stop
]


@pytest.mark.parametrize(("word", "known"), EVIDENCE)
def test_the_first_row_that_fits_says_why(word: str, known: dict[str, Any]):
    assert why(run(**known)) == word


def test_each_row_can_be_reached():
    assert [row.word for row in TABLE] == list(dict.fromkeys(row.word for row in TABLE))
    assert {word for word, _ in EVIDENCE} == {row.word for row in TABLE}


def test_an_explanation_says_of_each_row_before_why_it_does_not_fit():
    lines = list(explain(run(kernel=SEGV)))

    assert len(lines) == [row.word for row in TABLE].index("crash_signal") + 1
    assert lines[0] == "not operator_stop: an operator asked for it; nobody is on record"
    assert lines[-2].startswith("not oom: ")
    assert lines[-1].endswith("killed by SIGSEGV, and left a core, says its parent")
    (*_, crash) = explain(run(crash="Segmentation fault in copy (copier.py:3)"))
    assert crash.endswith(": Segmentation fault in copy (copier.py:3)")


@pytest.mark.parametrize(
    ("verdict", "left"),
    [
        ("drained", "drained"),
        ("handed_over", "handed_over"),
        ("stop_timeout", "cut_off"),
        ("killed", "cut_off"),
        ("failed", "failed"),
        ("unknown", "unknown"),
    ],
)
def test_a_verdict_says_how_the_tasks_were_left(verdict: str, left: str):
    assert Verdict(verdict).left == left


@pytest.mark.parametrize("text", [b"", b"Fatal", b"\xff\xfe", b"Fatal Python error: "])
def test_a_file_without_a_crash_is_no_evidence(tmp_path: Path, text: bytes):
    """faulthandler opens it at the start, and may die while it writes."""
    (tmp_path / "crash").write_bytes(text)

    assert read_crash(tmp_path / "crash") is None
    assert read_crash(tmp_path / "missing") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b'{"how": 1}', b"{" * 100_000, b"\xff", None, "link", "pipe"],
)
def test_what_is_no_record_is_no_evidence(tmp_path: Path, content: bytes | str | None):
    """Others may put anything into the directory; a pipe must not be waited for."""
    identity = Identity(boot_id="boot", pid_ns=1, pid=7, start_ticks=9)
    file = tmp_path / "exit-7-9.json"
    match content:
        case None:
            file.mkdir()
        case "link":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case bytes():
            file.write_bytes(content)

    assert read_end(tmp_path, identity, None) is None
    assert list(late_records(tmp_path)) == []


@pytest.mark.parametrize("wrong", [{"pid": 8}, {"start_ticks": 8}, {"boot_id": "b"}, {}])
def test_a_record_is_taken_only_if_all_that_it_says_fits(tmp_path: Path, wrong: dict[str, Any]):
    """A pid is used again, and a file can be renamed."""
    identity = Identity(boot_id="boot", pid_ns=1, pid=7, start_ticks=9)
    about = {"pid": 7, "start_ticks": 9, "boot_id": "boot"} | wrong
    record = {"how": "exited", "status": 3, "by": "its parent", **about}
    (tmp_path / "exit-7-9.json").write_text(json.dumps(record))

    assert (read_end(tmp_path, identity, None) is None) is bool(wrong)
