"""Callers of real processes: waits outlive kills, and cancels end what has not ended."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gracekit.errors import NoAnswerError, TaskCancelledError
from tests.process import asked
from tests.process.helpers import Site
from tests.scale import scale

pytestmark = pytest.mark.timeout(scale(120, 600))

TASKS = scale(20, 300)
PATIENT = f"{scale(100, 500)}s"


async def play(site: Site) -> None:
    """Some are delayed, some fail once, while a process is killed and its callers wait."""
    services = [await site.start_program("asked").serving() for _ in range(2)]
    async with asked.svc.client(site.url) as client:
        keys = [f"k-{number}" for number in range(TASKS)]
        ids = [
            await client.prepare(delay="500ms" if number % 2 else None).cast(
                asked.work, key=key, fails=number % 3 % 2
            )
            for number, key in enumerate(keys)
        ]
        stays = await client.cast(asked.work, key="stays", waits=True)
        late = await client.prepare(delay="1h").cast(asked.work, key="late")
        waiting = asyncio.create_task(client.results(ids, wait=PATIENT))
        await site.effect("start", "stays")
        services[0].kill()
        await services[0].exit_code()
        await site.start_program("asked").serving()

        assert list((await waiting).values()) == [f"{key} is done" for key in keys]

        for task in (stays, late):
            await client.cancel(task, reason="nobody waits for it")
        ended = await client.results([stays, late], wait=PATIENT)
        assert {type(error) for error in ended.values()} == {TaskCancelledError}
        done = Counter(line.key for line in site.seen("done"))
        assert {done[key] for key in keys} <= {1, 2}  # killed between its effect and its outcome
        assert not site.seen("start", "late")
        assert {info.state for info in (await client.states(ids)).values()} == {"succeeded"}


@pytest.mark.process
async def test_results_come_although_attempts_fail_and_a_process_is_killed(tmp_path) -> None:
    """Through a file of queues."""
    site = Site(tmp_path)
    try:
        await play(site)
    finally:
        site.close()


@pytest.mark.process
async def test_nobody_answers_when_no_service_runs(tmp_path) -> None:
    """Within two seconds, and nothing is started by it."""
    site = Site(tmp_path)
    try:
        service = await site.start_program("asked").serving()
        async with asked.svc.client(site.url) as client:
            task = await client.cast(asked.work, key="k")
            assert await client.result(task, wait=PATIENT) == "k is done"
            assert await service.stop() == 0
            with pytest.raises(NoAnswerError):
                await client.result(task)
            await site.start_program("asked").serving()
            assert await client.result(task, wait=PATIENT) == "k is done"
        assert len(site.seen("start")) == 1
    finally:
        site.close()
