"""A store in PostgreSQL beside a bare pipeline and other libraries: the bench runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journaled import GOALS, KINDS, UNITS
from benchmarks.postgres import main
from tests.scale import SOAK_VARIABLE


@pytest.mark.skipif(
    SOAK_VARIABLE not in os.environ,
    reason="it takes two minutes and an environment of its own: `make soak` runs it",
)
@pytest.mark.process
@pytest.mark.timeout(600)
def test_libraries_take_turns_on_one_server_and_tell_their_figures(tmp_path: Path):
    """With tiny sizes it runs to its end, with libraries in another environment among them."""
    told = tmp_path / "told.json"

    assert main(["--quick", "--rounds", "1", "--dir", str(tmp_path), "--json", str(told)]) == 0

    found: dict[str, Any] = json.loads(told.read_text())
    figures = {figure["case"]: figure for figure in found["figures"]}
    assert {f"p50 with {number} waiting" for number in (1, 32, 256)} <= set(figures)
    assert {"4 hosts, commits of 0 ms more", "1 hosts, commits of 5 ms more"} <= set(figures)
    for case in UNITS:
        for other in ("procrastinate", "DBOS"):
            figure = figures[f"{case} / {other}"]
            assert 0 < figure["ours"] < math.inf
            assert 0 < figure["bare"] < math.inf
    assert sum(figure["goal"] is not None for figure in figures.values()) == 7
    assert {"procrastinate", "dbos"} <= set(found["machine"])


def test_goals_name_libraries_and_cases_that_are_measured():
    """Else a goal would silently not be judged."""
    labels = {kind.label for kind in KINDS}
    assert all(case in UNITS and other in labels for case, other in GOALS)
