"""What an application may get wrong about its resources, and the shapes that its hooks may have."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from gracekit import (
    Absent,
    Broken,
    Context,
    Found,
    InvalidArgumentsError,
    Service,
    Settled,
    Wait,
)
from gracekit.rpc.argument_paths import LONGEST_RESOURCE
from tests.service.kit import World
from tests.service.shares import ShareRow, Shares, results, settle

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"id": "x" * (LONGEST_RESOURCE + 1)}, "the id of a resource is text or a whole number"),
        ({"id": ""}, "the id of a resource is"),
        ({"id": "a\0b"}, "the id of a resource is"),
        ({"id": None}, "the id of a resource is"),
        ({"id": ["a"]}, "the id of a resource is"),
        ({"id": b"a"}, "the id of a resource is text or a whole number"),
        ({"id": True}, "the id of a resource is text or a whole number"),
        ({"id": 1.0}, "the id of a resource is text or a whole number .* and not 1.0"),
        ({"id": 10**LONGEST_RESOURCE}, "the id of a resource is text or a whole number"),
        ({"id": 10**5000}, "the id of a resource is text or a whole number"),
        ({"id": Decimal(10**5000)}, "the id of a resource is text or a whole number"),
        ({"id": Decimal("12.0")}, "the id of a resource is text or a whole number"),
        ({"id": object()}, "the id of a resource is text or a whole number"),
        ({"busy": "no"}, r"busy= is True or False, and not 'no': write .*busy=bool\(row.busy\)"),
        ({"busy": None}, "busy= is True or False, and not None"),
        ({"busy": 2}, "busy= is True or False, and not 2"),
        ({"status": ""}, "a status is text of 1 to 100 characters without NUL"),
        ({"status": "x" * 101}, "a status is text of 1 to 100 characters"),
        ({"status": None}, "a status is text of 1 to 100 characters"),
        ({"status": "a\0"}, "a status is text of 1 to 100 characters"),
        ({"since": "yesterday"}, "since= is seconds since 1970 or a datetime with a time zone"),
        ({"since": float("nan")}, "since= is seconds since 1970"),
        ({"since": True}, "since= is seconds since 1970"),
        ({"since": datetime(2026, 1, 1)}, "has no time zone: give a datetime with one"),  # noqa: DTZ001
        ({"since": 1.7e12}, "is beyond the year 5000: give seconds since 1970, not milliseconds"),
        ({"needs": ["srv-1"]}, r"a list of \(kind, id\) pairs, as needs=\[server.of\(row.server"),
        ({"needs": "server:1"}, r"needs= has 'server:1': give it a list of \(kind, id\) pairs"),
        ({"needs": ("server", "1")}, r"needs= has \('server', '1'\): give it a list"),
        ({"needs": None}, r"needs= has None: give it a list of"),
        ({"needs": [("server", None)]}, "the id of a resource is"),
        ({"needs": [("server", "a", "b")]}, r"give it a list of \(kind, id\) pairs"),
    ],
)
def test_a_wrong_found_is_refused(fields: dict[str, Any], sentence: str):
    """Where it is made, so that the traceback shows the line."""
    with pytest.raises(InvalidArgumentsError, match=sentence):
        Found(**{"id": "a", "status": "creating", **fields})


def test_ids_and_times_may_have_several_types():
    """Numbers and UUIDs are ids as text; a datetime with a zone is seconds."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert Found(7, "creating").id == "7"
    assert Found(UUID(int=1), "creating").id == str(UUID(int=1))
    assert Found(Decimal(12), "creating").id == "12"
    assert [Found("a", "creating", busy=bit).busy for bit in (0, 1)] == [False, True]
    assert Found("a", "creating", since=moment).since == moment.timestamp()
    assert Found("a", "creating", needs=[None, ("server", 3)]).needs == (("server", "3"),)


@pytest.mark.parametrize("reason", [3, None, b"gone", ValueError("gone")])
def test_the_reason_of_a_failure_is_text(reason: Any):
    """It stands in records and logs."""
    for answer in (Absent, Broken):
        said = f"the reason of {answer.__name__} is text, and not"
        with pytest.raises(InvalidArgumentsError, match=said):
            answer(reason)


@pytest.mark.parametrize("wrong", [b"a", ["a"], ""])
def test_the_id_of_a_needed_resource_is_checked_where_it_is_named(svc: Service, wrong: Any):
    """`server.of(...)` takes what `Found` takes, and None for nothing."""
    server = svc.kind("server")

    assert server.of(None) is None
    assert server.of(7) == ("server", "7")
    with pytest.raises(
        InvalidArgumentsError, match="the id of a resource is text or a whole number"
    ):
        server.of(wrong)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (lambda after: 5, "returned a int: it returns a list of Found"),
        (lambda after: "abc", "it returns a list of Found"),
        (lambda after: {"a": 1}, "it returns a list of Found"),
        (lambda after: ["a"], "in its list: all are Found"),
        (lambda after: [Found("a", "creating"), None], "in its list: all are Found"),
        (
            lambda after: [Found("a", "creating"), Found("a", "creating")],
            "returned 'a' twice in one page",
        ),
        (
            lambda after: [Found("a", "creating"), Found("b", "creating")][after is not None :],
            r"returned 'b' itself: it returns those behind it \(WHERE id > \?\)",
        ),
        (
            lambda after: [Found("b" if after == "a" else "a", "creating")],
            "has returned '[ab]' at the end of two pages",
        ),
    ],
)
async def test_a_find_that_repeats_or_returns_nonsense_ends_the_pass_of_its_kind(
    world: World, svc: Service, page: Any, sentence: str
):
    """It does not go round for ever, and the sentence says what is wrong."""
    shares = Shares(world, svc)
    shares.finds = lambda _n: page(shares.pages[-1][0])
    shares.rows = {name: _row() for name in "ab"}
    life = await world.start(svc)

    report = await settle(life)

    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(report.broken["share"])
    assert len(shares.pages) < 20


def _row() -> Any:
    return ShareRow("creating", 1.0)


async def test_a_find_that_forgets_ids_loses_nothing(world: World, svc: Service):
    """What a page does not show is found by a later pass; what was found and is gone is not
    touched.
    """
    shares = Shares(world, svc)
    shares.add("a", "b")
    shares.finds = lambda n: [Found("a", "creating", since=1.0)] if n == 1 else None
    life = await world.start(svc)

    first = results(await settle(life))
    second = results(await settle(life))

    assert "available" in {result.written for result in first.values()}
    assert shares.statuses() == {"a": "available", "b": "available"}
    assert set(first) | set(second) == {"a", "b"}


async def test_10000_needs_and_strange_ids_are_fine(world: World, svc: Service):
    """Colons, line breaks, quotes and other alphabets in ids; needs that nobody has heard of."""
    server = Shares(world, svc, "server")
    shares = Shares(world, svc, after=server.kind)
    strange = ["a:b:c", "a\nb", "'; DROP TABLE finding --", "ü\u2603", " ", "x" * LONGEST_RESOURCE]
    shares.add(*strange)
    shares.add("many", needs=tuple(server.kind.of(n) for n in range(10_000)))
    shares.answers = lambda name, n: Wait(1) if n == 1 else Settled("available")
    life = await world.start(svc)

    assert set(results(await settle(life))) == {*strange, "many"}
    await world.until(lambda: set(shares.statuses().values()) == {"available"}, within_s=60)

    assert sorted(shares.asks()) == sorted([*strange, "many"] * 2)
    details = [row["detail"] for row in world.incidents("resource_settled")]
    assert len(details) == 7


async def test_facts_may_be_anything_and_secrets_are_not_told(world: World, svc: Service):
    """`write` gets them as they are; events and results tell numbers, and how much the rest is."""
    shares = Shares(world, svc)
    shares.add("a")
    facts = {"password": "s3cret-password", "size": 3, "where": object(), "none": None}
    shares.answers = lambda _id, _n: Settled("available", **facts)
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert shares.rows["a"].facts == facts
    assert result.facts == {
        "password": "(15 characters)",
        "size": "3",
        "where": "(object)",
        "none": "None",
    }
    assert "s3cret" not in repr([fields for _, fields in life.events])


async def test_plain_hooks_run_in_threads(world: World, svc: Service):
    """`find`, `write`, probe and delete: none blocks the loop."""
    kind = svc.kind("share")
    records = {"a": "creating", "d": "deleting"}
    threads: set[int] = set()

    @kind.find
    def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        threads.add(threading.get_ident())
        ids = [one for one in sorted(records) if one > (after or "")]
        return [Found(one, records[one]) for one in ids if records[one] in kind.rules][:limit]

    @kind.write
    def write(ctx: Context, found: Found, status: str, facts: Mapping[str, object]) -> bool:
        threads.add(threading.get_ident())
        records[found.id] = status
        return True

    @kind.probe("creating", failed="error")
    def probe(ctx: Context, found: Found) -> Absent:
        threads.add(threading.get_ident())
        return Absent()

    @kind.delete("deleting", done="deleted", failed="error_deleting")
    def delete(ctx: Context, found: Found) -> None:
        threads.add(threading.get_ident())

    life = await world.start(svc)
    await settle(life)

    assert records == {"a": "error", "d": "deleted"}
    assert threading.get_ident() not in threads


async def test_hooks_may_be_methods_of_an_included_object(world: World, svc: Service):
    """Beside its rpc methods; each is called on that object."""
    kind = svc.kind("share")

    class Manager:
        def __init__(self) -> None:
            self.records = {"a": "creating", "d": "deleting", "r": "restoring"}

        @kind.find
        async def find(self, ctx: Context, *, after: str | None, limit: int) -> list[Found]:
            ids = [one for one in sorted(self.records) if one > (after or "")]
            return [Found(one, self.records[one]) for one in ids if self.records[one] in kind.rules]

        @kind.write
        def write(
            self, ctx: Context, found: Found, status: str, facts: Mapping[str, object]
        ) -> bool:
            self.records[found.id] = status
            return True

        @kind.probe("creating", failed="error")
        @kind.probe("extending", failed="extending_error")
        async def probe(self, ctx: Context, found: Found) -> Settled:
            return Settled("available")

        @kind.delete("deleting", done="deleted", failed="error_deleting")
        async def delete(self, ctx: Context, found: Found) -> None:
            pass

    kind.mark(restoring="error")
    manager = Manager()
    svc.include(manager)
    life = await world.start(svc)

    await settle(life)

    assert manager.records == {"a": "available", "d": "deleted", "r": "error"}


async def test_a_context_of_a_rule_says_what_it_is(world: World, svc: Service):
    """The token, no request: what only requests can do is refused with a sentence."""
    shares = Shares(world, svc)
    shares.add("a")
    seen: list[Any] = []
    kind = svc.kind("other", after="share")
    kind.mark(x="error")

    @kind.find
    async def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        seen.extend([ctx.fence, ctx.host])
        return [] if after else [Found("o", "x")]

    @kind.write
    async def write(ctx: Context, found: Found, status: str, facts: Mapping[str, object]) -> bool:
        seen.extend([ctx.fence, ctx.host])
        with pytest.raises(Exception, match="rule mark of kind other"):
            await ctx.hold("x", "y", at_most="1m")
        return True

    life = await world.start(svc, host="node-1")
    assert results(await settle(life))["o"].written == "error"
    assert sorted(seen, key=str) == [1, None, None, "node-1", "node-1", "node-1"]
