"""`Service(context_keys=...)`: ids of the caller's context in rows, events, log lines and spans."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

import pytest
from opentelemetry import trace

from gracekit import Context, DeclarationError, NoCapacity, Service
from gracekit.recovery.decisions import Retry
from gracekit.telemetry import RequestFilter
from gracekit.telemetry.logs import JsonFormatter, TextFormatter
from tests.service.kit import Doors, World
from tests.service.test_ops_resources import listed, shown
from tests.service.test_traces import Recorder

pytestmark = pytest.mark.looptime

KEYS = ("request_id", "user_id", "project_id")
CALLER: Mapping[str, Any] = {"request_id": "req-1", "user_id": "ann", "roles": ["admin"]}
IDS = {"request_id": "req-1", "user_id": "ann"}
logger = logging.getLogger("app")


@pytest.fixture
def svc() -> Service:
    return Service("compute", context_keys=KEYS)


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What is logged, as text."""
    yield from handled(TextFormatter())


@pytest.fixture
def entries() -> Iterator[StringIO]:
    """What is logged, as JSON."""
    yield from handled(JsonFormatter())


def handled(formatter: logging.Formatter) -> Iterator[StringIO]:
    stream, root = StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(formatter)
    handler.addFilter(RequestFilter())
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def about(life: Any, task_id: str) -> dict[str, Mapping[str, Any]]:
    """The last fields of each event about a task, by name."""
    return {name: fields for name, fields in life.events if fields.get("task_id") == task_id}


async def test_the_row_and_the_listings_have_the_keys(world: World, svc: Service):
    """Keys that the caller's context has not are left out; a task with none of them has NULL."""

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="a", context=CALLER).call(work)
    await client.prepare(request_id="b", context={"roles": ["admin"]}).call(work)

    assert json.loads(world.task("a")["shown_context"]) == IDS
    assert world.task("b")["shown_context"] is None
    assert (await shown(world, life, "a"))["task"]["shown_context"] == IDS
    assert (await shown(world, life, "b"))["task"]["shown_context"] is None
    assert await listed(world, life, states=("all",)) == {"work": None}


async def test_each_event_about_the_task_has_the_keys(world: World, svc: Service):
    """From its start in one process to its end in another, orders and recovery included."""
    doors = Doors()

    @svc.rpc(on_interrupt="probe")
    async def work(ctx: Context) -> None:
        await doors.pass_(ctx.attempt)

    @work.probe
    async def look(ctx: Context) -> Retry:
        return Retry()

    first = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="a", context=CALLER).cast(work)
    await doors.wait(1)
    await first.crash()
    life = await world.start(svc, startup_reconciliation_wait_seconds=0)
    await doors.wait(2)
    await world.verb(life, "cancel", task_id="a", by="op", reason="wrong")
    await life.hears("task.finished")
    await world.settle()

    seen = about(first, "a") | about(life, "a")
    assert seen.keys() >= {"task.started", "task.settled", "task.ordered", "task.finished"}
    assert [name for name, fields in seen.items() if not IDS.items() <= fields.items()] == []


async def test_ends_of_every_kind_have_the_keys(world: World, svc: Service):
    """Failed, parked, refused, and handed over by a drain."""
    doors = Doors()

    @svc.rpc
    async def fail(ctx: Context) -> None:
        raise LookupError("no disk of req-1")

    @svc.rpc
    async def place(ctx: Context) -> None:
        raise NoCapacity("no room")

    @svc.rpc
    async def stay(ctx: Context) -> None:
        await doors.pass_("stay")

    life = await world.start(svc, use_pending_state=True, drain_timeout_s=1.0)
    client = (await world.client(svc)).prepare(context=CALLER)
    for name in ("fail", "place", "gone", "stay"):
        await client.prepare(request_id=name).cast(name)
    await doors.wait(1)
    await life.hears("task.rejected")
    await life.drain()

    names = ("task.failed", "task.parked", "task.rejected", "task.awaited", "task.handed_over")
    for name in names:
        assert IDS.items() <= life.told(name)[0].items(), name
    rows = world.rows("SELECT method, shown_context FROM task")
    assert {row["method"]: json.loads(row["shown_context"]) for row in rows} == dict.fromkeys(
        ("fail", "place", "gone", "stay"), IDS
    )


async def test_lines_of_a_handler_carry_the_keys(
    world: World, svc: Service, lines: StringIO, entries: StringIO
):
    """In the loop, in a worker thread, and in a hook; a line that has such a key keeps its own."""

    @svc.rpc
    async def work(ctx: Context) -> None:
        logger.info("in the loop")

    @svc.rpc
    def plain(ctx: Context) -> None:
        logger.info("in a thread", extra={"user_id": "bob"})

    await world.start(svc)
    client = (await world.client(svc)).prepare(context=CALLER, timeout=5)
    await client.prepare(request_id="a").call(work)
    await client.prepare(request_id="b").call(plain)
    logger.info("outside")

    text = lines.getvalue()
    assert "app: in the loop task_id=a request_id=req-1 user_id=ann\n" in text
    assert "app: in a thread task_id=b request_id=req-1 user_id=ann\n" in text
    assert "app: outside\n" in text
    started = "task.started task_id=a method=work lane=requests attempt=1"
    assert f"{started} request_id=req-1 user_id=ann\n" in text
    found = [json.loads(line) for line in entries.getvalue().splitlines()]
    said = {entry["message"]: entry for entry in found}
    assert IDS.items() <= said["in the loop"].items()
    assert said["in a thread"]["user_id"] == "bob"
    assert "gracekit_context" not in said["in the loop"]
    assert not IDS.keys() & said["outside"].keys()
    assert IDS.items() <= next(e for e in found if e.get("event") == "task.started").items()


async def test_own_formats_can_use_the_keys(world: World, svc: Service):
    """By name with a default, or all of them as text."""
    form = "%(message)s [%(request_id)s] <%(gracekit_context)s>"
    shown_by = handled(logging.Formatter(form, defaults={"request_id": "-"}))
    stream = next(shown_by)

    @svc.rpc
    async def work(ctx: Context) -> None:
        logger.info("inside")

    await world.start(svc)
    await (await world.client(svc)).prepare(context=CALLER).call(work)
    logger.info("outside")
    list(shown_by)

    said = stream.getvalue().splitlines()
    assert "inside [req-1] <request_id=req-1 user_id=ann>" in said
    assert "outside [-] <>" in said


async def test_the_span_of_an_attempt_has_the_keys(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """As attributes, under names of gracekit's own."""
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorder)

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    await world.start(svc)
    await (await world.client(svc)).prepare(context=CALLER).call(work)

    (span,) = recorder.named("work")
    assert span.attributes["gracekit.context.request_id"] == "req-1"
    assert "gracekit.context.project_id" not in span.attributes


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("x" * 300, "x" * 255),
        ("req-1\nERROR forged \x1b[31m\u202e", "req-1\\nERROR forged \\x1b[31m\\u202e"),
        (17, "17"),
        (1.5, "1.5"),
        (True, "True"),
        (None, None),
        ("", None),
        ([1], None),
        ({"a": 1}, None),
    ],
)
async def test_a_value_cannot_break_a_log_line(
    world: World, svc: Service, lines: StringIO, value: object, kept: str | None
):
    """It is one printable text of 255 characters at most, wherever it is shown; what is no scalar
    is left out.
    """

    @svc.rpc
    async def work(ctx: Context) -> None:
        logger.info("inside")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="a", context={"request_id": value}).call(work)

    expected = None if kept is None else {"request_id": kept}
    assert (await shown(world, life, "a"))["task"]["shown_context"] == expected
    (line,) = (line for line in lines.getvalue().splitlines() if "inside" in line)
    assert line.isprintable()
    assert ("request_id" in line) is (kept is not None)


async def test_without_keys_nothing_is_shown(world: World, lines: StringIO):
    """The default: no row, event or line has anything of the caller's context."""
    svc = Service("compute")

    @svc.rpc
    async def work(ctx: Context) -> None:
        logger.info("inside")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="a", context=CALLER).call(work)

    assert world.task("a")["shown_context"] is None
    assert not IDS.keys() & about(life, "a")["task.finished"].keys()
    assert "req-1" not in lines.getvalue()


async def test_a_run_that_has_other_keys_shows_what_the_row_has(world: World):
    """The keys are copied at acceptance, so a later version of the service does not change them."""
    doors = Doors()

    def service(keys: tuple[str, ...]) -> Service:
        svc = Service("compute", context_keys=keys)

        @svc.rpc(on_interrupt="retry")
        async def work(ctx: Context) -> None:
            assert ctx.shown_context == IDS
            await doors.pass_(ctx.attempt)

        return svc

    first = await world.start(service(KEYS))
    client = await world.client(first.runtime.service)
    await client.prepare(request_id="a", context=CALLER).cast("work")
    await doors.wait(1)
    await first.crash()
    life = await world.start(service(()), startup_reconciliation_wait_seconds=0)
    await doors.wait(2)

    assert IDS.items() <= about(life, "a")["task.started"].items()
    doors.open(1, 2)


# -- declarations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("request_id", "context_keys='request_id' must be a tuple of at most 10 names"),
        ({"request_id"}, "must be a tuple of at most 10"),
        (None, "must be a tuple of at most 10"),
        (("",), r"context_keys has '', which cannot .*: write ASCII"),
        (("request id",), r"has 'request id', which cannot .*: write ASCII"),
        ((7,), r"context_keys has 7, which cannot .*: write ASCII"),
        (tuple(f"k{n}" for n in range(11)), "must be a tuple of at most 10"),
        (("task_id",), r"has 'task_id', .*: log lines use that name"),
        (("message",), r"has 'message', .*: log lines use that name"),
        (("timestamp",), r"has 'timestamp', .*: log lines use that name"),
        (("trace_id",), r"has 'trace_id', .*: log lines use that name"),
        (("reason",), r"has 'reason', .*: log lines use that name"),
        (("lineno",), r"has 'lineno', .*: log lines use that name"),
        (("gracekit_method",), r"has 'gracekit_method', .*: log lines use that name"),
    ],
)
def test_wrong_keys_are_refused_where_they_are_declared(keys: Any, why: str):
    """With the value, the rule and what to do."""
    with pytest.raises(DeclarationError, match=why):
        Service("compute", context_keys=keys)
