"""What `/metrics` answers: a text that Prometheus reads, and that shows a whole drain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from gracekit import Context, Service
from gracekit.control.facts import BROKER_EVERY_S, LOCAL_EVERY_S
from gracekit.process import Point
from gracekit.telemetry.metrics import METRICS, OTHER, MetricKind
from gracekit.telemetry.prometheus import Exposition
from gracekit.telemetry.readings import Readings, StoreNumbers
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.testing.faults import Fault
from gracekit.tracker.task import Lane
from gracekit.version import VERSION
from tests.service.kit import Doors, Life, World

pytestmark = pytest.mark.looptime

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """One life of a service, as Prometheus sees it."""

    def __init__(self, life: Life) -> None:
        self._runtime = life.runtime
        self._counted = RunMetrics(life.runtime.label_words)
        self._exposition = Exposition(self._counted)
        life.runtime.ground.telemetry.count_into(self._counted)

    def text(self, **more: Any) -> str:
        body, content_type = self._exposition.write(self._runtime.readings(), **more)
        self.content_type = content_type
        return body.decode()

    def samples(self) -> Samples:
        """The sample of each name and labels; a text that cannot be parsed fails."""
        families = list(read_plain(self.text()))
        assert all(family.documentation for family in families)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """The samples of one metric, by the values of its labels in the order of their names."""
        return {
            tuple(value for _, value in sorted(labels)): number
            for (each, labels), number in self.samples().items()
            if each == name
        }

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """The samples of one metric that are not 0."""
        return {values: number for values, number in self.values(name).items() if number}

    def value(self, name: str) -> float | None:
        """The sample of one metric without labels; None if it is left out."""
        return self.values(name).get(())

    def phase(self) -> str:
        (now,) = (name for (name,), is_now in self.values("gracekit_phase").items() if is_now)
        return now


async def scraped(world: World, svc: Service, **settings: Any) -> tuple[Life, Scraped]:
    life = world.life(svc, **settings)
    made = Scraped(life)
    await life.start()
    return life, made


@pytest.fixture
def doors(svc: Service) -> Doors:
    """A service whose handlers wait."""
    made = Doors()

    @svc.rpc(on_interrupt="retry", settle=1)
    async def resize(ctx: Context, vm: str) -> None:
        await made.pass_(vm)

    @svc.rpc(on_interrupt="retry")
    async def copy(ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    return made


# -- a drain --------------------------------------------------------------------------------


async def test_a_drain_can_be_told_from_the_metrics_alone(world: World, svc: Service, doors: Doors):
    """They show that it begins, what it waits for, how much time is left, and what it left."""
    life, seen = await scraped(world, svc, drain_timeout_s=25)
    client = await world.client(svc)
    for vm in ("a", "b", "c"):
        await client.cast("resize", vm=vm)
    await doors.wait(3)
    assert (seen.phase(), seen.value("gracekit_ready")) == ("serving", 1)
    assert seen.counted("gracekit_tasks_in_flight") == {("requests", "resize"): 3}
    assert seen.values("gracekit_intake_open") == {("requests",): 1, ("ops",): 1}
    assert seen.value("gracekit_drain_left_seconds") is None

    life.ask_to_stop()
    await life.hears("intake.closed")
    assert (seen.phase(), seen.value("gracekit_ready")) == ("draining", 0)
    assert seen.values("gracekit_intake_open") == {("requests",): 0, ("ops",): 1}
    assert seen.value("gracekit_drain_left_seconds") == pytest.approx(25, abs=0.1)

    doors.open("a")
    await life.hears("task.finished")
    await asyncio.sleep(5)
    assert seen.counted("gracekit_tasks_in_flight") == {("requests", "resize"): 2}
    assert seen.counted("gracekit_tasks_finished_total") == {("resize", "succeeded"): 1}
    assert seen.value("gracekit_drain_left_seconds") == pytest.approx(20, abs=0.1)
    assert (seen.value("gracekit_drain_at_risk"), seen.value("gracekit_drain_unknown")) == (0, 2)

    await life.hears("task.handed_over", 2)
    assert seen.counted("gracekit_tasks_handed_over_total") == {("resize",): 2}
    assert seen.value("gracekit_drain_left_seconds") == 0

    report = await life.wait_end()
    assert seen.phase() == "stopped"
    assert seen.values("gracekit_intake_open") == {("requests",): 0, ("ops",): 0}
    assert seen.value("gracekit_drain_duration_seconds_count") == 1
    assert seen.value("gracekit_drain_duration_seconds_sum") == pytest.approx(report.waited_s)
    assert seen.values("gracekit_tasks_in_flight")["requests", "resize"] == 0


async def test_who_will_not_end_in_time_is_at_risk(world: World, svc: Service, doors: Doors):
    """The history of methods says when the last task should end, and how many after the
    deadline.
    """
    life, seen = await scraped(world, svc, drain_timeout_s=25)
    client = await world.client(svc)
    for _ in range(5):
        await client.cast("copy", seconds=40.0)
    await life.hears("task.finished", 5)
    await client.cast("copy", seconds=40.0)
    await life.hears("task.started", 6)
    assert seen.value("gracekit_drain_at_risk") == 0
    assert seen.value("gracekit_drain_expected_seconds") is None

    life.ask_to_stop()
    await life.hears("drain.started")
    await asyncio.sleep(10)

    assert seen.value("gracekit_drain_at_risk") == 1
    assert seen.value("gracekit_drain_expected_seconds") == pytest.approx(30, abs=0.5)
    await life.wait_end()


async def test_a_run_counts_what_it_has_done_itself(world: World, svc: Service, doors: Doors):
    """Counters begin at 0 with each run, and each run shows its own start time."""
    first, seen = await scraped(world, svc, drain_timeout_s=5)
    await (await world.client(svc)).cast("resize", vm="a")
    await doors.wait(1)
    began_at = seen.value("gracekit_run_start_time_seconds")
    await first.drain()

    second, again = await scraped(world, svc)
    assert again.values("gracekit_tasks_finished_total")["resize", "succeeded"] == 0
    doors.open("a")
    await second.hears("task.finished")

    assert seen.counted("gracekit_tasks_handed_over_total") == {("resize",): 1}
    assert again.counted("gracekit_tasks_handed_over_total") == {}
    assert again.counted("gracekit_tasks_reconciled_total") == {("run_again",): 1}
    assert again.counted("gracekit_tasks_finished_total") == {("resize", "succeeded"): 1}
    assert again.value("gracekit_run_start_time_seconds") > began_at


# -- saturation -----------------------------------------------------------------------------


async def test_what_runs_is_shown_beside_how_much_may(world: World, svc: Service, doors: Doors):
    """Tasks that wait are in flight and do not run; a reload changes the limit that is shown."""
    life, seen = await scraped(world, svc, max_running=2, ops_max_running=5)
    client = await world.client(svc)
    for vm in ("a", "b", "c"):
        await client.cast("resize", vm=vm)
    await doors.wait(2)
    await world.settle()

    assert seen.counted("gracekit_tasks_in_flight") == {("requests", "resize"): 3}
    assert seen.values("gracekit_tasks_running") == {("requests",): 2, ("ops",): 0}
    assert seen.values("gracekit_tasks_running_limit") == {("requests",): 2, ("ops",): 5}

    life.runtime.ground.live.take(replace(life.runtime.settings, max_running=7))
    await doors.wait(3)

    assert seen.values("gracekit_tasks_running") == {("requests",): 3, ("ops",): 0}
    assert seen.values("gracekit_tasks_running_limit") == {("requests",): 7, ("ops",): 5}
    doors.open("a", "b", "c")
    await life.hears("task.finished", 3)
    assert seen.values("gracekit_tasks_running") == {("requests",): 0, ("ops",): 0}


async def test_the_version_is_a_label(world: World, svc: Service):
    """A dashboard shows which instances run which version, by joining with it."""
    _, seen = await scraped(world, svc)

    assert seen.values("gracekit_build_info") == {(VERSION,): 1}


# -- the queues -----------------------------------------------------------------------------


async def test_an_intake_whose_queues_cannot_be_read_is_not_open(
    world: World, svc: Service, doors: Doors
):
    """While the broker cannot be reached the lane shows 0, although no operator has closed it."""
    life, seen = await scraped(world, svc)
    await world.verb(life, "quiet")
    life.faults.delay_s = 20
    life.plan("consume", Fault.DELAY)
    await world.verb(life, "resume")
    assert seen.values("gracekit_intake_open") == {("requests",): 0, ("ops",): 1}

    await life.hears("intake.opened", 3)

    assert seen.values("gracekit_intake_open") == {("requests",): 1, ("ops",): 1}


async def test_an_intake_that_pauses_is_open(world: World, svc: Service):
    """Neither a want of places nor too many bytes means that the queues cannot be read."""
    doors = Doors()

    @svc.rpc
    async def keep(ctx: Context, text: str) -> None:
        await doors.pass_("keep")

    life, seen = await scraped(world, svc, max_accepted=1, prefetch_bytes=1000)
    client = await world.client(svc)
    life.faults.delay_s = 20
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    await client.cast("keep", text="x" * 2000)
    await asyncio.sleep(10)
    assert life.runtime.wired.servers[Lane.REQUESTS].is_held
    assert seen.values("gracekit_intake_open") == {("requests",): 1, ("ops",): 1}

    await doors.wait(1)
    await client.cast("keep", text="y")
    await asyncio.sleep(60)
    assert seen.values("gracekit_intake_open") == {("requests",): 1, ("ops",): 1}


# -- periodic jobs --------------------------------------------------------------------------


async def test_runs_of_periodic_jobs_are_counted_by_outcome(world: World, svc: Service):
    """A job that always fails is told from one that runs well, and the last success has its
    time.
    """

    @svc.periodic(every=1)
    async def good(ctx: Context) -> None: ...

    @svc.periodic(every=1)
    async def bad(ctx: Context) -> None:
        raise LookupError

    _, seen = await scraped(world, svc)
    assert set(seen.values("gracekit_jobs_finished_total").values()) == {0}
    assert seen.values("gracekit_job_last_success_time_seconds") == {}
    await asyncio.sleep(3.5)

    assert seen.counted("gracekit_jobs_finished_total") == {
        ("good", "succeeded"): 3,
        ("bad", "failed"): 3,
    }
    ((name, at),) = seen.values("gracekit_job_last_success_time_seconds").items()
    assert name == ("good",)
    assert world.clock.wall() - at == pytest.approx(0.5, abs=0.1)


async def test_a_periodic_job_has_no_series_among_the_tasks(
    world: World, svc: Service, doors: Doors
):
    """A counter of tasks that no job ever feeds would show 0 for a job that fails all the time."""

    @svc.periodic(every=1)
    async def sweep(ctx: Context) -> None: ...

    _, seen = await scraped(world, svc)
    await asyncio.sleep(1.5)

    names = {name for name, labels in seen.samples() if ("method", "sweep") in labels}
    assert names == {
        "gracekit_jobs_finished_total",
        "gracekit_job_last_success_time_seconds",
        "gracekit_tasks_in_flight",
    }


async def test_a_singleton_job_that_is_skipped_is_not_counted(world: World, svc: Service):
    """A process that never gets the lease has run the job neither well nor badly."""

    @svc.periodic(every=1, singleton=True)
    async def sweep(ctx: Context) -> None:
        await asyncio.sleep(100)

    holder, _ = await scraped(world, svc, instance="a")
    await world.until(lambda: holder.runtime.ground.tracker.running == 1)
    _, seen = await scraped(world, svc, instance="b")
    await asyncio.sleep(5)

    assert seen.counted("gracekit_jobs_finished_total") == {}


# -- what comes from the wire ---------------------------------------------------------------


async def test_hostile_requests_make_no_label(world: World, svc: Service, doors: Doors):
    """Neither the name of a method nor an id becomes one, however many are tried."""
    _, seen = await scraped(world, svc)
    client = await world.client(svc)
    for n in range(1100):
        await client.cast(f'no{n}\n{{le="1"}} 7\n# TYPE x counter', **{f"arg{n}": n})
    await client.cast("resize", vm="a", other=1)
    await world.deliver("compute", b"{")
    await world.settle()

    samples = seen.samples()
    values = {value for _, labels in samples for name, value in labels if name != "le"}
    assert len(values) < 50
    assert OTHER not in values
    assert not any("no" in value and "\n" in value for value in values)
    assert seen.counted("gracekit_tasks_rejected_total") == {
        ("unknown_method",): 1100,
        ("arguments",): 1,
        ("unreadable",): 1,
    }


# -- queues ---------------------------------------------------------------------------------


async def test_what_waits_in_the_queues_is_counted_when_somebody_asks(
    world: World, svc: Service, doors: Doors
):
    """A broker only every 15 s. Where it cannot be asked there is no sample, and the status is
    answered all the same.
    """
    life, seen = await scraped(world, svc)
    client, facts = await world.client(svc), life.runtime.wired.control._health.facts
    assert seen.values("gracekit_requests_waiting") == {}
    await life.runtime.wired.coordinator.quiet()
    for number in (1, 2):
        await client.cast("copy", seconds=1)
        await asyncio.sleep(LOCAL_EVERY_S)
        await facts.measure()
        assert seen.values("gracekit_requests_waiting") == {("requests",): number, ("ops",): 0}

    facts._count_every_s = BROKER_EVERY_S
    await client.cast("copy", seconds=1)
    await facts.measure()
    assert seen.values("gracekit_requests_waiting")["requests",] == 2
    await asyncio.sleep(BROKER_EVERY_S)
    await facts.measure()
    assert seen.values("gracekit_requests_waiting")["requests",] == 3
    assert (await world.verb(life, "status"))["queues"]["requests"]["waiting"] == 3

    await life.runtime.ground.transport.stop()
    await asyncio.sleep(BROKER_EVERY_S)
    await facts.measure()
    assert seen.values("gracekit_requests_waiting") == {}
    answer = await life.runtime.admin.own_status()
    assert (answer["queues"], answer["phase"]) == ({}, "quiet")
    await life.runtime.ground.transport.start()


# -- the text -------------------------------------------------------------------------------


async def test_every_row_of_the_table_is_rendered(world: World, svc: Service, doors: Doors):
    """It has its help, type and labels, in the text format and, if requested, in OpenMetrics."""
    life, _ = await scraped(world, svc)
    runtime = life.runtime
    counted = RunMetrics(runtime.label_words)
    for metric in METRICS:
        for event in metric.events:
            counted.record(event, {"method": "resize", "ran_s": 0.2, "waited_s": 1.0})
    seen = StoreNumbers(
        unfinished={"accepted": 2},
        oldest_unfinished_s=3.0,
        accounts_off_by=0,
        notifications_due=1,
        open_holds=1,
    )
    waits = {"waiting": {"ops": 1}, "oldest_waiting_s": {"ops": 2.0}}
    readings = msgspec.structs.replace(
        runtime.readings(), store=seen, broker_connected=True, **waits
    )

    plain, plain_type = Exposition(counted).write(readings)
    wanted = "application/openmetrics-text; version=1.0.0"
    opened, open_type = Exposition(counted).write(readings, accept=f"{wanted},text/plain;q=0.5")

    assert plain_type == PLAIN
    assert open_type.startswith(wanted)
    families = {family.name: family for family in read_plain(plain.decode())}
    assert {f.name for f in read_open(opened.decode())} == families.keys()
    shown_now = set(families)
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        if name not in shown_now:
            assert metric.name in {
                "gracekit_job_last_success_time_seconds",
                "gracekit_drain_left_seconds",
                "gracekit_drain_expected_seconds",
            }
            continue
        family = families[name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        labels = {label.name for label in metric.labels}
        extra = {"le"} if metric.kind is MetricKind.HISTOGRAM else set()
        assert all(labels <= sample.labels.keys() <= labels | extra for sample in family.samples)
    assert {"state": "accepted"} in [one.labels for one in families["gracekit_unfinished"].samples]


async def test_each_scrape_shows_what_a_first_one_would(world: World, svc: Service):
    """In either format, whatever was scraped before."""
    life, _ = await scraped(world, svc)
    counted = RunMetrics(life.runtime.label_words)
    kept, readings = Exposition(counted), life.runtime.readings()
    later = msgspec.structs.replace(
        readings, drain_left_s=4.0, store=StoreNumbers(unfinished={"running": 1})
    )

    def same(now: Readings, accept: str) -> bytes:
        written = kept.write(now, accept=accept)
        assert written == Exposition(counted).write(now, accept=accept)
        return written[0]

    texts = []
    for accept in ("", "application/openmetrics-text; version=1.0.0", ""):
        texts += [same(readings, accept), same(readings, accept), same(later, accept)]
        counted.record("task.finished", {"method": "resize", "outcome": "failed", "ran_s": 0.2})
        texts.append(same(later, accept))
        counted.observe_commit(0.02)
        texts.append(same(readings, accept))

    assert len(set(texts)) == len(texts) - 3  # each second one is the first again
    assert all(text.count(b"# EOF") == (5 <= n < 10) for n, text in enumerate(texts))


async def test_the_registry_of_the_application_stays_its_own(world: World, svc: Service):
    """gracekit's metrics are not in the library's global registry, nor the reverse."""
    before = {family.name for family in REGISTRY.collect()}

    _, seen = await scraped(world, svc)
    shown = {name for name, _ in seen.samples()}

    assert {family.name for family in REGISTRY.collect()} == before
    assert all(name.startswith(("gracekit_", "rpc_server_")) for name in shown)


async def test_a_slow_commit_is_seen(world: World, svc: Service, doors: Doors):
    """It is in the histogram, and in the longest of the last seconds, which health checks use."""
    life, seen = await scraped(world, svc)
    before = seen.values("gracekit_store_commit_seconds_bucket")
    life.faults.delay_s = 3.0
    life.plan(Point.FINISH, Fault.DELAY)

    await (await world.client(svc)).call("copy", seconds=0.0)

    after = seen.values("gracekit_store_commit_seconds_bucket")
    assert life.engine.commits.longest_s() == pytest.approx(3, abs=0.1)
    assert after["2.5",] - before["2.5",] < after["+Inf",] - before["+Inf",]
    assert seen.value("gracekit_store_commit_seconds_count") == after["+Inf",]


@pytest.mark.looptime(False)
@pytest.mark.process
def test_a_missing_package_is_named_with_its_remedy():
    """This is for a request of metrics without `prometheus-client`."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from gracekit import ConfigError\n"
        "try: import gracekit.telemetry.prometheus\n"
        "except ConfigError as error: print(error)"
    )

    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert said.stderr == ""
    assert said.stdout.strip().endswith("pip install gracekit[prometheus]")
