"""The benches run and tell what they should; how fast, no test asks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import apsw
import pytest

from benchmarks.__main__ import BENCHES, main
from benchmarks.child import ROOT
from benchmarks.history import add_history, remove_later
from benchmarks.measure import Figure, Goal, against, alone, quantile
from benchmarks.picture import draw
from benchmarks.stages import TABLE
from benchmarks.table import lines
from gracekit.listings.listings_sql import ACCOUNTS
from gracekit.listings.store_view import Accounts
from gracekit.process import Process
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine

FIELDS = {"bench", "case", "unit", "ours", "bare", "value", "low", "high", "worst", "goal"}

# What each bench must tell at least: the goals of the project, and what they are judged by.
CASES = {
    "tracking": {"with start, end and states"},
    "durable": {f"p50 with {n} waiting" for n in (1, 32, 256)},
    "service": {f"journaled, {n} in flight" for n in (1, 32, 256)},
    "calls": {f"journaled p50 at {n}" for n in (1, 32, 256)},
    "drain": {"idle exit, 1 times", "last task's end to exit, 1 times"},
    "start": {"60 rows: ready", "60 rows: settled"},
    "resources": {
        "40 settled by one pass",
        "peak resident above idle",
        "none of 40 stuck: ready / no kind",
    },
    "pending": {
        "parked and retried / plain, 1 at once",
        "commits more of that, 1 at once",
        "commits more of that, 32 at once",
        "a request beside 20 parked / 0",
        "a sweep that finds nothing beside 20 parked / 0",
    },
    "growth": {"20 in flight / 1", "20 in history / 0", "20 methods / 1", "20 resources / 1"},
    "memory": {"tracked above bare, 200", "full collection, 200 served"},
    "footprint": {
        "exec to the first message, sqlite://",
        "idle, sqlite://",
        "disk for an ended row",
        "gracekit status, 20 rows",
        "gracekit tasks, 20 runs / 2",
    },
    "operators": {"processor time of that", "p99 of /readyz beside them", "idle, above off"},
}


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_tells_its_figures(name: str, tmp_path: Path):
    """With tiny sizes each bench runs to its end, and every figure is whole and finite."""
    told, picture = tmp_path / "told.json", tmp_path / "told.svg"
    options = ("--quick", "--rounds", "1", "--dir", str(tmp_path))

    assert main([name, *options, "--json", str(told), "--svg", str(picture)]) == 0

    figures: list[dict[str, Any]] = json.loads(told.read_text())["figures"]
    assert CASES[name] <= {figure["case"] for figure in figures}
    for figure in figures:
        assert set(figure) == FIELDS
        assert figure["bench"] == name
        for field in ("ours", "value", "low", "high", "worst"):
            assert math.isfinite(figure[field]), figure
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_every_bench_is_expected_to_tell_something():
    """A new bench comes with the cases that it must tell."""
    assert set(CASES) == set(BENCHES)


async def test_a_made_history_is_accounted_for(tmp_path: Path):
    """Nothing is lost or too many in a store with rows that were made, and in which some were
    removed.
    """
    path = tmp_path / "store.db"
    engine = SqliteEngine(path, load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    await engine.stop()

    some = add_history(path, 40)
    add_history(path, 20)
    remove_later(path, some)

    connection = apsw.Connection(str(path))
    accounts = Accounts.of_rows(connection.execute(ACCOUNTS))
    connection.close()
    assert (accounts.accepted, accounts.removed, accounts.off_by) == (60, 20, 0)
    assert accounts.terminal == {"succeeded": 40}


@pytest.mark.process
def test_processor_time_is_told_by_stage():
    """What decoding takes is told as decoding, in the two steps in which a service decodes; in a
    process of its own, as SIGALRM is pytest's here.
    """
    script = """
import json
from benchmarks.stages import STAGES, Sampler
from gracekit.rpc.envelope import open_message
from gracekit.rpc.oslo_wire import request_in
with Sampler().on() as seconds:
    for _ in range(300_000):
        request_in(open_message(b'{"method": "work", "args": {}}'))
print(json.dumps(dict(zip(STAGES, seconds))))
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)

    seconds: dict[str, float] = json.loads(told.stdout)
    assert max(seconds, key=seconds.__getitem__) == "decode"


def test_every_stage_names_code_that_exists():
    """Else what was renamed would silently be the event loop's."""
    assert [start for starts in TABLE.values() for start in starts if not _exists(start)] == []


def _exists(start: str) -> bool:
    file, _, name = start.partition(":")
    package, _, inside = file.partition("/")
    path = Path(find_spec(package).origin).parent / inside
    parts = name.split(".") if name else []
    return path.exists() and all(
        f"def {part}" in path.read_text() or f"class {part}" in path.read_text() for part in parts
    )


def test_an_unknown_bench_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    """The names that there are stand in the message."""
    with pytest.raises(SystemExit):
        main(["durabel"])
    assert "no bench 'durabel': there are tracking, durable" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Not the ratio of the medians: a round whose machine was slow is slow on both sides."""
    figure = against("b", "c", [(2.0, 1.0), (30.0, 10.0), (8.0, 2.0)], "us", Goal(3.0))

    assert (figure.value, figure.ours, figure.bare) == (3.0, 8.0, 2.0)
    assert (figure.low, figure.high, figure.worst) == (2.5, 3.5, 4.0)
    assert figure.met


@pytest.mark.parametrize(
    ("goal", "unit", "worst", "met"),
    [
        (Goal(2.0), "s", 3.0, True),
        (Goal(1.9), "s", 3.0, False),
        (Goal(0.5, at_least=True), "tasks/s", 1.0, True),
        (Goal(2.5, at_least=True), "tasks/s", 1.0, False),
        (None, "s", 3.0, None),
    ],
)
def test_a_goal_is_judged_by_the_median(goal: Goal | None, unit: str, worst: float, met: bool):
    """The worst is shown beside it; of a rate that is the lowest."""
    figure = alone("b", "c", [1.0, 2.0, 3.0], unit, goal)

    assert (figure.value, figure.worst, figure.met) == (2.0, worst, met)


def test_the_worst_of_a_cost_is_the_highest():
    """Processor time of each second is a cost, and no rate, although both are so much per
    second.
    """
    assert alone("b", "c", [1.0, 2.0, 3.0], "ms/s").worst == 3.0


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.25, 1.75)])
def test_a_quantile_is_interpolated(share: float, value: float):
    """Between two values it lies between them."""
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value


def a_figure(**more: Any) -> Figure:
    figure = against("bench", "a < b & c", [(4.0, 2.0)] * 7, "us", Goal(1.5))
    return Figure(**{name: getattr(figure, name) for name in FIELDS} | more)


def test_the_table_says_what_was_missed():
    """Each line is as wide as the head, and names the goal."""
    head, _, line = lines([a_figure()])

    assert "<= 1.5" in line
    assert "MISSED" in line
    assert len(head) == len(line)


def test_the_picture_is_well_formed_whatever_the_words_and_numbers():
    """Markup in a name is text, and a bar off the scale ends at its end."""
    picture = draw([a_figure(), a_figure(value=1e9), a_figure(value=1e-9)], {"python": "<3>"})

    texts = [element.text for element in ET.fromstring(picture).iter() if element.text]
    assert texts.count("a < b & c") == 3
    assert any("<3>" in text for text in texts)
