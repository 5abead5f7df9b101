"""What docs/stopping.md says of a stop is what a stop does; its tables agree with the code."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Final, get_args

import pytest

from gracekit import Context, Done, Retry, Service, TaskInterruptedError
from gracekit.config.choices import OnInterrupt
from gracekit.config.settings import ALARM_AFTER_HARD_LIMIT_S, BY_VARIABLE, Settings
from gracekit.config.values import format_duration
from gracekit.exits import ExitCode, Verdict
from gracekit.process import Point
from gracekit.rpc.methods import Method
from gracekit.runs.why import TABLE
from gracekit.signals import DUMP_SIGNAL, HANGUP_SIGNAL, INTAKE_SIGNALS, STOP_SIGNALS
from gracekit.testing import InMemoryService, TaskState
from gracekit.tracker.task import Interruption, Reason
from tests.docs.pages import Page, run
from tests.docs.tables import section, tables
from tests.testing.virtual import virtual

PAGE: Final = Page("stopping.md")
WAYS, *_ = tables(section(PAGE.text, "Every way to stop"))
STEPS, *_ = tables(section(PAGE.text, "The eight steps of a drain"))
POLICIES, CUTS = tables(section(PAGE.text, "What becomes of an interrupted task"))
SETTLE_S: Final = 10.0


@pytest.mark.process
@pytest.mark.parametrize(("name", "number"), [("try_it.py", 0), ("stopped_by_the_program.py", 1)])
def test_a_program_of_the_page_prints_what_the_page_says(tmp_path: Path, name: str, number: int):
    """A reader can copy it."""
    PAGE.write_to(tmp_path)

    assert run(tmp_path, name) == PAGE.outputs[number]


# -- the tables and the code ------------------------------------------------------------


def test_every_signal_that_is_watched_has_a_row():
    """Nothing that gracekit takes from the program is left unsaid."""
    said = set(re.findall(r"\bSIG[A-Z]+[12]?\b", " ".join(row[0] for row in WAYS)))

    watched = {*STOP_SIGNALS, HANGUP_SIGNAL, DUMP_SIGNAL, *INTAKE_SIGNALS}
    assert said == {number.name for number in watched}


def test_the_exit_codes_are_those_of_the_code():
    """Each once, and none that there is not."""
    (codes,) = tables(section(PAGE.text, "Exit codes"))

    assert sorted(int(row[0]) for row in codes) == sorted(map(int, ExitCode))


def test_the_words_for_the_end_of_a_run_are_those_of_the_code():
    """What was left, with the verdict of JSON, and why it stopped: in the order of the table."""
    left, whys = tables(section(PAGE.text, "Why a run stopped"))

    assert [row[:2] for row in left] == [[one.left, one.value] for one in Verdict]
    assert [row[0] for row in whys] == [row.word for row in TABLE]


def test_the_steps_are_numbered_and_their_settings_have_these_defaults():
    """Eight steps; the names and defaults of the settings are the code's."""
    assert [row[0] for row in STEPS if row[0]] == [str(number) for number in range(1, 9)]
    settings = Settings()
    for _, _, _, variable, said in STEPS:
        if variable:
            assert format_duration(getattr(settings, BY_VARIABLE[variable])) == said, variable


def test_the_hard_limit_is_the_sum_that_the_page_names():
    """29 s by default, and half a second later the alarm."""
    (parts,) = re.findall(r"at the latest (.*?) after the stop", PAGE.text, re.DOTALL)
    names = re.findall(r"`(\w+)`", parts)

    settings = Settings()
    assert sum(getattr(settings, f"{name}_s") for name in names) == settings.hard_limit_s == 29
    assert ALARM_AFTER_HARD_LIMIT_S == 0.5


def test_every_policy_has_a_row_and_a_column():
    """And the kinds of interruption are those of the journal."""
    assert [row[0].split('"')[1] for row in POLICIES] == list(get_args(OnInterrupt))
    assert {row[1] for row in CUTS} - {""} == {cut.value for cut in Interruption}


# -- what becomes of a task, played -----------------------------------------------------


class World:
    """What a handler has done.

    Attributes:
        began: Attempts.
        probes: How often the truth was asked.
    """

    def __init__(self) -> None:
        self.began: list[int] = []
        self.probes = 0
        self.hangs = False


def service(policy: OnInterrupt, world: World) -> Service:
    """One method that works for a minute, by steps or not."""
    svc = Service("work")

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context, steps: bool = False) -> str:
        world.began.append(ctx.attempt)
        if steps:
            async for _ in ctx.steps(range(60)):
                await asyncio.sleep(1)
            return "done"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            while world.hangs:
                await asyncio.sleep(1)
            raise
        return "done"

    if policy == "probe":

        @work.probe
        async def probe(ctx: Context, steps: bool = False) -> Done | Retry:
            world.probes += 1
            return Done("found")

    return svc


def row_of(text: str) -> dict[OnInterrupt, str]:
    """What the page says for each policy, of the row whose first cell begins so."""
    (row,) = (row for row in CUTS if row[0].startswith(text))
    return dict(zip(get_args(OnInterrupt), row[2:], strict=True))


JOURNALED: Final[tuple[OnInterrupt, ...]] = ("error", "retry", "probe")


def what_became(one: InMemoryService, world: World, task_id: str) -> str:
    """In the page's words."""
    if one.state_of(task_id) is TaskState.ERRORED:
        assert one.row(task_id)["reason"] == Reason.INTERRUPTED.value
        return "ERRORED"
    if world.probes:
        return "is probed"
    return "runs again" if len(world.began) > 1 else "nothing"


@pytest.mark.parametrize("policy", JOURNALED)
@virtual
async def test_a_task_that_was_cut_at_the_deadline_is_settled_at_once(policy: OnInterrupt):
    """Its coroutine has returned, so nothing of it can still act."""
    world = World()
    async with InMemoryService(service(policy, world)) as one:
        task_id = await one.cast("work")
        await one.pass_time(1)
        report = await one.drain()
        assert (report.waited_s, report.exit_code) == (25.0, ExitCode.HANDED_OVER)
        cut = one.row(task_id)["cut"]
        await one.start()
        await one.pass_time(1)

        assert cut == Interruption.CANCELLED.value
        assert what_became(one, world, task_id) == row_of("It was cancelled at")[policy]
        await one.settled()


@pytest.mark.parametrize("policy", JOURNALED)
@virtual
async def test_a_task_whose_process_died_is_settled_after_the_settle_time(policy: OnInterrupt):
    """But for `error`, with which nothing is repeated: it does not wait."""
    world = World()
    async with InMemoryService(service(policy, world)) as one:
        task_id = await one.cast("work")
        await one.pass_time(1)
        await one.crash()
        await one.start()
        await one.pass_time(SETTLE_S - 2)
        early = what_became(one, world, task_id)
        await one.pass_time(4)
        late = what_became(one, world, task_id)

        said = row_of("Its process died")[policy]
        assert late == said.removesuffix(" after the settle time")
        assert early == ("nothing" if said.endswith("settle time") else late)
        await one.settled()


@pytest.mark.parametrize("policy", JOURNALED)
@virtual
async def test_a_task_that_stopped_at_a_safe_point_goes_on(policy: OnInterrupt):
    """Whatever its policy says: no step is done twice, and no probe is asked."""
    world = World()
    async with InMemoryService(service(policy, world)) as one:
        task_id = await one.cast("work", steps=True)
        await one.pass_time(5.5)
        report = await one.drain()
        row = one.row(task_id)
        await one.start()
        await one.settled()

        assert report.waited_s < 1
        assert (row["cut"], row["cursor"]) == (Interruption.SAFE_POINT.value, 5)
        assert row_of("It stopped at")[policy] == "goes on from its cursor"
        assert (one.state_of(task_id), world.began, world.probes) == (
            TaskState.SUCCEEDED,
            [1, 2],
            0,
        )


@virtual
async def test_a_handler_that_does_not_return_is_recorded_as_unclean():
    """The drain ends in time, and only the end of the process ends the handler."""
    world = World()
    world.hangs = True
    async with InMemoryService(service("retry", world)) as one:
        task_id = await one.cast("work")
        await one.pass_time(1)
        report = await one.drain()

        assert report.must_die
        assert report.unclean == [task_id]
        assert one.row(task_id)["cut"] == Interruption.UNCLEAN.value
        world.hangs = False
        await one.start()
        await one.settled()
        assert one.state_of(task_id) is TaskState.SUCCEEDED


@virtual
async def test_a_task_that_was_accepted_and_never_started_runs_whatever_its_policy():
    """It has done nothing that could be done twice."""
    world = World()
    async with InMemoryService(service("error", world), max_running=1) as one:
        first, second = await one.cast("work"), await one.cast("work")
        await one.pass_time(1)
        report = await one.drain()
        await one.start()
        await one.settled()

        assert (report.handed_over, report.not_started) == ([first], [second])
        assert row_of("It was accepted")["error"] == "runs"
        assert one.state_of(second) is TaskState.SUCCEEDED


@virtual
async def test_a_requeue_task_that_was_cut_is_delivered_again():
    """It has no row: its message went back to the queue."""
    world = World()
    async with InMemoryService(service("requeue", world)) as one:
        task_id = await one.cast("work")
        await one.pass_time(1)
        report = await one.drain()
        before = one.state_of(task_id)
        await one.start()
        await one.settled()

        assert (report.given_back, before, len(world.began)) == (1, None, 2)
        assert row_of("It was cancelled at")["requeue"] == "delivered again"


def test_what_a_handler_can_do_is_in_its_context():
    """Every name of the table."""
    (rows,) = tables(section(PAGE.text, "What a handler can do"))
    names = re.findall(r"ctx\.(\w+)", " ".join(row[0] for row in rows))

    assert len(names) > len(rows)
    assert [name for name in names if not hasattr(Context, name)] == []


@virtual
async def test_a_task_is_errored_after_max_attempts_crashes():
    """Three by default, and the last one has met it alone."""
    world = World()
    async with InMemoryService(service("retry", world)) as one:
        task_id = await one.cast("work")
        for _ in range(Settings().max_attempts):
            await one.until(lambda: one.state_of(task_id) is TaskState.RUNNING)
            await one.pass_time(1)
            await one.crash()
            await one.start()
        await one.settled()

        assert world.began == [1, 2, 3]
        assert one.row(task_id)["reason"] == Reason.ATTEMPTS.value


# -- ways to stop, played ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "waited_s"),
    [
        ((signal.SIGTERM,), 25.0),
        ((signal.SIGTERM, signal.SIGTERM), 25.0),
        ((signal.SIGINT,), 25.0),
        ((signal.SIGINT, signal.SIGINT), 0.0),
        ((signal.SIGQUIT,), 0.0),
        ((signal.SIGTERM, signal.SIGINT), 25.0),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 0.0),
    ],
    ids=lambda value: "+".join(one.name for one in value) if isinstance(value, tuple) else None,
)
@virtual
async def test_signals_drain_or_hand_over_at_once(
    numbers: tuple[signal.Signals, ...], waited_s: float
):
    """A second Ctrl-C, and SIGQUIT, end the wait; a second SIGTERM does not."""
    async with InMemoryService(service("retry", World())) as one:
        await one.cast("work")
        await one.pass_time(1)
        for number in numbers:
            one.interrupt(number)
        report = await one.wait_stopped()

        assert round(report.waited_s, 1) == waited_s
        assert report.exit_code is ExitCode.HANDED_OVER
        await one.start()
        await one.settled()


@virtual
async def test_a_drain_closes_the_intake_first_and_the_ops_topic_last():
    """In this order: announced, intake closed, tasks ended, ops closed, recorded."""
    async with InMemoryService(service("retry", World())) as one:
        await one.cast("work")
        await one.pass_time(50)
        await one.drain()

        names = [(name, fields.get("lane")) for name, fields in one.events]
    order = [
        ("drain.started", None),
        ("intake.closed", "requests"),
        ("task.finished", "requests"),
        ("intake.closed", "ops"),
        ("service.stopped", None),
    ]
    assert [entry for entry in names if entry in order] == order


def holding() -> tuple[Service, Method[[str], bool]]:
    """A service whose drain a hold keeps, and the method that ends the hold."""
    svc = Service("moves")

    @svc.rpc
    async def expect(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="15m")

    @svc.ops
    async def arrived(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    return svc, arrived


@virtual
async def test_a_hold_keeps_the_drain_until_it_is_ended():
    """Nothing runs, and the ops topic answers the request that ends it."""
    svc, arrived = holding()
    async with InMemoryService(svc) as one:
        await one.call("expect", vm="1")
        one.interrupt()
        await one.pass_time(10)
        ended = await one.call(arrived, vm="1")
        report = await one.wait_stopped()

        assert ended
        assert 10 <= report.waited_s < 12
        assert report.exit_code is ExitCode.DRAINED


@virtual
async def test_a_hold_that_is_open_at_the_deadline_is_75():
    """It stays in the store; without a probe the next start ends it."""
    svc, _ = holding()
    async with InMemoryService(svc) as one:
        await one.call("expect", vm="1")
        report = await one.drain()
        await one.start()
        await one.pass_time(1)

        assert (report.open_holds, report.exit_code) == (1, ExitCode.HANDED_OVER)
        assert [fields["reason"] for fields in one.told("hold.ended")] == ["no_probe"]


@virtual
async def test_a_kill_after_a_stop_was_asked_for_charges_no_task():
    """The run's verdict is `stop_timeout`: the platform has lost its patience."""
    world = World()
    async with InMemoryService(service("retry", world)) as one:
        task_id = await one.cast("work")
        await one.pass_time(1)
        one.interrupt()
        await one.pass_time(1)
        await one.crash()
        await one.start()
        await one.pass_time(1)

        row = one.row(task_id)
        assert (row["cut"], row["crashes"]) == (Interruption.UNCLEAN.value, 0)
        await one.settled()


@virtual
async def test_a_caller_is_told_of_a_task_that_is_not_run_again():
    """The next start answers it."""
    async with InMemoryService(service("error", World())) as one:
        one.crash_at(Point.FINISH, "before")
        pending = one.prepare(timeout="10m").start_call("work")
        await one.wait_crashed()
        await one.start()

        with pytest.raises(TaskInterruptedError, match="interrupted"):
            await pending
