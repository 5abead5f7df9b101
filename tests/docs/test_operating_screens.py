"""What docs/operating.md says about the screens of commands is what they show."""

from __future__ import annotations

import inspect
import json
import re
import signal
import sqlite3
from pathlib import Path
from typing import Any, Final

import pytest

from gracekit.cli import holds, reach, task_show
from gracekit.cli.drain import why_it_blocks
from gracekit.cli.incidents import KINDS
from gracekit.cli.status import forecast, longest, waits_for
from gracekit.tracker import stacks
from tests.cli.kit import Running, gracekit, write_service
from tests.docs.pages import Page
from tests.docs.tables import commands, section, tables

PAGE: Final = Page("operating.md")
JSON: Final = re.compile(r"^```json\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_LISTED: Final = (
    "what thumbs@api-1 runs that is not in the store (requeue requests, periodic jobs, hooks) "
    "is not listed:"
)
ORDERS: Final = """
from gracekit import Context, Service

svc = Service("orders")


@svc.rpc
async def {name}(ctx: Context, order: str) -> None:
    print("{name}", order, flush=True)
"""
WAITING: Final = """
import asyncio

from gracekit import Context, Service

svc = Service("thumbs")


@svc.rpc(resource="album", on_interrupt="retry")
async def render(ctx: Context, album: str) -> None:
    print("rendering", album, flush=True)
    await asyncio.sleep(1000)
"""


def first_cells(heading: str, number: int = 0) -> list[str]:
    """The first cells of a table below a heading, one for each name in it."""
    rows = list(tables(section(PAGE.text, heading)))[number]
    return ", ".join(row[0] for row in rows).split(", ")


def texts_in(function: Any, pattern: str) -> list[str]:
    return re.findall(pattern, inspect.getsource(function))


# -- tables and the code ----------------------------------------------------------------


def test_the_lines_of_a_task_are_those_that_are_printed():
    """In their order, each with its meaning."""
    printed = texts_in(task_show._facts, r'yield "([a-z ]+)"')

    shown = first_cells("Lines of `gracekit tasks show`")

    assert shown == [*printed, "history", "last failure"]


def test_the_kinds_of_incidents_are_those_of_the_code():
    """Each is in one row."""
    assert sorted(first_cells("Kinds of incidents")) == sorted(KINDS)


def test_the_columns_and_states_of_holds_are_those_of_the_code():
    """METHOD and HOST included."""
    rows = next(tables(section(PAGE.text, "Columns of `gracekit holds`")))
    (states,) = (row[1] for row in rows if row[0] == "STATE")

    assert first_cells("Columns of `gracekit holds`") == list(holds._HEADERS)
    for state in ("errored hook due", "left over", "open"):
        assert f'"{state}"' in inspect.getsource(holds._row)
        assert f"{state}: " in states


def test_the_fields_of_a_dump_are_those_of_the_code():
    """In the order of a line."""
    fields = texts_in(stacks._of_task, r'"(\w+)":')

    assert first_cells("Fields of `gracekit dump`") == ["task", *fields]


def test_the_words_for_a_run_that_gives_no_answer_are_those_of_the_code():
    """`left alone` and `reconcile pending` are about runs that are not asked."""
    unheard = texts_in(reach._why_not, r'return "([a-z ]+)"')

    shown = first_cells("Columns of `gracekit status`", 1)

    assert set(shown) == {*unheard, "left alone", "reconcile pending"}


def test_the_lines_of_a_drain_are_those_that_are_printed():
    """Each text of the table, as the command makes it from the status of a run."""
    task = {"method": "render", "resource": "album:spring", "task_id": "9f31c2", "age_s": 41.0}
    running = task | {"state": "running"}
    charge = {"method": "charge", "task_id": "e20ea3", "age_s": 19.0, "state": "running"}
    printed = (
        longest({"longest": task}),
        forecast({"expected_s": 12.0}),
        forecast({"expected_unknown": 1, "running": 2}),
        waits_for(["migration vm-1"]),
        why_it_blocks(running | {"safe_point_age_s": 12.0}),
        why_it_blocks(charge),
        why_it_blocks(running | {"cancelled_by": "drain deadline"}).partition(": ")[2],
    )

    shown = section(PAGE.text, "Lines of `gracekit drain`")

    assert [one for one in printed if one not in shown] == []


# -- screens ----------------------------------------------------------------------------


@pytest.mark.process
def test_a_suspended_run_is_shown_and_ignores_what_it_was_ordered_meanwhile(tmp_path: Path):
    """The page says what status and an order print, and what SIGUSR1 and SIGCONT do."""
    write_service(tmp_path, text=WAITING)
    with Running(tmp_path, "--instance", "api-1") as run:
        gracekit(tmp_path, "cast", "thumbs", "render", "album=spring", "--id", "9f31c2aa")
        run.wait_line("rendering spring")
        run.process.send_signal(signal.SIGSTOP)
        run.process.send_signal(signal.SIGUSR1)

        status = gracekit(tmp_path, "status").out.splitlines()[1]
        tasks = gracekit(tmp_path, "tasks")
        shown = gracekit(tmp_path, "tasks", "show", "9f31c2aa").out
        cancelled = gracekit(tmp_path, "tasks", "cancel", "9f31c2aa", "--reason", "no")
        run.process.send_signal(signal.SIGCONT)
        run.wait_line("--- gracekit thumbs@api-1")
        after = gracekit(tmp_path, "tasks", "show", "9f31c2aa").out
        orders = gracekit(tmp_path, "incidents", "--what", "operator").out
        run.process.send_signal(signal.SIGQUIT)
        run.wait()
        log = run.rest()

    assert "serving?" in status
    assert status.split("  ")[-1] == "R"
    assert "  does not answer  " in status
    for words, screen in ((NOT_LISTED, tasks.err), ("its process says nothing:", shown)):
        assert f"`{words}`" in " ".join(PAGE.text.split())
        assert words in screen
    assert (cancelled.code, "lives and did not answer" in cancelled.err) == (4, True)
    assert "state     running" in after
    assert orders == "no incidents\n"
    assert "loop.blocked" in log


@pytest.mark.process
def test_a_dead_letter_is_listed_and_sent_again_as_the_page_says(tmp_path: Path):
    """An earlier version served the method; under the same id it runs when that version is back."""
    (again,) = (line for line in commands(PAGE.text) if line.startswith("gracekit cast orders"))
    listing, body = re.findall(r'^sqlite3 .*gracekit\.db "(.*)"$', PAGE.text, re.MULTILINE)
    (example,) = JSON.findall(section(PAGE.text, "Dead letters"))
    for name in ("ship", "other"):
        write_service(tmp_path, text=ORDERS.format(name=name))
        with Running(tmp_path) as run:
            if name == "other":
                gracekit(tmp_path, *again.split()[1:])
                run.wait_line("task.rejected")
            run.process.send_signal(signal.SIGTERM)
            assert run.wait() == 0

    with sqlite3.connect(f"file:{tmp_path}/gracekit.db?mode=ro", uri=True) as queue:
        ((number, _, topic, reason),) = queue.execute(listing).fetchall()
        ((text,),) = queue.execute(body).fetchall()
    queue.close()
    write_service(tmp_path, text=ORDERS.format(name="ship"))
    with Running(tmp_path) as run:
        gracekit(tmp_path, *again.split()[1:])
        run.wait_line("ship o-1")

    assert (number, topic) == (1, "orders")
    assert reason == "unknown_method: method 'ship' is not served"
    assert json.loads(text) == json.loads(example)
