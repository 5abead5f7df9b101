"""What goes wrong in a function of a kind is logged: once a pass, with its traceback."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import Done, Found, Service, Wait
from tests.service.kit import Life, World
from tests.service.shares import Shares, first_pass, hang, settle

pytestmark = pytest.mark.looptime


def faults(life: Life) -> list[str]:
    """Which functions have failed, in their order."""
    return [str(fields["hook"]) for fields in life.told("hook.failed")]


def raises(shares: Shares, which: str, error: Exception) -> None:
    """Let that function raise."""

    def fail(*_: Any) -> Any:
        raise error

    name = {"probe": "answers", "delete": "deletes", "find": "finds", "write": "writes"}[which]
    setattr(shares, name, fail)


@pytest.mark.parametrize(
    ("which", "hook"),
    [
        ("probe", "share.was_it_created"),
        ("delete", "share.delete_again"),
        ("write", "share.write"),
        ("find", "share.find"),
    ],
)
async def test_the_traceback_of_what_raises_is_in_the_log(
    world: World, svc: Service, caplog: pytest.LogCaptureFixture, which: str, hook: str
):
    """A bug in such a function would look like a backend that is away otherwise."""
    shares = Shares(world, svc)
    shares.add("a", status="deleting" if which == "delete" else "creating")
    raises(shares, which, KeyError("user_id"))
    life = await world.start(svc)

    await first_pass(life)

    (failed,) = life.told("hook.failed")
    assert (failed["hook"], failed["error"]) == (hook, "KeyError('user_id')")
    (record,) = [one for one in caplog.records if one.__dict__["event"] == "hook.failed"]
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    frames = traceback.extract_tb(record.exc_info[1].__traceback__)
    assert frames[-1].name == "fail"


async def test_one_kind_of_error_is_logged_once_a_pass(world: World, svc: Service):
    """However many resources meet it, and however often they are asked again meanwhile."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add(*(f"s-{n}" for n in range(20)))
    errors: dict[str, Exception] = {f"s-{n}": OSError("away") for n in range(20)}
    shares.answers = lambda name, _n: errors[name]
    life = await world.start(svc, reconciliation_interval_s=600)
    await first_pass(life)
    asked = len(shares.asked)
    await world.until(lambda: len(shares.asked) > 3 * asked, within_s=500)
    assert faults(life) == ["share.was_it_created"]

    errors["s-3"] = KeyError("size")
    await world.until(lambda: len(faults(life)) == 2, within_s=500)
    assert life.told("hook.failed")[1]["error"] == "KeyError('size')"

    await settle(life)
    assert [one["error"] for one in life.told("hook.failed")[2:]] == [
        "OSError('away')",
        "KeyError('size')",
    ]


async def test_one_sort_of_trouble_does_not_hide_another(world: World, svc: Service):
    """A slow write says nothing of one whose record takes no token, and the other way round."""
    shares = Shares(world, svc)
    shares.add("a", "b", "c")
    answers = {"a": hang, "b": lambda: False, "c": lambda: "yes"}
    shares.writes = lambda found, _status: answers[found.id]()
    life = await world.start(svc, reconcile_at_once=1)

    await first_pass(life)

    errors = [str(one["error"]) for one in life.told("hook.failed")]
    assert [error.split(" ")[0] for error in errors] == ["no", "answered", "answered"]
    assert "the record may hold a newer token" in errors[1]


async def test_without_further_passes_it_is_logged_once_an_hour(world: World, svc: Service):
    """Nothing ends what is asked again between passes, as long as it fails."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("a", "b")
    shares.answers = lambda _id, _n: OSError("away")
    life = await world.start(svc, reconciliation_interval_s=0)
    await first_pass(life)

    await asyncio.sleep(3000)
    assert len(faults(life)) == 1
    await asyncio.sleep(4000)

    assert len(faults(life)) == 2


@pytest.mark.parametrize(
    ("prepare", "hook", "error"),
    [
        (
            lambda shares: setattr(shares, "answers", lambda *_: Done("x")),
            "share.was_it_created",
            "answered Done(result='x'): it returns Settled, Absent, Broken or Wait",
        ),
        (
            lambda shares: setattr(shares, "deletes", lambda *_: False),
            "share.delete_again",
            "returned False: a delete returns nothing, when the resource is gone",
        ),
        (
            lambda shares: setattr(shares, "writes", lambda *_: "yes"),
            "share.write",
            "answered 'yes': it returns True if it has changed the record, else False",
        ),
        (
            lambda shares: setattr(shares, "finds", lambda _n: [Found("a", "creating"), "b"]),
            "share.find",
            "share.find, find() returned a str in its list: all are Found",
        ),
    ],
)
async def test_a_wrong_answer_is_logged_in_the_same_way(
    world: World, svc: Service, prepare: Callable[[Shares], None], hook: str, error: str
):
    """There is no traceback, as nothing was raised."""
    shares = Shares(world, svc)
    shares.add("a", status="deleting" if "delete" in hook else "creating")
    prepare(shares)
    life = await world.start(svc)

    await first_pass(life)

    assert [(one["hook"], one["error"]) for one in life.told("hook.failed")] == [(hook, error)]


@pytest.mark.parametrize("answer", [Wait("1h"), NotImplementedError()])
async def test_what_a_probe_may_do_is_no_fault(world: World, svc: Service, answer: Any):
    """NotImplementedError says that the backend cannot be asked."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, _n: answer
    life = await world.start(svc)

    await first_pass(life)

    assert faults(life) == []
