"""Hosts with a store each: a caller asks about its requests without saying where they went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gracekit import NoAnswerError, RpcClient, TaskCancelledError, UnknownTaskError
from gracekit.rpc.client import ClientView
from tests.process.helpers import SLACK_S, ServiceProcess, Site, until

TOLD_S = 2.5
"""Seconds within which a caller is told that nobody knows."""


@pytest.fixture(params=["file", "broker"])
def apart(request: pytest.FixtureRequest, site: Site) -> Site:
    """A site with queues in a file, and on RabbitMQ."""
    if request.param == "broker":
        site.url = str(request.getfixturevalue("rabbit_url"))
    return site


@pytest.fixture
async def ada(apart: Site) -> AsyncIterator[ClientView]:
    """A caller with a name."""
    async with RpcClient(apart.url, "copies") as client:
        yield client.prepare(context={"user_id": "ada"})


def start(site: Site, host: str) -> ServiceProcess:
    store = f"sqlite:///{site.root}/{host}.db"
    return site.start_program("copier", "directed", host=host, store_url=store)


async def cast(site: Site, caller: ClientView, host: str, key: str) -> str:
    """A request whose handler has begun on *host*; its id."""
    task = await caller.prepare(host=host).cast("copy", key=key)
    await site.effect("start", key)
    return task


async def test_requests_on_two_hosts_are_found_waited_for_and_cancelled(
    apart: Site, ada: ClientView
) -> None:
    """Whichever host takes the question: the one with the record answers, and nothing begins."""
    hosts = {name: await start(apart, name).serving() for name in ("one", "two")}
    kept = [await cast(apart, ada, name, f"kept-{name}") for name in hosts]
    cut = [await cast(apart, ada, name, f"cut-{name}") for name in hosts]
    eve = ada.prepare(context={"user_id": "eve"})

    states = await ada.states([*kept, *cut, "never-sent"])
    assert {task: info.state for task, info in states.items()} == dict.fromkeys(
        [*kept, *cut], "running"
    )
    waiting = asyncio.create_task(ada.results(kept, wait="60s"))
    for task in (*kept, *cut):
        with pytest.raises(UnknownTaskError):
            await eve.cancel(task)
    for task in cut:
        await ada.cancel(task, reason="a mistake")
        with pytest.raises(TaskCancelledError, match="user ada: a mistake"):
            await ada.result(task, wait="60s")
    assert not waiting.done()
    for name in hosts:
        (apart.root / f"kept-{name}").touch()
    found = await waiting

    assert list(found.values()) == [f"kept-{name} on {name}" for name in hosts]
    assert [await ada.result(task) for task in kept] == list(found.values())
    assert {(await ada.cancel(task)).state for task in kept} == {"succeeded"}
    assert len(apart.seen("start")) == 4
    assert len(apart.seen("done")) == 2
    assert [await host.stop() for host in hosts.values()] == [0, 0]


async def test_a_host_that_is_down_is_not_waited_for_unless_its_caller_wants_to(
    apart: Site, ada: ClientView
) -> None:
    """Its caller is told so within 2.5 s; one that waits gets the result once the host is back."""
    one, two = [await start(apart, name).serving() for name in ("one", "two")]
    there = await cast(apart, ada, "two", "there")
    here = await cast(apart, ada, "one", "here")
    two.kill()

    for view in (ada, ada.prepare(host="two")):
        for ask in (view.state, view.result, view.cancel):
            began = time.monotonic()
            with pytest.raises((UnknownTaskError, NoAnswerError)):
                await ask(there)
            assert time.monotonic() - began < TOLD_S + SLACK_S
    assert (await ada.prepare(host="one").state(here)).state == "running"
    one.kill()
    with pytest.raises(NoAnswerError):
        await ada.state(here)
    waiting = asyncio.create_task(ada.results([here, there], wait="120s"))
    (apart.root / "there").touch()
    (apart.root / "here").touch()
    again = [await start(apart, name).serving() for name in ("one", "two")]

    assert list((await waiting).values()) == ["here on one", "there on two"]
    assert [await host.stop() for host in again] == [0, 0]


async def test_a_wait_goes_on_while_its_service_is_restarted(apart: Site, ada: ClientView) -> None:
    """Each question of a wait is answered or repeated, so that a restart is not noticed."""
    first = await start(apart, "one").serving()
    task = await cast(apart, ada, "one", "long")
    waiting = asyncio.create_task(ada.result(task, wait="120s"))
    first.kill()
    second = await start(apart, "one").serving()
    (apart.root / "long").touch()

    assert await waiting == "long on one"
    await until(lambda: len(apart.seen("start", "long")) == 2, "the second start")
    assert await second.stop() == 0


async def test_results_that_are_too_large_for_one_answer_come_from_the_host_of_each(
    apart: Site, ada: ClientView
) -> None:
    """A page holds none of them, so each is asked for by itself."""
    hosts = {name: await start(apart, name).serving() for name in ("one", "two")}
    keys = [f"{name}-{number}" for number in range(3) for name in hosts]
    for key in keys:
        (apart.root / key).touch()
    tasks = [
        await ada.prepare(host=key.partition("-")[0]).cast("copy", key=key, size=700_000)
        for key in keys
    ]

    found = await ada.results(tasks, wait="60s")

    assert [str(one)[:20].strip() for one in found.values()] == [
        f"{key} on {key.partition('-')[0]}" for key in keys
    ]
    assert [await host.stop() for host in hosts.values()] == [0, 0]
