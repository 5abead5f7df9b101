"""The verb `dump`: one text in pages, however much changes while they are read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit.clock import Clock
from gracekit.control import dumps
from gracekit.control.door_wire import LONGEST_LINE, line_of_answer
from gracekit.control.dumps import MOST_KEPT, Dumps
from gracekit.errors import GracekitError, InvalidArgumentsError
from gracekit.process import Threads
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.tracker.stacks import StackDump
from gracekit.tracker.task import Lane, TrackedTask
from gracekit.tracker.tracker import Tracker


@pytest.fixture
def tracker() -> Tracker:
    """Enough tasks for several pages, with the worst names."""
    made = Tracker()
    for n in range(300):
        worst = f"{n:04d}{chr(1) * (MAX_NAME - 4)}"
        made.add(TrackedTask(request_id=worst, method="\U0001f600" * 250, lane=Lane.REQUESTS))
    return made


@pytest.fixture
def texts(tracker: Tracker) -> Dumps:
    """The dumps of a run with these tasks."""
    return Dumps(StackDump(lambda: "gracekit x", tracker, callers=()), Threads(1), Clock())


async def read(texts: Dumps, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """*answer* and the pages that follow it."""
    pages = [answer]
    while (number := pages[-1]["next"]) is not None:
        pages.append(await texts.page({"dump_id": answer["dump_id"], "page": number}))
    return pages


async def test_pages_fit_together_although_all_tasks_end_meanwhile(texts: Dumps, tracker: Tracker):
    """Each page fits into a line of the door, has whole lines, and never mixes two texts."""
    first = await texts.page({})
    for task in tracker:
        tracker.remove(task)
    other = await texts.page({})
    pages, empty = await read(texts, first), await read(texts, other)

    text = "".join(page["text"] for page in pages)
    assert len(pages) > 3
    assert all(len(line_of_answer(page)) <= LONGEST_LINE for page in pages)
    assert all(page["text"].endswith("\n") for page in pages)
    assert text.startswith("--- gracekit x: tasks 300, ")
    assert text.count("\ntask ") == 300
    assert text.endswith("--- end ---\n")
    assert "tasks 0," in empty[0]["text"]


async def test_the_loop_s_own_thread_is_shown_at_its_work(texts: Dumps):
    """The text is made in another thread, and marks the loop's thread."""
    (page, *_) = [one for one in await read(texts, await texts.page({})) if "loop)" in one["text"]]

    shown = page["text"].partition("(event loop)")[2].partition("\nthread ")[0]
    assert "in _make" not in shown


async def test_a_text_that_nobody_reads_on_is_forgotten(
    texts: Dumps, monkeypatch: pytest.MonkeyPatch
):
    """It goes after a time, or when there are too many; the next request for it is refused, as is
    one for a page that does not exist.
    """
    first = await texts.page({})
    with pytest.raises(InvalidArgumentsError, match="that dump has the pages 0 to "):
        await texts.page({"dump_id": first["dump_id"], "page": 10**9})
    for _ in range(MOST_KEPT):
        last = await texts.page({})
    with pytest.raises(GracekitError, match="is kept no longer"):
        await texts.page({"dump_id": first["dump_id"], "page": 1})
    with pytest.raises(GracekitError, match="is kept no longer"):
        await texts.page({"dump_id": ["no", "id"], "page": 1})

    monkeypatch.setattr(dumps, "KEPT_S", 0.05)
    short = await texts.page({})
    await asyncio.sleep(0.1)
    with pytest.raises(GracekitError, match="is kept no longer"):
        await texts.page({"dump_id": short["dump_id"], "page": 1})
    assert len(await read(texts, last)) > 3
