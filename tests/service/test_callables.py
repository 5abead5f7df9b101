"""Functions of the application: none counts as done before it has done its work."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gracekit
from gracekit import Context, DeclarationError, Done, Found, Service, Settled
from gracekit.callables import check, is_async
from tests.service.kit import World
from tests.service.shares import ShareRow, Shares

pytestmark = pytest.mark.looptime


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as people write it for plain functions."""

    @functools.wraps(function)
    def inner(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return inner


def run_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that runs the coroutine to its end, as `async_to_sync` does."""

    @functools.wraps(function)
    def inner(*args: Any, **named: Any) -> Any:
        return asyncio.run(function(*args, **named))

    return inner


class Answers:
    """An object that is called; its result is a coroutine."""

    async def __call__(self, ctx: Context) -> str:
        await asyncio.sleep(1)
        return "answered"


class Wrapped:
    """An object whose method is decorated."""

    __call__ = wrapped(Answers.__call__)


async def work(ctx: Context, share: str = "") -> str:
    await asyncio.sleep(1)
    return "worked"


# -- declarations -----------------------------------------------------------------------


def _declarations() -> Iterator[Any]:
    def case(name: str, declare: Callable[[Service, Callable[..., Any]], object]) -> Any:
        return pytest.param(declare, id=name)

    yield case("method", lambda svc, f: svc.rpc(f))
    yield case("job", lambda svc, f: svc.periodic(every="10s")(f))
    yield case("on_start", lambda svc, _: svc.on_start(wrapped(_nothing)))
    yield case("on_stop", lambda svc, _: svc.on_stop(wrapped(_nothing)))
    yield case("probe", lambda svc, f: svc.rpc(served).probe(f))
    yield case("errored", lambda svc, f: svc.rpc(served).errored(f))
    yield case("find", lambda svc, f: svc.kind("share").find(wrapped(_find)))
    yield case("rule", lambda svc, f: svc.kind("share").probe("creating", failed="error")(f))
    yield case("resource", lambda svc, f: svc.rpc(resource=("share", wrapped(_nothing)))(served))


async def _nothing() -> None:
    pass


async def _find(ctx: Context, *, after: str, limit: int) -> list[Found]:
    return []


async def served(ctx: Context, share: str = "", reason: str = "") -> None:
    pass


@pytest.mark.parametrize("declare", [*_declarations()])
def test_a_coroutine_function_behind_a_plain_decorator_is_refused_where_it_is_declared(
    declare: Callable[[Service, Callable[..., Any]], object],
):
    """The decorator may drop the coroutine, or catch, time and retry nothing."""
    with pytest.raises(DeclarationError, match=r"behind a plain decorator, .* @gracekit.plain"):
        declare(Service("shares"), wrapped(served))


def test_the_same_is_found_behind_partials_and_objects():
    """`functools.lru_cache` hands out a coroutine twice; a partial hides what it calls."""
    for hidden in (
        functools.partial(wrapped(work), share="s"),
        functools.lru_cache(work),
        wrapped(functools.partial(work)),
        wrapped(Answers()),
        Wrapped(),
    ):
        with pytest.raises(DeclarationError, match="behind a plain decorator"):
            check(hidden, "job")
    assert is_async(functools.partial(work))
    assert is_async(Answers())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no markcoroutinefunction")
def test_a_decorator_that_marks_its_function_as_a_coroutine_function_is_taken_at_its_word():
    marked = inspect.markcoroutinefunction(wrapped(work))  # type: ignore[attr-defined]

    check(marked, "job")

    assert is_async(marked)


def test_a_function_that_runs_its_coroutine_to_the_end_may_say_so():
    """Also through a further decorator, and as the method of a class."""
    plain = gracekit.plain(run_inside(work))

    for function in (plain, wrapped(plain), functools.partial(plain)):
        check(function, "job")
        assert not is_async(function)


def test_what_is_no_function_is_refused_with_a_sentence():
    svc = Service("shares")

    with pytest.raises(DeclarationError, match="method 'create' is no function"):
        svc.rpc("create")  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="on_start hook None is no function"):
        svc.on_start(None)  # type: ignore[type-var]


# -- calls ------------------------------------------------------------------------------


async def test_partials_and_objects_serve_requests_under_the_name_of_what_they_are(
    world: World, svc: Service
):
    """A partial has the name of its function, an object that of its class."""
    svc.rpc(functools.partial(work, share="s"))
    svc.rpc(Answers())
    await world.start(svc)
    client = await world.client(svc)

    assert await client.call("work") == "worked"
    assert await client.call("Answers") == "answered"


async def test_a_plain_handler_that_returns_a_coroutine_has_succeeded_when_that_has_ended(
    world: World, svc: Service
):
    """The caller gets its result, or its error; a cast is not on record as done before."""

    @svc.rpc
    def create(ctx: Context) -> Any:
        return work(ctx)

    @svc.rpc
    def fail(ctx: Context) -> Any:
        async def raises() -> None:
            await asyncio.sleep(1)
            raise LookupError("no such pool")

        return raises()

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="c").cast("create")
    await asyncio.sleep(0.5)
    assert world.state("c") == "running"
    await world.until(lambda: world.state("c") == "succeeded")

    assert await client.call("create") == "worked"
    with pytest.raises(LookupError, match="no such pool"):
        await client.call("fail")


async def test_a_handler_behind_an_async_decorator_that_forgets_to_await_has_run(
    world: World, svc: Service
):
    """However many coroutines are in each other; a generator in the last one is refused."""

    async def twice(ctx: Context) -> Any:
        return later(work)(ctx)

    def pages(ctx: Context) -> Any:
        return (page for page in [1])

    svc.rpc(later(work))
    svc.rpc(twice)
    svc.rpc(later(pages))
    await world.start(svc)
    client = await world.client(svc)

    assert await client.call("work") == "worked"
    assert await client.call("twice") == "worked"
    with pytest.raises(TypeError, match="it has returned a generator"):
        await client.call("pages")


async def test_a_drain_waits_for_the_coroutine_of_a_plain_handler(world: World, svc: Service):
    """At the deadline it is cancelled like any other, and handed over."""

    @svc.rpc
    def create(ctx: Context) -> Any:
        return asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="c").cast("create")
    await world.until(lambda: world.state("c") == "running")
    report = await life.drain()

    assert report.handed_over == ["c"]
    assert world.rows("SELECT cut FROM task")[0]["cut"] == "cancelled"


async def test_a_generator_is_no_result_of_work(world: World, svc: Service):
    """Neither behind a decorator, nor returned by a plain function: its code would not run."""

    def pages(ctx: Context) -> Iterator[int]:
        yield 1

    with pytest.raises(DeclarationError, match="has a yield, so to call it runs nothing"):
        svc.rpc(wrapped(pages))
    svc.rpc(gracekit.plain(functools.wraps(pages)(lambda ctx: list(pages(ctx)))))

    @svc.rpc
    def later(ctx: Context) -> Any:
        return pages(ctx)

    await world.start(svc)
    client = await world.client(svc)

    assert await client.call("pages") == [1]
    with pytest.raises(TypeError, match="it has returned a generator"):
        await client.call(later)


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that forgets an `await`: the result of its coroutine is one."""

    @functools.wraps(function)
    async def inner(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return inner


HOW = pytest.mark.parametrize("how", [lambda function: function, later], ids=["plain", "async"])


@HOW
async def test_every_hook_that_returns_a_coroutine_is_awaited(world: World, svc: Service, how: Any):
    """on_start, a job, the errored hook, a probe and on_stop: none counts as done before."""
    done: list[str] = []

    async def ends(name: str, result: Any = None) -> Any:
        await asyncio.sleep(1)
        done.append(name)
        return result

    svc.on_start(how(lambda: ends("on_start")))
    svc.on_stop(how(lambda: ends("on_stop")))
    svc.periodic(every="10s")(how(lambda ctx: ends("job")))

    @svc.rpc(on_interrupt="probe")
    async def create(ctx: Context) -> None:
        await asyncio.sleep(3600)

    create.probe(how(lambda ctx: ends("probe", Done("asked"))))

    @svc.rpc(on_interrupt="error")
    async def delete(ctx: Context) -> None:
        await asyncio.sleep(3600)

    delete.errored(how(lambda ctx, reason: ends("errored")))

    life = await world.start(svc)
    assert done == ["on_start"]
    client = await world.client(svc)
    await client.prepare(request_id="c").cast(create)
    await client.prepare(request_id="d").cast(delete)
    await world.until(lambda: world.state("d") == "running")
    await asyncio.sleep(12)
    assert "job" in done
    await life.drain()
    assert "on_stop" in done
    await world.start(svc)
    await world.until(lambda: world.state("d") == "errored" and world.state("c") == "succeeded")
    await world.until(lambda: "errored" in done)

    assert world.rows("SELECT result FROM task WHERE request_id = 'c'")[0]["result"] == '"asked"'


@HOW
async def test_a_rule_that_returns_a_coroutine_is_awaited(world: World, svc: Service, how: Any):
    """Its answer is what the coroutine returns."""
    shares = Shares(world, svc, stuck_after="1s", bare=True)
    shares.rows["1"] = ShareRow("creating", since=None)

    async def ask() -> Settled:
        await asyncio.sleep(1)
        return Settled("available")

    shares.kind.probe("creating", failed="error")(how(lambda ctx, found: ask()))
    await world.start(svc)

    await world.until(lambda: shares.written == [("1", "creating", "available")])


async def test_a_tracked_call_that_returns_a_coroutine_fails_its_task(world: World, svc: Service):
    """The thread of the application would drop it, and the task would look done."""
    with ThreadPoolExecutor(1) as pool:

        @svc.rpc
        async def create(ctx: Context) -> None:
            ctx.track_call(pool.submit, lambda: work(ctx))

        await world.start(svc)
        client = await world.client(svc)
        with pytest.raises(TypeError, match="has returned a coroutine, which no thread runs"):
            await client.call(create)


async def test_a_tracked_call_of_many_parts_fails_its_task(world: World, svc: Service):
    """`executor.map` would call the function once for each part, and one call is tracked."""
    with ThreadPoolExecutor(2) as pool:

        @svc.rpc
        async def create(ctx: Context) -> None:
            ctx.track_call(pool.map, str, [1, 2, 3])

        await world.start(svc)
        client = await world.client(svc)
        with pytest.raises(TypeError, match=r"call it for each part in place of executor.map"):
            await client.call(create)


# -- what is raised ---------------------------------------------------------------------


class Kept:
    """Something large in a variable of a handler that fails."""


def forgotten(references: list[weakref.ref[Kept]]) -> bool:
    return all(one() is None for one in references)


@pytest.mark.parametrize("how", ["plain", "coroutine", "tracks"])
async def test_a_failed_handler_keeps_none_of_its_variables(world: World, svc: Service, how: str):
    """Each would keep its memory and its files until the garbage collector runs, which is
    seldom.
    """
    kept: list[weakref.ref[Kept]] = []

    def fail() -> None:
        large = Kept()
        kept.append(weakref.ref(large))
        raise LookupError("no such volume")

    @svc.rpc
    def plain(ctx: Context) -> None:
        fail()

    @svc.rpc
    async def coroutine(ctx: Context) -> None:
        fail()

    pool = ThreadPoolExecutor(1)

    @svc.rpc
    async def tracks(ctx: Context) -> None:
        ctx.track_call(pool.submit, fail)

    await world.start(svc)
    client = await world.client(svc)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await client.cast(how)
        await world.until(lambda: len(world.rows("SELECT * FROM task WHERE state='failed'")) == 3)

        assert len(kept) == 3
        assert forgotten(kept)
    finally:
        gc.enable()
        pool.shutdown()


async def test_a_failed_hook_keeps_none_of_its_variables(world: World, svc: Service):
    """The same for jobs and probes, plain and async."""
    kept: list[weakref.ref[Kept]] = []

    def fail(*_: object) -> None:
        large = Kept()
        kept.append(weakref.ref(large))
        raise LookupError("no such volume")

    async def fail_later(ctx: Context) -> None:
        fail()

    @svc.rpc(on_interrupt="probe")
    async def create(ctx: Context) -> None:
        await asyncio.sleep(3600)

    create.probe(fail)
    svc.periodic(every="10s")(fail)
    svc.periodic(every="10s")(fail_later)

    first = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="c").cast(create)
    await world.until(lambda: world.state("c") == "running")
    await first.drain()
    gc.collect()
    gc.disable()
    try:
        await world.start(svc)
        await asyncio.sleep(25)

        assert len(kept) > 4
        assert forgotten(kept)
    finally:
        gc.enable()


class Broken(BaseException):
    """Of no class that `except Exception` catches."""


@pytest.mark.parametrize(
    "error",
    [BaseExceptionGroup("two", [SystemExit(1), ValueError()]), Broken("b"), SystemExit(3)],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_a_job_or_a_hook_raises_is_logged_and_the_next_one_runs(
    world: World, svc: Service, error: BaseException
):
    """A group with a SystemExit in it is no Exception, nor are classes of the application."""

    @svc.periodic(every="10s")
    async def sweep(ctx: Context) -> None:
        raise error

    @svc.on_stop
    async def close() -> None:
        raise error

    life = await world.start(svc)
    await asyncio.sleep(25)
    report = await life.drain()

    hooks = [fields["hook"] for name, fields in life.events if name == "hook.failed"]
    assert hooks == ["sweep", "sweep", "close"]
    assert report.exit_code == 0
