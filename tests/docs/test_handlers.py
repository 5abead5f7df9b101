"""What docs/handlers.md says of handlers: its blocks run, and its tables agree with the code."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import decimal
import enum
import importlib
import inspect
import ipaddress
import re
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import anyio.from_thread
import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    DeclarationError,
    MethodTimeoutError,
    NoCapacity,
    NoSuchMethodError,
    Service,
    UnsupportedVersionError,
    rpc_method,
)
from gracekit.config.choices import InDrain, OnInterrupt, choices_of
from gracekit.config.settings import SETTINGS, Settings
from gracekit.config.values import format_duration
from gracekit.errors import UnserialisableError
from gracekit.recovery.decisions import Done, Fail, Retry, Wait
from gracekit.request.lanes import can_accept
from gracekit.rpc.method_options import OPTIONS, MarkOptions, OpsOptions, RpcOptions, options_from
from gracekit.rpc.oslo_wire import decode_request
from gracekit.testing import InMemoryService, TaskState, run
from gracekit.tracker.task import Reason
from tests.docs.pages import Page, Program, running
from tests.docs.pages import run as run_python

PAGE = Page("handlers.md")


class Color(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 8


class Point(NamedTuple):
    x: int
    y: int


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a block of the page by its name."""
    PAGE.make_importable(tmp_path, monkeypatch)
    return importlib.import_module


def tables(heading: str) -> list[dict[str, list[str]]]:
    """The tables of a section: the further cells of each row by its first."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE.text, flags=re.MULTILINE)[1]
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    found: list[dict[str, list[str]]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        found.append({first: cells for first, *cells in rows[2:]})
    return found


def code(cell: str) -> str:
    """What a cell has between its first backticks."""
    match = re.search(r"`([^`]+)`", cell)
    assert match is not None, cell
    return match[1]


# -- tables -------------------------------------------------------------------------------------


def test_options_and_their_defaults_are_those_of_the_code():
    """Where the page names a setting as the default, it is one, and has the value that is shown."""
    marks, ops, places, service = tables("Options")
    defaults = options_from()
    known_marks = MarkOptions.__annotations__.keys()
    known_ops = OpsOptions.__annotations__.keys() - RpcOptions.__annotations__.keys()
    known_places = RpcOptions.__annotations__.keys() - known_marks
    shown = ((marks, known_marks), (ops, known_ops), (places, known_places))
    assert {code(name) for table in (marks, ops, places) for name in table} == OPTIONS.keys() - {
        "ops"
    }
    for options, known in shown:
        assert {code(name) for name in options} == known
        for name, (default, _) in options.items():
            value = getattr(defaults, OPTIONS[code(name)])
            assert default == shown_default(default, value), name

    parameters = inspect.signature(Service).parameters
    assert {code(name) for name in service} == set(parameters) - {"unknown"}
    assert service["`version`"][0] == f'`"{parameters["version"].default}"`'


def shown_default(cell: str, value: object) -> str:
    """How the page shows a default; None is none, or a setting with its own default."""
    setting = re.fullmatch(r"`(\w+)` \(.+\)", cell)
    if value is None and setting is not None:
        name = setting[1] if setting[1] in SETTINGS else f"{setting[1]}_s"
        own = getattr(Settings(), name)
        return f"`{setting[1]}` ({format_duration(own) if isinstance(own, float) else own})"
    if value in (None, ()) or isinstance(value, bool):
        return "no" if value is False else "none"
    if isinstance(value, int):
        return f"`{value}`"
    return f'`"{format_duration(value) if isinstance(value, float) else value}"`'


def test_words_of_options_are_those_of_the_code():
    """Each policy has its row, and the other word of `in_drain` is explained."""
    (policies,) = tables("When the process stops")
    assert tuple(code(row).strip('"') for row in policies) == choices_of(OnInterrupt)
    (answers,) = tables("Probes")
    assert [code(row).split("(")[0] for row in answers] == [
        kind.__name__ for kind in (Done, Retry, Fail, Wait)
    ]
    assert set(choices_of(InDrain)) == {"answer", "refuse"}


def test_context_is_shown_whole():
    """Each public attribute and method of the Context has a row, and there is no other row."""
    (members,) = tables("The context")
    named = set(re.findall(r"(?:\bctx|\bContext)\.(\w+)", " ".join(members)))
    public = {name for name in vars(Context) if not name.startswith("_")}
    assert named == public | {"get"}
    waits = {row for row in members if row.startswith("`await ctx.")}
    assert all(
        inspect.iscoroutinefunction(getattr(Context, code(r)[10:].split("(")[0])) for r in waits
    )


def test_reasons_of_the_errored_hook_are_those_of_the_code():
    """And `hold`, which no task has."""
    (reasons,) = tables("The errored hook")
    assert {code(row) for row in reasons} == {reason.value for reason in Reason} | {"hold"}


def test_limits_name_settings_with_their_defaults():
    """Also those of the text: threads, and what the hooks may take."""
    for name, value in re.findall(r"`(\w+)` \((\d+(?: ?s|d| days)?)[,)]", PAGE.text):
        setting = name if name in SETTINGS else f"{name}_s"
        own = can_accept(Settings(), []) if name == "max_accepted" else getattr(Settings(), setting)
        if isinstance(own, float):
            assert format_duration(own) in {value.replace(" ", ""), "1m"}, name
        else:
            assert str(own) == value, name
    assert Settings().handover_grace_s == 2.0
    assert Settings().retention_s == 7 * 86400


def test_values_arrive_as_the_table_says():
    """Each expression of the table is sent, arrives as it shows, and comes back as the same."""
    svc = Service("echo")
    arrived: list[Any] = []

    @svc.rpc
    async def echo(ctx: Context, value: Any) -> Any:
        arrived.append(value)
        return arrived[-1]

    names = {
        "datetime": dt.datetime,
        "UTC": dt.UTC,
        "date": dt.date,
        "time": dt.time,
        "timedelta": dt.timedelta,
        "UUID": uuid.UUID,
        "Decimal": decimal.Decimal,
        "IPv4Address": ipaddress.IPv4Address,
        "Point": Point,
    }
    (table,) = tables("What arrives")
    pairs: list[tuple[Any, Any]] = [(Color.RED, "red"), (Size.BIG, 8)]
    for sent, (got,) in table.items():
        for one in re.findall(r"`([^`]+)`", sent):
            if one not in {"StrEnum", "IntEnum"}:
                value = eval(one, names)
                pairs.append((value, value if got == "the same" else eval(code(got))))

    async def main() -> None:
        async with InMemoryService(svc) as one:
            for value, expected in pairs:
                result = await one.call(echo, value=value)
                assert (arrived[-1], type(arrived[-1])) == (expected, type(expected))
                assert result == expected
            for refused in (
                Path("/"),
                b"\xff",
                float("nan"),
                {(1, 2): 3},
                object(),
            ):
                with pytest.raises(UnserialisableError):
                    await one.call(echo, value=refused)

    run(main())


# -- results and exceptions ---------------------------------------------------------------------


def test_result_after_the_timeout_counts():
    """The caller has got the error, and a call under the same id gets the result."""
    svc = Service("stubborn")

    @svc.rpc(timeout="1s")
    async def go_on(ctx: Context) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "done"

    async def main() -> None:
        async with InMemoryService(svc) as one:
            pending = one.start_call(go_on)
            with pytest.raises(MethodTimeoutError):
                await pending
            await one.settled()
            assert one.state_of(pending.request_id) is TaskState.SUCCEEDED
            assert await one.prepare(request_id=pending.request_id).call(go_on) == "done"

    run(main())


class UnknownError(Exception):
    """Of no class that a client rebuilds."""


class KnownError(Exception):
    """Named by the service."""


FAULTS = {
    "data": [1],
    "object": object(),
    "large": "x" * 2_000_000,
    "builtin": ValueError("v"),
    "known": KnownError("k"),
    "unknown": UnknownError("u"),
    "group": ExceptionGroup("g", [ValueError("v")]),
    "exit": SystemExit(3),
    "capacity": NoCapacity("none is free"),
}


async def fail_by(ctx: Context, how: str) -> Any:
    """A handler that ends as it is asked to."""
    if isinstance(what := FAULTS.get(how), BaseException):
        raise what
    if how == "long":
        await asyncio.sleep(10)
    return what


def test_callers_get_what_the_table_says():
    """State and class of each row; what is raised for a builtin has the remote traceback in its
    notes.
    """
    svc = Service("faults", exceptions={f"{KnownError.__module__}.KnownError": KnownError})
    fail = svc.rpc(timeout="5s")(fail_by)
    (table,) = tables("Results and exceptions")
    rows = {
        "the handler returns plain data": ["data"],
        "it returns something else, or more than about 1 MiB": ["object", "large"],
        "it raises a builtin exception, such as `ValueError`": ["builtin"],
        "it raises a class that `Service(exceptions=…)` names": ["known"],
        "it raises any other class, an `ExceptionGroup` or `SystemExit`": [
            "unknown",
            "group",
            "exit",
        ],
        "it raises `NoCapacity`": ["capacity"],
        "it raises what `retry_on` names, or `TryAgain`": [],  # tests/service/test_tries.py
        "it takes longer than `timeout`": ["long"],
        'the process dies, and `on_interrupt` is `"error"`': ["crash"],
        "an operator cancels the task": [],  # tests/service/test_orders.py
        "the names of the arguments do not fit": [],  # below
        "an argument does not fit its annotation": [],  # tests/service/test_typed.py
        "no such method, version or namespace": [],  # below
    }
    assert rows.keys() == table.keys()
    same = {"data": list, "builtin": ValueError, "known": KnownError}

    async def main() -> None:
        async with InMemoryService(svc) as one:
            for row, kinds in rows.items():
                for how in kinds:
                    await check(one, how, *table[row])

    async def check(one: InMemoryService, how: str, state: str, caller: str) -> None:
        pending = one.start_call(fail, how="long" if how == "crash" else how)
        if how == "crash":
            await one.pass_time(1)
            await one.crash()
            await one.start()
        (got,) = await asyncio.gather(pending, return_exceptions=True)
        shown = {"data": "the data", "builtin": "the same class", "known": "the same class"}
        assert shown.get(how, f"`{type(got).__name__}`") in caller, how
        assert how not in same or type(got) is same[how]
        assert how != "builtin" or "remote traceback" in "".join(got.__notes__)
        assert one.state_of(pending.request_id) is TaskState[re.split(r"\W", state)[0]], how

    run(main())


def test_signatures_are_judged_as_the_page_says():
    """Wrong arguments get an InvalidArgumentsError, which is a TypeError; wrong declarations
    fail.
    """
    svc = Service("signatures")

    @svc.rpc
    async def take(ctx: Context, name: str, width: int = 200, **more: Any) -> list[Any]:
        return [name, width, more]

    @svc.rpc
    def plain(ctx: Context, vm: str) -> bool:
        anyio.from_thread.run(partial(ctx.hold, "migration", vm, at_most="5m"))
        return anyio.from_thread.run(ctx.end_hold, "migration", vm)

    async def main() -> None:
        async with InMemoryService(svc) as one:
            assert await one.call(take, name="a", more=1) == ["a", 200, {"more": 1}]
            assert await one.call(plain, vm="vm-1") is True
            with pytest.raises(TypeError, match="missing a required argument"):
                await one.call("take")
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                await one.call("plain", vm="vm-1", other=1)
            with pytest.raises(NoSuchMethodError):
                await one.call("plane", vm="vm-1")
            with pytest.raises(UnsupportedVersionError):
                await one.prepare(namespace="other").call("plain", vm="vm-1")

    run(main())
    for declare in wrong_functions():
        with pytest.raises(DeclarationError):
            svc.rpc(declare)


def wrong_functions() -> Iterator[Callable[..., Any]]:
    async def positional(ctx: Context, name: str, /) -> None: ...
    async def several(ctx: Context, *names: str) -> None: ...
    async def _private(ctx: Context) -> None: ...
    async def generator(ctx: Context) -> Any:
        yield 1

    yield from (positional, several, _private, generator)


# -- blocks -------------------------------------------------------------------------------------


def test_render_goes_on_after_a_drain_and_ops_answers(loaded):
    """The first block: tasks for one album run in turn, and a drain stops at a safe point."""
    thumbs = loaded("thumbs")

    async def main() -> None:
        async with InMemoryService(thumbs.svc) as one:
            one.interrupt_at(1, of=thumbs.render)
            pending = one.start_call(thumbs.render, album="a", pictures=["p", "q"])
            report = await one.wait_stopped()
            assert report.handed_over == [pending.request_id]
            await one.start()
            assert await pending == 2
            assert await one.call(thumbs.is_draining) is False
            assert len(await one.call(thumbs.checksum, path=thumbs.__file__)) == 64

    run(main())


async def test_decorated_function_can_be_called_as_in_a_unit_test():
    """Nothing of gracekit runs then."""
    svc = Service("direct")

    @svc.rpc
    async def double(ctx: Context, n: int) -> int:
        return 2 * n

    context: Any = None
    assert await double(context, n=4) == 8


def test_client_rebuilds_the_class_that_the_service_names(loaded):
    """By module and class, as the service raises it."""
    disks = loaded("disks")

    async def main() -> None:
        async with InMemoryService(disks.svc) as one:
            with pytest.raises(disks.NoSpace, match="200 GiB"):
                await one.call(disks.allocate, gib=200)

    run(main())


def test_safe_points_are_where_the_next_start_goes_on(loaded):
    """With a function of the cursor, and without a loop."""
    pages = loaded("pages")

    async def main() -> None:
        async with InMemoryService(pages.svc) as one:
            one.interrupt_at(2, of=pages.fetch)
            pending = one.start_call(pages.fetch)
            await one.wait_stopped()
            assert pages.stored == ["page 1", "page 2"]
            await one.start()
            assert await pending == 5
            assert pages.stored == [f"page {number}" for number in range(1, 6)]

            pages.stored.clear()
            one.interrupt_at(1, of=pages.publish)
            pending = one.start_call(pages.publish)
            await one.wait_stopped()
            await one.start()
            assert await pending == ["uploaded", "announced"]

    run(main())


def test_stop_at_a_safe_point_is_no_interruption():
    """Whatever the policy: a task that must not be repeated goes on, too."""
    svc = Service("careful")
    done: list[int] = []

    @svc.rpc(on_interrupt="error")
    async def work(ctx: Context) -> int:
        async for n in ctx.steps(range(3)):
            done.insert(n, n)
        return ctx.attempt

    @svc.rpc
    async def twice(ctx: Context) -> None:
        for _ in range(2):
            async for _ in ctx.steps([1]):
                pass

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.interrupt_at(2)
            pending = one.start_call(work)
            await one.wait_stopped()
            await one.start()
            assert (await pending, done) == (2, [0, 1, 2])
            with pytest.raises(DeclarationError, match="two loops"):
                await one.call(twice)

    run(main())


def test_probe_is_given_the_arguments_as_the_handler_sees_them_and_decides(loaded):
    """Each answer ends the task as the table says; `on_start` has run before."""
    volumes = loaded("volumes")
    svc = volumes.make_service()
    (create,) = (method for method in svc.methods if method.name == "create")
    cloud: dict[str, str] = create.handler.__self__.cloud
    asked: list[Mapping[str, Any]] = []
    ids: list[Any] = []
    probe = create.probe_hook

    async def noted(ctx: Context, **args: Any) -> Any:
        asked.append(args)
        assert (ctx.fence is None, ctx.attempt, ctx.version) == (False, 1, "1.3")
        assert (ctx.deadline, ctx.request_id) in {(None, one.request_id) for one in ids}
        return await probe(ctx, **args)

    async def slow(ctx: Context, volume: str, gib: int = 1) -> str:
        await asyncio.sleep(100 if ctx.attempt == 1 else 0)
        return f"attempt {ctx.attempt}"

    create.probe_hook, create.handler = noted, slow

    async def main() -> None:
        async with InMemoryService(svc) as one:
            caller = one.prepare(namespace="storage", version="1.2", timeout="1h")
            ids[:] = [caller.start_call("create", volume=name) for name in ("a", "b", "c")]
            await one.pass_time(1)
            await one.crash()
            cloud.update(b="building", c="broken")
            await one.start()
            assert await ids[0] == "attempt 2"
            with pytest.raises(Exception, match="the cloud has lost it"):
                await ids[2]
            cloud["b"] = "ready"
            assert await ids[1] == "b is ready"
            assert {args["volume"] for args in asked} == {"a", "b", "c"}
            assert {args["gib"] for args in asked} == {1}
            with pytest.raises(UnsupportedVersionError):
                await one.prepare(namespace="storage", version="1.4").call("count")

    run(main())


def test_errored_hook_is_called_with_arguments_and_reason(loaded, capsys):
    """A probe that answers `Wait` for longer than `max_wait` ends the task as `gave_up`."""
    volumes = loaded("volumes")
    svc = volumes.make_service()
    (create,) = (method for method in svc.methods if method.name == "create")
    create.handler.__self__.cloud["v"] = "building"

    called: list[Mapping[str, Any]] = []
    errored = create.errored_hook

    async def noted(ctx: Context, **args: Any) -> None:
        called.append(args)
        assert (ctx.fence, ctx.attempt, ctx.version) == (None, 1, "1.3")
        await errored(ctx, **args)

    async def slow(ctx: Context, volume: str) -> None:
        await asyncio.sleep(100)

    create.errored_hook, create.handler = noted, slow

    async def main() -> None:
        async with InMemoryService(svc) as one:
            caller = one.prepare(namespace="storage", timeout="5h")
            pending = caller.start_call("create", volume="v")
            await one.pass_time(1)
            await one.crash()
            await one.start()
            with pytest.raises(Exception, match="gave_up"):
                await pending
            await one.settled()
            assert f"v: gave_up, request {pending.request_id}" in capsys.readouterr().out
            assert called == [{"volume": "v", "gib": 1, "reason": "gave_up"}]  # gib by default

    run(main())


def test_function_can_have_a_namespace_and_a_version_of_its_own():
    """For a method of a class, the options of `include` count, and a mark refuses them."""
    svc = Service("versions", version="2.0")
    options: Any = {"namespace": "storage", "version": "1.3"}

    @svc.rpc(namespace="storage", version="1.3")
    async def create(ctx: Context) -> str:
        return ctx.version

    class Volumes:
        @rpc_method
        async def count(self, ctx: Context) -> str:
            return ctx.version

    with pytest.raises(DeclarationError, match="is said where the object is served"):
        rpc_method(**options)(Volumes.count.handler)
    volumes = Volumes()
    svc.include(volumes)
    assert (volumes.count.namespace, volumes.count.version) == (None, "2.0")

    async def main() -> None:
        async with InMemoryService(svc) as one:
            assert [await one.call(create), await one.call(volumes.count)] == ["1.3", "2.0"]
            storage = one.prepare(namespace="storage")
            assert await storage.prepare(version="1.2").call("create") == "1.2"
            with pytest.raises(UnsupportedVersionError):
                await storage.prepare(version="1.4").call("create")

    run(main())


def test_probe_of_a_hold_gets_the_arguments_of_the_request_that_opened_it(loaded):
    """Its context has no caller, and the id that the page names."""
    migration = loaded("migration")
    (expect,) = (one for one in migration.svc.methods if one.name == "expect")
    called: list[tuple[str, dict[str, Any], Mapping[str, Any]]] = []

    async def probe(ctx: Context, **args: Any) -> Done:
        called.append((ctx.request_id, dict(ctx), args))
        return Done()

    expect.probe_hook = probe

    async def main() -> None:
        async with InMemoryService(migration.svc) as one:
            caller = one.prepare(context={"user_id": "ann"})
            await caller.call(migration.expect, vm="vm-1")
            await one.crash()
            await one.start()
            await one.hears("hold.ended")

    run(main())
    assert called == [("hold migration vm-1", {}, {"vm": "vm-1"})]


def test_resource_must_be_in_the_request():
    """Its default does not count."""
    svc = Service("resources")

    @svc.rpc(resource="vm")
    async def look(ctx: Context, vm: str | int = "vm-1") -> int | None:
        return ctx.fence

    async def main() -> None:
        async with InMemoryService(svc) as one:
            with pytest.raises(TypeError, match="names the vm to act on"):
                await one.call(look)
            assert [await one.call(look, vm="7"), await one.call("look", vm=7)] == [1, 2]

    run(main())


def test_lease_travels_with_calls():
    """A method without a resource has the fencing token of the task that called it."""
    svc = Service("travels")
    kit: list[InMemoryService] = []

    @svc.rpc
    async def inner(ctx: Context) -> list[Any]:
        return [ctx.fence, ctx.travelling_lease]

    @svc.rpc(resource="vm")
    async def outer(ctx: Context, vm: str) -> list[Any]:
        return await kit[0].call(inner)

    async def main() -> None:
        async with InMemoryService(svc) as one:
            kit.append(one)
            lease = {"kind": "vm", "id": "vm-1", "token": 1}
            assert await one.call(outer, vm="vm-1") == [1, lease]
            assert await one.call(inner) == [None, None]

    run(main())


def test_hold_keeps_the_drain_and_its_probe_settles_what_is_left(loaded):
    """`end_hold` from an ops method ends the drain; after a crash the probe is asked."""
    migration = loaded("migration")

    async def main() -> None:
        async with InMemoryService(migration.svc) as one:
            await one.call(migration.expect, vm="vm-1")
            drain = asyncio.ensure_future(one.drain())
            await one.pass_time(10)
            assert not drain.done()
            assert await one.call(migration.arrived, vm="vm-1") is True
            assert (await drain).exit_code == 0

            await one.start()
            await one.call(migration.expect, vm="vm-2")
            await one.crash()
            migration.arriving.clear()
            await one.start()
            await one.hears("hold.ended", 2)
            assert await one.call(migration.arrived, vm="vm-2") is False

    run(main())


def test_periodic_job_comes_after_its_pause_and_again_after_a_failure(loaded):
    """A singleton has a token; a job has no request."""
    weather = loaded("weather")
    jobs: list[str] = []

    @weather.svc.periodic(every=60)
    async def breaks(ctx: Context) -> None:
        jobs.append(ctx.task_id)
        for name in ("request_id", "attempt", "version"):
            with pytest.raises(DeclarationError):
                getattr(ctx, name)
        with pytest.raises(DeclarationError):
            await ctx.hold("a", "b", at_most=1)
        raise OSError

    async def main() -> None:
        async with InMemoryService(weather.svc) as one:
            await one.pass_time(59)
            assert jobs == []
            await one.pass_time(3600)
            one.expect("hook.failed")
            assert len(jobs) > 50
            assert weather.readings == ["token 1"]

    run(main())


def test_same_id_gets_the_recorded_answer():
    """Also the recorded failure: a retry by the caller needs a new id."""
    svc = Service("ids")
    runs: list[str] = []

    @svc.rpc
    async def fail(ctx: Context) -> None:
        runs.append(ctx.request_id)
        raise ValueError("no")

    async def main() -> None:
        async with InMemoryService(svc) as one:
            for request_id in ("one", "one", "two"):
                with pytest.raises(ValueError, match="no"):
                    await one.prepare(request_id=request_id).call(fail)
            assert runs == ["one", "two"]

    run(main())


def test_a_method_is_tried_again_as_the_page_says(loaded):
    """After a drain between two tries, too; the caller gets the answer of the last one."""
    attach = loaded("attach")

    async def main() -> None:
        async with InMemoryService(attach.svc) as one:
            pending = one.start_call(attach.attach, vm="vm-1")
            await one.pass_time(0.5)
            await one.drain()
            assert len(attach.answers) == 2
            await one.start()
            assert await pending == "vm-1 is attached at attempt 3"

    run(main())


def test_stop_hooks_are_called_after_a_start_that_has_failed():
    """In the order of their declaration."""
    svc = Service("hooks")
    called: list[str] = []

    @svc.on_start
    async def first() -> None:
        called.append("first")
        raise OSError

    @svc.on_stop
    async def second() -> None:
        called.append("second")

    @svc.on_stop
    async def third() -> None:
        called.append("third")

    async def main() -> None:
        async with InMemoryService(svc):
            pass

    with pytest.raises(OSError):
        run(main())
    assert called == ["first", "second", "third"]


# -- in processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(directory: Path, **env: str) -> Iterator[Program]:
    """`thumbs.py` as a service of its own, which drains at the end of the block."""
    with running(directory, "-m", "gracekit", "run", "thumbs:svc", **env) as program:
        program.wait_text("service.serving")
        yield program
        assert program.stop(signal.SIGTERM) == 0, program.log.read_text()


@pytest.mark.process
def test_typed_arguments_arrive_as_the_page_prints_them(tmp_path: Path):
    """A dataclass, its result, and what is refused."""
    PAGE.write_to(tmp_path)
    assert run_python(tmp_path, "guests.py") == PAGE.outputs[0]


def test_plain_json_of_another_producer_is_a_request(tmp_path: Path, rabbit_url: str):
    """Without an envelope, by a library that knows nothing of gracekit; its id is the request's."""
    PAGE.write_to(tmp_path)
    settings = {"GRACEKIT_TRANSPORT_URL": rabbit_url, "GRACEKIT_LOG_LEVEL": "debug"}
    with serving(tmp_path, **settings) as program:
        run_python(tmp_path, "produce.py", GRACEKIT_TRANSPORT_URL=rabbit_url)
        program.wait_text("order-1042")
        program.wait_text("task.finished task_id=order-1042")


def test_the_keys_of_a_foreign_request_are_read():
    """The keys that the table names are those that a service reads from bare JSON."""
    named = re.findall(r"`([a-z_]+)`", PAGE.text.partition("## Other producers")[2])
    body = (
        b'{"method": "m", "args": {"a": 1}, "_unique_id": "r", "version": "1.2", '
        b'"namespace": "n", "_context_user_id": "ann", "_msg_id": "1", "_reply_q": "reply_1"}'
    )
    request = decode_request(body)

    for key in re.findall(rb'"([a-z_]+)":', body):
        assert key.decode() in named or key == b"a"
    assert (request.request_id, request.version, request.namespace) == ("r", "1.2", "n")
    assert request.context == {"user_id": "ann"}
    assert request.reply is not None
    assert request.reply.queue == "reply_1"
    assert decode_request(b'{"method": "m"}').reply is None


def test_a_failure_of_a_cast_is_got_by_its_id_and_nothing_runs_again():
    """A call with the id of a FAILED cast raises what its handler raised."""
    svc, runs = Service("orders"), []

    @svc.rpc(on_interrupt="retry")
    async def ship(ctx, order: str) -> None:
        runs.append(order)
        raise LookupError("no such order")

    async def main() -> None:
        async with InMemoryService(svc) as one:
            request_id = await one.cast(ship, order="o-1")
            await one.settled()
            with pytest.raises(LookupError, match="no such order"):
                await one.prepare(request_id=request_id).call(ship, order="o-1")
            assert one.state_of(request_id) is TaskState.FAILED

    run(main())
    assert runs == ["o-1"]


def test_a_call_that_nobody_read_in_time_is_not_run():
    """Its caller has left; a cast waits for as long as it takes."""
    svc, runs = Service("shop"), []

    @svc.rpc(on_interrupt="retry")
    async def note(ctx, who: str) -> None:
        runs.append(who)

    async def main() -> None:
        async with InMemoryService(svc) as one:
            await one.drain()
            with pytest.raises(CallTimeoutError):
                await one.prepare(timeout=5).call(note, who="caller")
            await one.cast(note, who="cast")
            await one.start()
            await one.settled()

    run(main())
    assert runs == ["cast"]
