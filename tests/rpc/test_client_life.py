"""Starts and stops of a client that has a connection of its own, and which loop may use it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import apsw
import pytest

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, RpcError, StoreLockedError
from gracekit.process import Point, Process
from gracekit.rpc.client import RpcClient
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.notification_listener import NotificationListener
from gracekit.rpc.sqlite import sqlite_transport as sqlite
from gracekit.rpc.transport import Delivery, shared_queue
from gracekit.store.batch import Batch
from gracekit.store.sqlite.sqlite_engine import SqliteEngine


@pytest.fixture
def client(tmp_path: Path) -> RpcClient:
    """Not started; a service has read its topic."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())
    url = f"sqlite:///{tmp_path / 'of_life.db'}"
    asyncio.run(_declare(url))
    return RpcClient(url, "compute")


async def _declare(url: str) -> None:
    transport = open_transport(url, process=Process(), clock=Clock())
    await transport.start()
    await transport.declare([shared_queue("compute")])
    await transport.stop()


async def sends(client: RpcClient) -> None:
    await client.cast("echo")


async def uses(client: RpcClient) -> None:
    async with client:
        await sends(client)


BEFORE: Final = set[threading.Thread]()
"""Threads that a test before this one has left, which then has failed."""


async def leftovers() -> list[str]:
    """Tasks beside this one, and threads of this test's engines, if they do not end soon."""
    found: list[str] = []
    for _ in range(200):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        begun = set(threading.enumerate()) - BEFORE
        threads = (one.name for one in begun if one.name.startswith("of_life.db-"))
        found = [*(task.get_name() for task in tasks), *threads]
        if not found:
            break
        await asyncio.sleep(0.01)
    return found


WAYS: dict[str, Callable[[RpcClient], Coroutine[Any, Any, Any]]] = {
    "call": lambda client: client.prepare(timeout=1).call("echo"),
    "cast": lambda client: client.cast("echo"),
    "fanout": lambda client: client.fanout("echo"),
    "start": lambda client: client.start(),
    "stop": lambda client: client.stop(),
}


OVERTAKEN: Final = "this client was stopped before it had started"


# -- which loop -------------------------------------------------------------------------------


@pytest.fixture
def listener(client: RpcClient, tmp_path: Path) -> NotificationListener:
    """Not started."""
    return NotificationListener(f"sqlite:///{tmp_path / 'of_life.db'}", "news")


@pytest.mark.parametrize("way", WAYS)
def test_a_client_is_refused_in_a_loop_that_has_not_started_it(client: RpcClient, way: str):
    """Nothing is sent, and the loop that has started it may go on."""

    async def main() -> BaseException | None:
        async with client:
            wrong = await asyncio.gather(
                asyncio.to_thread(lambda: asyncio.run(WAYS[way](client))), return_exceptions=True
            )
            await sends(client)
            return wrong[0]

    wrong = asyncio.run(main())

    assert isinstance(wrong, ConfigError)
    assert "in another event loop, and cannot be " in str(wrong)


@pytest.mark.parametrize("way", ["start", "stop", "__anext__"])
def test_a_listener_is_refused_in_a_loop_that_has_not_started_it(
    listener: NotificationListener, way: str
):
    """As a client is."""

    async def used() -> None:
        await getattr(listener, way)()

    async def main() -> list[str]:
        async with listener:
            with pytest.raises(ConfigError, match="this NotificationListener was started in anoth"):
                await asyncio.to_thread(lambda: asyncio.run(used()))
        return await leftovers()

    assert asyncio.run(main()) == []


def test_a_client_of_a_loop_that_has_ended_says_so(client: RpcClient):
    """Stopped there, it may be started in the next one."""
    for _ in range(2):
        asyncio.run(uses(client))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.start())
    loop.run_until_complete(client._transport.stop())  # as the test leaves nothing
    loop.close()

    with pytest.raises(ConfigError, match="another event loop, which is closed, and cannot be ask"):
        asyncio.run(sends(client))


@pytest.mark.process
def test_a_fork_is_refused_that_runs_the_loop_of_its_parent(client: RpcClient):
    """Both would use one connection."""
    with asyncio.Runner() as runner:
        runner.run(client.start())
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            said = "was not refused"
            try:
                runner.get_loop().run_until_complete(sends(client))
            except ConfigError as error:
                said = str(error)
            finally:
                os.write(writer, said.encode())
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        runner.run(sends(client))
        runner.run(client.stop())

    assert f"was started in process {os.getpid()}, of which this one is a fork" in said


def test_a_start_that_failed_may_be_tried_again_in_another_loop(tmp_path: Path):
    """A program that runs its calls one by one tries again when the file is there."""
    place = tmp_path / "not" / "yet"
    client = RpcClient(f"sqlite:///{place / 'of_life.db'}", "compute")
    with pytest.raises(ConfigError, match="not/yet"):
        asyncio.run(client.start())
    place.mkdir(parents=True)
    asyncio.run(_declare(f"sqlite:///{place / 'of_life.db'}"))

    asyncio.run(uses(client))


# -- starts and stops that are cancelled, or overlap ------------------------------------------


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_stop_that_is_cancelled_goes_on(client: RpcClient, turns: int):
    """Once it has ended, another loop may start the client."""

    async def main() -> list[str]:
        await client.start()
        await sends(client)
        stop = asyncio.create_task(client.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stop.cancel()
        await asyncio.wait({stop})
        with pytest.raises(DependencyError, match="is not started, or is stopped"):
            await client.cast("echo")
        return await leftovers()

    assert asyncio.run(main()) == []

    asyncio.run(uses(client))


def test_a_client_that_a_cancel_scope_of_anyio_ends_leaves_nothing(client: RpcClient):
    """Such a scope cancels each wait in it, also those of a stop."""

    async def main() -> list[str]:
        for _ in range(3):
            with anyio.move_on_after(0.05):
                async with client:
                    await sends(client)
                    await anyio.sleep(10)
        return await leftovers()

    assert anyio.run(main) == []


def test_a_listener_that_a_cancel_scope_of_anyio_ends_leaves_nothing(
    listener: NotificationListener,
):
    """Its loop waits for the next notification meanwhile."""

    async def main() -> list[str]:
        for _ in range(3):
            with anyio.move_on_after(0.05):
                async with listener:
                    await anext(listener)
        return await leftovers()

    assert anyio.run(main) == []


@pytest.mark.parametrize("end", ["fails", "hangs"])
@pytest.mark.parametrize("kind", ["client", "listener"])
def test_a_start_that_fails_or_is_cancelled_leaves_nothing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
):
    """Whatever it had come to: after a failed `async with` nobody stops the client."""
    one = request.getfixturevalue(kind)
    start = one._transport.start

    async def starts_in_part() -> None:
        await start()
        await one._transport.declare([shared_queue("compute")])
        if end == "hangs":
            await asyncio.Event().wait()
        raise DependencyError("at the end")

    async def main() -> list[str]:
        with pytest.raises(DependencyError if end == "fails" else TimeoutError):
            async with asyncio.timeout(0.2), one:
                pass
        return await leftovers()

    monkeypatch.setattr(one._transport, "start", starts_in_part)
    monkeypatch.setattr(one._life, "_begin", starts_in_part)

    assert asyncio.run(main()) == []
    monkeypatch.undo()
    one._life._begin = one._transport.start
    assert asyncio.run(_starts_and_stops(one)) == []


async def _starts_and_stops(one: RpcClient | NotificationListener) -> list[str]:
    async with one:
        pass
    return await leftovers()


@pytest.mark.parametrize("last", ["start", "stop"])
def test_the_last_of_a_start_and_a_stop_that_overlap_counts(client: RpcClient, last: str):
    """A start waits until the stop is over, and a stop until the client has started."""

    async def main() -> list[str]:
        steps = {"stop": client.stop, "start": client.start}
        if last == "start":
            await client.start()
        first = steps["stop" if last == "start" else "start"]
        await asyncio.gather(first(), steps[last]())
        if last == "start":
            await sends(client)
        else:
            with pytest.raises(DependencyError):
                await sends(client)
        await client.stop()
        return await leftovers()

    assert asyncio.run(main()) == []


def test_a_stop_counts_that_comes_after_a_start_that_waits(client: RpcClient):
    """The starts that wait do not open the client again, and do not return as if they had."""

    async def main() -> list[str]:
        steps = (client.start, client.start, client.stop, client.start, client.stop, client.stop)
        ended = await asyncio.gather(*(step() for step in steps), return_exceptions=True)
        assert [str(one) for one in ended if one is not None] == [OVERTAKEN] * 2
        with pytest.raises(DependencyError, match="not started"):
            await sends(client)
        return await leftovers()

    assert asyncio.run(main()) == []


def test_a_start_that_is_stopped_while_it_waits_for_one_that_fails_says_so(
    client: RpcClient, monkeypatch: pytest.MonkeyPatch
):
    """It neither connects after the stop, nor returns as if it had connected."""

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise DependencyError("away")

    async def main() -> list[BaseException | None]:
        steps = (client.start, client.start, client.stop)
        return await asyncio.gather(*(step() for step in steps), return_exceptions=True)

    monkeypatch.setattr(client._life, "_begin", fails)

    away, stopped, end = asyncio.run(main())

    assert str(away) == "away"
    assert str(stopped) == OVERTAKEN
    assert end is None


@pytest.mark.parametrize("turns", range(6))
def test_a_start_at_any_moment_of_a_stop_starts_the_client_again(client: RpcClient, turns: int):
    """Also between the end of the stop and its being noticed."""

    async def main() -> list[str]:
        ended = asyncio.Event()

        async def ends() -> None:
            ended.set()

        async def restarts() -> None:
            await ended.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            await client.start()

        client._life._end = ends
        client._life._begin = ends
        await client.start()
        ended.clear()
        async with asyncio.timeout(5):
            await asyncio.gather(client.stop(), restarts())
        client._life.check("echo")
        await client.stop()
        return await leftovers()

    assert asyncio.run(main()) == []


def test_a_client_whose_loop_ends_within_a_start_is_refused_in_the_next_one(
    client: RpcClient, monkeypatch: pytest.MonkeyPatch
):
    """What it had opened belongs to the loop that is closed."""

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await client.start()

    monkeypatch.setattr(client._life, "_begin", hangs)
    monkeypatch.setattr(client._life, "_end", hangs)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    with pytest.raises(ConfigError, match="in another event loop, which is closed"):
        asyncio.run(client.start())


def test_a_loop_over_a_listener_whose_start_has_failed_says_so(
    listener: NotificationListener, monkeypatch: pytest.MonkeyPatch
):
    """It would end as if there were no more notifications."""

    async def fails() -> None:
        raise DependencyError("away")

    async def main() -> None:
        with pytest.raises(DependencyError, match="away"):
            await listener.start()
        with pytest.raises(RuntimeError, match="start"):
            await anext(listener)

    monkeypatch.setattr(listener, "_open", fails)

    asyncio.run(main())


def test_a_start_beside_one_that_is_cancelled_starts_the_client(client: RpcClient):
    """It returns only if the client is started."""

    async def main() -> list[BaseException | None]:
        first, second = (asyncio.create_task(client.start()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        ended = await asyncio.gather(first, second, return_exceptions=True)
        await sends(client)
        await client.stop()
        return ended

    cancelled, started = asyncio.run(main())

    assert isinstance(cancelled, asyncio.CancelledError)
    assert started is None


# -- what a stop ends -------------------------------------------------------------------------


@pytest.mark.looptime
@pytest.mark.parametrize("way", ["call", "cast"])
async def test_a_stop_ends_what_still_asks_whether_the_service_takes_requests(way: str):
    """With `fail_fast`; nothing is sent later, when the question would have been over."""
    broker, heard = MemoryBroker(), list[Delivery]()
    service, transport = (MemoryTransport(broker, Process()) for _ in range(2))
    await service.start()
    await transport.start()
    for topic in ("compute", "compute-ops"):
        queue = shared_queue(topic)
        await service.declare([queue])
        await service.consume([queue], heard.append, prefetch=10)
    client = RpcClient(transport, "compute")
    await client.start()
    asking = asyncio.create_task(partial(getattr(client.prepare(fail_fast=True), way), "echo")())
    await asyncio.sleep(0.5)

    await client.stop()
    with pytest.raises(RpcError, match="no request was sent"):
        await asking
    await asyncio.sleep(60)

    assert [delivery.queue.topic for delivery in heard] == ["compute-ops"]
    await transport.stop()
    await service.stop()


LOCKED_S: Final = 3.0
"""How long the tests below wait for a lock, in place of 10 s."""


def lock(path: Path) -> apsw.Connection:
    """Another program's transaction, which ends with the connection."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(30_000)  # a commit of the client may be under way
    connection.execute("BEGIN IMMEDIATE")
    return connection


def impatient(client: RpcClient) -> RpcClient:
    client._transport._engine._busy_timeout_s = LOCKED_S
    client._transport._engine._patience_s = LOCKED_S
    return client


async def waits_twice(path: Path) -> None:
    """Takes as long as two waits for a lock, one after the other, take on this machine now."""
    engine = SqliteEngine(path, ["CREATE TABLE a (b)"], process=Process(), busy_timeout_s=LOCKED_S)
    await engine.start()
    holder = lock(path)
    for _ in range(2):
        with pytest.raises(StoreLockedError):
            await engine.commit(Batch(Point.ACCEPT))
    holder.close()
    await engine.stop()


def test_a_stop_beside_a_locked_queue_file_waits_for_the_lock_once(
    client: RpcClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever is under way: the reading of replies, calls and sends end within one limit."""
    monkeypatch.setattr(sqlite, "CLOSE_S", LOCKED_S)

    async def scenario() -> tuple[list[object], list[object]]:
        await impatient(client).start()
        answered = asyncio.create_task(client.call("echo"))
        while client._replies._consumer is None:
            await asyncio.sleep(0.01)
        holder = lock(tmp_path / "of_life.db")
        casts = [asyncio.create_task(client.cast("echo")) for _ in range(3)]
        calls = [answered, *(asyncio.create_task(client.call("echo")) for _ in range(3))]
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(client.stop())
        reference = asyncio.create_task(waits_twice(tmp_path / "other.db"))
        done, _ = await asyncio.wait({stopping, reference}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {stopping}
        ends = [await asyncio.gather(*all_, return_exceptions=True) for all_ in (casts, calls)]
        holder.close()
        await reference
        assert await leftovers() == []
        return ends[0], ends[1]

    casts, calls = asyncio.run(scenario())

    assert {type(end) for end in casts} == {StoreLockedError}
    assert all(isinstance(end, RpcError | StoreLockedError) for end in calls)


def test_each_send_beside_a_locked_queue_file_names_its_request(client: RpcClient, tmp_path: Path):
    """Also of calls that waited for the reply queue together; none waits for the lock twice."""
    names = ["cast-1", "cast-2", "call-1", "call-2"]

    async def scenario() -> list[Any]:
        async with impatient(client):
            holder = lock(tmp_path / "of_life.db")
            sends = []
            for name in names:
                view = client.prepare(request_id=name)
                send = view.cast if name.startswith("cast") else view.call
                sends.append(asyncio.create_task(send("echo")))
                await asyncio.sleep(0.05)  # the first ones are being tried
            reference = asyncio.create_task(waits_twice(tmp_path / "other.db"))
            ends = asyncio.gather(*sends, return_exceptions=True)
            done, _ = await asyncio.wait({ends, reference}, return_when=asyncio.FIRST_COMPLETED)
            holder.close()
            assert done == {ends}
            await reference
            return await ends

    ends = asyncio.run(scenario())

    assert {type(end) for end in ends} == {StoreLockedError}
    assert [end.request_id for end in ends] == names
    assert [str(end).rpartition(": ")[2] for end in ends] == names
