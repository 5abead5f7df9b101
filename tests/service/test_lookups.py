"""Callers look up, wait for, and cancel what they have sent; looking starts nothing."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    DeclarationError,
    MethodTimeoutError,
    NoAnswerError,
    NoSuchMethodError,
    RemoteError,
    RpcError,
    Service,
    TaskCancelledError,
    UnknownTaskError,
)
from gracekit.journal.lookups import looked_up
from gracekit.journal.lookups_sql import LOOK
from gracekit.testing import InMemoryService, run
from gracekit.tracker.task import Lane


def _service(**options: Any) -> Service:
    svc = Service("compute", task_api="callers")

    @svc.rpc(on_interrupt="retry", allow_cancel="sender", **options)
    async def resize(ctx: Context, vm: str, s: float = 5.0) -> str:
        ctx.progress(1, 2, note="copying")
        await asyncio.sleep(s)
        return f"{vm} is resized"

    @svc.rpc(on_interrupt="retry")
    async def fail(ctx: Context) -> None:
        raise LookupError("no such flavor")

    return svc


def test_a_result_is_waited_for_and_is_what_the_call_would_have_returned() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.client.cast("resize", vm="vm-1")
            assert await one.client.result(task, wait="1m") == "vm-1 is resized"
            assert await one.client.result(task) == "vm-1 is resized"
            info = await one.client.state(task)
            assert (info.state, info.ended, info.attempts) == ("succeeded", True, 1)
            assert info.progress is not None
            assert (info.progress.done, info.progress.of, info.progress.note) == (1, 2, "copying")

    run(main())


def test_the_exception_of_a_handler_is_raised_by_its_result() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.client.cast("fail")
            with pytest.raises(LookupError, match="no such flavor"):
                await one.client.result(task, wait="1m")

    run(main())


def test_a_request_that_is_not_known_is_named_with_the_four_reasons_and_is_waited_for() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            loop = asyncio.get_running_loop()
            with pytest.raises(UnknownTaskError, match=r"queue.*store.*requeue.*RETENTION"):
                await one.client.state("never-sent")
            began = loop.time()
            with pytest.raises(UnknownTaskError):
                await one.client.result("never-sent", wait="25s")
            assert loop.time() - began == pytest.approx(25, abs=1)
            waiting = asyncio.ensure_future(one.client.result("later", wait="1m"))
            await asyncio.sleep(20)
            await one.prepare(request_id="later").cast("resize", vm="vm-2")
            assert await waiting == "vm-2 is resized"
            assert loop.time() - began == pytest.approx(50, abs=2)

    run(main())


def test_a_wait_that_is_over_says_how_far_the_task_is() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.client.cast("resize", vm="vm-1", s=600)
            with pytest.raises(CallTimeoutError, match="not ended within 10 s: it is running"):
                await one.client.result(task, wait="10s")
            info = await one.client.state(task)
            assert (info.state, info.ended) == ("running", False)

    run(main())


def test_no_answer_is_its_own_error_within_two_seconds() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.client.cast("resize", vm="vm-1")
            await one.client.result(task, wait="1m")
            await one.drain()
            began = asyncio.get_running_loop().time()
            with pytest.raises(NoAnswerError):
                await one.client.state(task)
            with pytest.raises(NoAnswerError):
                await one.client.result(task)
            assert asyncio.get_running_loop().time() - began <= 4.1

    run(main())


def test_a_result_is_waited_for_over_a_restart_and_a_drain_does_not_wait_for_that() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.prepare(delay="1m").cast("resize", vm="vm-1", s=40)
            waiting = asyncio.ensure_future(one.result(task, wait="5m"))
            await asyncio.sleep(1)
            begin = asyncio.get_running_loop().time()
            await one.drain()
            assert asyncio.get_running_loop().time() - begin < 3
            await asyncio.sleep(20)
            await one.start()
            assert await waiting == "vm-1 is resized"

    run(main())


def test_a_wait_is_over_once_a_sibling_has_ended_the_task() -> None:
    async def main() -> None:
        svc = _service()
        async with InMemoryService(svc) as one, InMemoryService(svc, beside=one):
            tasks = [await one.cast("resize", vm=f"vm-{n}", s=3) for n in range(20)]
            begin = asyncio.get_running_loop().time()
            found = await one.results(tasks, wait="1m")
            assert list(found.values()) == [f"vm-{n} is resized" for n in range(20)]
            assert asyncio.get_running_loop().time() - begin < 6

    run(main())


def test_a_cancel_reaches_a_task_that_a_sibling_runs_and_one_that_nobody_has_begun() -> None:
    async def main() -> None:
        svc = _service()
        async with InMemoryService(svc) as one, InMemoryService(svc, beside=one):
            ada = one.prepare(context={"user_id": "ada"})
            tasks = [await ada.cast("resize", vm=f"vm-{n}", s=300) for n in range(8)]
            tasks.append(await ada.prepare(delay="5m").cast("resize", vm="later"))
            await asyncio.sleep(1)
            for task in tasks:
                await ada.cancel(task)
            found = await ada.results(tasks, wait="10s")
            assert {type(one) for one in found.values()} == {TaskCancelledError}

    run(main())


def test_progress_is_said_by_a_loop_over_a_sequence_and_shown_while_it_runs() -> None:
    async def main() -> None:
        svc = Service("compute", task_api="callers")

        @svc.rpc(on_interrupt="retry")
        async def copy(ctx: Context) -> None:
            async for _ in ctx.steps(range(10)):
                await asyncio.sleep(2)

        @svc.rpc(on_interrupt="retry")
        def plain(ctx: Context) -> None:
            for _ in ctx.steps([1, 2, 3]):
                pass

        async with InMemoryService(svc) as one:
            task = await one.cast("copy")
            await asyncio.sleep(13)
            info = await one.state(task)
            assert info.progress is not None
            assert info.progress.done in {4, 5, 6}
            assert info.progress.of == 10
            other = await one.cast("plain")
            await one.result(other, wait="10s")
            progress = (await one.state(other)).progress
            assert progress is not None
            assert (progress.done, progress.of) == (3, 3)

    run(main())


@pytest.mark.parametrize("bad", [{"done": -1}, {"done": True}, {"done": 1, "of": "10"}])
def test_a_progress_that_is_no_number_is_refused(bad: dict[str, Any]) -> None:
    async def main() -> None:
        svc = Service("compute")

        @svc.rpc(on_interrupt="retry")
        async def copy(ctx: Context) -> None:
            ctx.progress(**bad)

        async with InMemoryService(svc) as one:
            with pytest.raises(TypeError, match="must be a number of at least 0"):
                await one.call("copy")

    run(main())


def test_hosts_with_stores_of_their_own_are_all_asked_and_one_yes_wins() -> None:
    async def main() -> None:
        svc = Service("compute", task_api="callers", queues="directed")

        @svc.rpc(on_interrupt="retry", allow_cancel="anyone")
        async def resize(ctx: Context, vm: str, s: float = 5.0) -> str:
            await asyncio.sleep(s)
            return f"{vm} on {ctx.host}"

        a = InMemoryService(svc, host="a")
        b = InMemoryService(svc, host="b", beside=a)
        async with a, b:
            tasks = [
                await a.prepare(host=host).cast("resize", vm=f"vm-{n}")
                for n, host in enumerate("abab")
            ]
            found = await a.results(tasks, wait="1m")
            assert list(found.values()) == [f"vm-{n} on {host}" for n, host in enumerate("abab")]
            assert len(await a.states(tasks)) == 4
            with pytest.raises(UnknownTaskError):
                await a.state("never-sent")
            long = await a.prepare(host="b").cast("resize", vm="vm-9", s=600)
            await asyncio.sleep(1)
            await a.cancel(long)
            with pytest.raises(TaskCancelledError):
                await a.result(long, wait="5s")

    run(main())


def test_a_service_that_does_not_answer_its_callers_says_so() -> None:
    async def main() -> None:
        svc = Service("compute")
        svc.rpc(on_interrupt="retry")(lambda ctx: None)
        async with InMemoryService(svc) as one:
            with pytest.raises(NoSuchMethodError, match='task_api="callers"'):
                await one.client.state("some-id")

    run(main())


def test_another_user_sees_and_cancels_nothing() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            ada = one.client.prepare(context={"user_id": "ada"})
            eve = one.client.prepare(context={"user_id": "eve"})
            task = await ada.cast("resize", vm="vm-1", s=60)
            for view in (eve, one.client):
                for ask in (view.state, view.result, view.cancel):
                    with pytest.raises(UnknownTaskError):
                        await ask(task)
            assert (await ada.state(task)).state == "running"

    run(main())


def test_a_sender_cancels_what_runs_and_its_call_hears_of_it() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            ada = one.prepare(context={"user_id": "ada"})
            call = ada.start_call("resize", vm="vm-1", s=600)
            await asyncio.sleep(1)
            view = one.client.prepare(context={"user_id": "ada"})
            await view.cancel(call.request_id, reason="changed my mind")
            with pytest.raises(TaskCancelledError, match="user ada: changed my mind"):
                await call
            info = await view.state(call.request_id)
            assert (info.state, info.reason) == ("cancelled", "caller")
            assert (await view.cancel(call.request_id)).state == "cancelled"
            with pytest.raises(TaskCancelledError):
                await view.result(call.request_id)

    run(main())


def test_a_cancel_needs_a_user_and_a_method_that_allows_it() -> None:
    async def main() -> None:
        svc = _service()

        @svc.rpc(on_interrupt="retry")
        async def keep(ctx: Context) -> None:
            await asyncio.sleep(60)

        @svc.rpc(on_interrupt="retry", allow_cancel="anyone")
        async def free(ctx: Context) -> None:
            await asyncio.sleep(60)

        async with InMemoryService(svc) as one:
            nobody = await one.client.cast("resize", vm="vm-1", s=60)
            with pytest.raises(RpcError, match="cancelled by its sender alone"):
                await one.client.cancel(nobody)
            kept = await one.client.cast("keep")
            with pytest.raises(RpcError, match="declared without allow_cancel"):
                await one.client.cancel(kept)
            ada = one.client.prepare(context={"user_id": "ada"})
            freed = await ada.cast("free")
            await one.client.cancel(freed)
            with pytest.raises(TaskCancelledError):
                await ada.result(freed, wait="1s")
            assert (await one.client.state(kept)).state == "running"

    run(main())


def test_a_cancel_that_is_not_on_record_is_refused() -> None:
    """Otherwise its caller would take a task for cancelled that goes on, or runs again later."""

    async def main() -> None:
        svc = _service()

        @svc.rpc(on_interrupt="retry", allow_cancel="anyone", timeout="1s")
        async def stubborn(ctx: Context) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(10)
                raise

        async with InMemoryService(svc) as one:
            task = await one.client.cast("stubborn")
            await asyncio.sleep(3)
            with pytest.raises(RpcError, match="is being cancelled already"):
                await one.client.cancel(task)
            with pytest.raises(MethodTimeoutError):
                await one.client.result(task, wait="1m")

    run(main())


def test_many_are_waited_for_at_once_and_pages_hold_all_their_results() -> None:
    async def main() -> None:
        svc = Service("compute", task_api="callers")

        @svc.rpc(on_interrupt="retry")
        async def make(ctx: Context, size: int) -> str:
            if size < 0:
                raise ValueError("less than nothing")
            return "x" * size

        async with InMemoryService(svc) as one:
            sizes = [400_000, 300_000, 10, -1, 900_000, 20, *[5_000] * 600]
            ids = [await one.client.cast("make", size=size) for size in sizes]
            found = await one.client.results([*ids, "never-sent"], wait="2s")
            assert list(found) == [*ids, "never-sent"]
            for one_id, size in zip(ids, sizes, strict=True):
                if size < 0:
                    assert isinstance(found[one_id], ValueError)
                else:
                    assert found[one_id] == "x" * size
            assert isinstance(found["never-sent"], UnknownTaskError)
            states = await one.client.states([*ids, "never-sent"])
            assert len(states) == len(ids)

    run(main())


def test_looking_changes_nothing_in_the_store() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.client.cast("resize", vm="vm-1")
            await one.client.result(task, wait="1m")
            await asyncio.sleep(10)
            before = await one.runtime.ground.engine.query("SELECT * FROM task")
            notes = await one.runtime.ground.engine.query("SELECT * FROM incident")
            tally = await one.runtime.ground.engine.query("SELECT * FROM tally")
            for _ in range(3):
                await one.client.state(task)
                await one.client.result(task, wait="1s")
                with pytest.raises(UnknownTaskError):
                    await one.client.state("never-sent")
            query = one.runtime.ground.engine.query
            assert await query("SELECT * FROM task") == before
            assert await query("SELECT * FROM incident") == notes
            assert await query("SELECT * FROM tally") == tally

    run(main())


def test_a_handler_calls_its_own_service_and_another_on_its_own_connection() -> None:
    async def main() -> None:
        other = Service("network")

        @other.rpc(on_interrupt="retry")
        async def plug(ctx: Context, port: str) -> str:
            return f"{port} is plugged"

        svc = _service()

        @svc.rpc(on_interrupt="retry")
        async def boot(ctx: Context, vm: str) -> list[str]:
            plugged = await ctx.client("network").call("plug", port="p-1")
            resized = await ctx.client().call("resize", vm=vm)
            return [plugged, resized]

        heard: list[str] = []

        @svc.on_start
        async def begin() -> None:
            heard.append("started")

        async with InMemoryService(svc) as one, InMemoryService(other, beside=one):
            assert await one.call("boot", vm="vm-1") == ["p-1 is plugged", "vm-1 is resized"]

    run(main())


def test_a_refused_cast_is_told_to_its_sender_alone() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            ada = one.prepare(context={"user_id": "ada"})
            task = await ada.cast("resize", flavor="m1")
            with pytest.raises(TypeError, match="flavor"):
                await ada.result(task, wait="1m")
            info = await ada.state(task)
            assert (info.state, info.reason, info.ended) == ("rejected", "arguments", True)
            with pytest.raises(UnknownTaskError):
                await one.state(task)
            again = ada.prepare(request_id=task)
            await again.cast("resize", vm="vm-1")  # an id of a refused request is free
            assert await ada.result(task, wait="1m") == "vm-1 is resized"
            await again.cast("resize", vm="vm-2")  # conflicts, and changes nothing
            await asyncio.sleep(1)
            assert await ada.result(task, wait="1m") == "vm-1 is resized"

    run(main())


def test_a_cast_of_the_method_itself_is_checked_before_it_is_sent() -> None:
    async def main() -> None:
        svc = Service("compute", task_api="callers")

        @svc.rpc(on_interrupt="retry")
        async def pay(ctx: Context, amount: Decimal) -> Decimal:
            return amount * 2

        async with InMemoryService(svc) as one:
            with pytest.raises(TypeError, match="amount"):
                await one.cast(pay, amount="much")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="amount"):
                await one.fanout(pay, amount="much")  # type: ignore[arg-type]
            task = await one.cast(pay, amount=Decimal("19.90"))
            assert await one.result(task, wait="1m") == "39.80"
            assert await one.result(task, of=pay) == Decimal("39.80")

    run(main())


def test_retries_of_none_are_refused() -> None:
    with pytest.raises(DeclarationError, match="retries=None must be a whole number"):
        Service("compute").rpc(retries=None)(lambda ctx: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"note": "caf\udce9"}, {"done": 10**5000}, {"done": 1, "of": 10**5000}]
)
def test_a_progress_that_cannot_be_written_is_refused_in_its_handler(bad: dict[str, Any]) -> None:
    async def main() -> None:
        svc = Service("compute")

        @svc.rpc(on_interrupt="retry")
        async def copy(ctx: Context) -> None:
            ctx.progress(**{"done": 1, **bad})

        @svc.rpc(on_interrupt="retry")
        async def other(ctx: Context) -> str:
            return "works"

        async with InMemoryService(svc) as one:
            with pytest.raises((TypeError, ValueError)):
                await one.call("copy")
            assert await one.call("other") == "works"

    run(main())


def test_a_wait_outlives_the_death_of_the_process_that_was_asked() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            task = await one.cast("resize", vm="vm-1", s=4)
            waiting = asyncio.ensure_future(one.result(task, wait="30s"))
            begin = asyncio.get_running_loop().time()
            await asyncio.sleep(1)
            await one.crash()
            await one.start()
            assert await waiting == "vm-1 is resized"
            assert asyncio.get_running_loop().time() - begin < 18  # with its settle time of 10 s

    run(main())


def test_a_question_that_cannot_be_asked_is_refused_by_the_client() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            for ids in ("abc", ["x" * 256], [""], [None]):
                with pytest.raises(TypeError, match="no request ids"):
                    await one.states(ids)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="must be a text"):
                await one.cancel("id", reason=None)  # type: ignore[arg-type]
            with pytest.raises(UnknownTaskError):
                await one.cancel("id", reason="long " * 500_000)

    run(main())


def test_a_foreign_task_costs_no_more_than_one_that_is_not_known() -> None:
    async def main() -> None:
        svc = Service("compute", task_api="callers")

        @svc.rpc(on_interrupt="retry")
        async def make(ctx: Context) -> str:
            return "x" * 900_000

        async with InMemoryService(svc) as one:
            ada = one.prepare(context={"user_id": "ada"})
            task = await ada.cast("make")
            await ada.result(task, wait="1m")
            engine, service = one.runtime.ground.engine, svc.topic
            assert await looked_up(engine, service, [task], "of-bob", most=10**6) == []

    run(main())


def test_a_handler_that_nobody_answers_does_not_tell_its_caller_that_it_was_not_sent() -> None:
    async def main() -> None:
        svc = _service()

        @svc.rpc(on_interrupt="retry")
        async def nest(ctx: Context) -> None:
            await ctx.client("nobody").result("some-id")

        async with InMemoryService(svc) as one:
            with pytest.raises(RemoteError, match="NoAnswerError"):
                await one.call("nest")

    run(main())


def test_a_refused_copy_does_not_end_the_wait_for_what_was_accepted() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            known = one.prepare(request_id="order-1")
            await known.cast("resize", vm="vm-1", s=20)
            await known.cast("resize", vm="other")  # refused: another content
            await asyncio.sleep(1)
            lane = one.runtime.wired.servers[Lane.OPS]
            before = sum(lane.fresh.values())
            assert await one.result("order-1", wait="1m") == "vm-1 is resized"
            assert sum(lane.fresh.values()) - before < 10  # one question each 3 s

    run(main())


def test_a_hundred_waits_cost_one_look_at_the_store() -> None:
    async def main() -> None:
        async with InMemoryService(_service()) as one:
            tasks = [await one.cast("resize", vm=f"vm-{n}", s=60) for n in range(90)]
            waits = [asyncio.ensure_future(one.result(task, wait="50s")) for task in tasks]
            await asyncio.sleep(3.5)
            engine, asked = one.runtime.ground.engine, 0
            query = engine.query

            async def counted(sql: str, *params: Any) -> Any:
                nonlocal asked
                asked += sql == LOOK
                return await query(sql, *params)

            engine.query = counted  # type: ignore[method-assign]
            await asyncio.sleep(2.2)  # nobody's question ends or begins meanwhile
            engine.query = query  # type: ignore[method-assign]
            assert 2 <= asked <= 3  # one each second, for all of them
            for wait in waits:
                wait.cancel()

    run(main())
