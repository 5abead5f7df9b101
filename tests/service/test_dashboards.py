"""Dashboard, alerts and page ask for nothing that `/metrics` does not have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gracekit import Context, Found, Service
from gracekit.telemetry.metrics import METRICS, Metric
from gracekit.telemetry.prometheus import Exposition
from gracekit.telemetry.readings import StoreNumbers
from gracekit.telemetry.run_metrics import RunMetrics
from tests.scale import SOAK_VARIABLE
from tests.service.kit import Doors, World

pytestmark = pytest.mark.looptime

ROOT: Final = Path(__file__).resolve().parent.parent.parent
ALERTS: Final = ROOT / "dashboards" / "alerts.yml"
DASHBOARD: Final = ROOT / "dashboards" / "gracekit.json"
PAGE: Final = ROOT / "docs" / "observability.md"
OF_PROMETHEUS: Final = {"job", "instance"}  # labels that every scrape adds
MADE_BY_PROMETHEUS: Final = "up"  # whether it could scrape a target
KNOWN_WORDS: Final = {
    *(
        "sum",
        "min",
        "max",
        "count",
        "rate",
        "increase",
        "changes",
        "abs",
        "histogram_quantile",
        "time",
    ),
    *("and", "or", "unless", "by", "on", "delta", "min_over_time", "last_over_time"),
    MADE_BY_PROMETHEUS,
}


@pytest.fixture
async def rendering(world: World, svc: Service) -> str:
    """What `/metrics` answers in the middle of a drain, with every metric that has a value."""
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def resize(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    @svc.periodic(every=3600)
    async def sweep(ctx: Context) -> None: ...

    vm = svc.kind("vm")

    @vm.find
    async def vms(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return []

    @vm.write
    async def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
        return True

    life = world.life(svc)
    counted = RunMetrics(life.runtime.label_words)
    life.runtime.ground.telemetry.count_into(counted)
    await life.start()
    client = await world.client(svc)
    doors.open("a")
    await client.call("resize", vm="a")
    await client.cast("resize", vm="b")
    await doors.wait(2)
    life.ask_to_stop()
    await life.hears("drain.started")
    store = StoreNumbers(
        unfinished={"running": 1},
        oldest_unfinished_s=3.0,
        accounts_off_by=0,
        notifications_due=2,
        open_holds=1,
    )
    shown = msgspec.structs.replace(
        life.runtime.readings(),
        drain_expected_s=4.0,
        broker_connected=True,
        job_successes={"sweep": 1.0},
        waiting={"requests": 5},
        oldest_waiting_s={"requests": 3.0},
        store=store,
    )
    body, _ = Exposition(counted).write(shown)
    doors.open("b")
    await life.wait_end()
    return body.decode()


def labels_by_name(rendering: str) -> dict[str, set[str]]:
    """The labels of every sample that Prometheus would take, and those that it adds."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(rendering):
        for sample in family.samples:
            found.setdefault(sample.name, set(OF_PROMETHEUS)).update(sample.labels)
    return found


# -- what is asked --------------------------------------------------------------------------


class Query(NamedTuple):
    """An expression, and the labels that are shown of what it gives."""

    place: str
    expression: str
    shown: set[str]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    """The queries of every panel, every variable and every alert."""
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Query(panel["title"], target["expr"], shown)
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            yield Query(variable["name"], asked[1], {asked[2]})
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        yield Query(rule["alert"], rule["expr"], shown)


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric in an expression, and the labels that select its series."""
    for name, chosen in re.findall(r"\b([a-z]+_[a-z_]+)\b(?:\{([^}]*)\})?", without(expression)):
        if name not in KNOWN_WORDS:
            yield name, set(re.findall(r"(\w+)(?:=~|!~|!=|=)", chosen))


def groupings(expression: str) -> set[str]:
    """The labels by which an expression groups or joins."""
    lists = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return {label for one in lists for label in re.findall(r"\w+", one)}


def without(expression: str) -> str:
    """The expression without the words of its groupings and texts."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    return re.sub(r"\b(by|on)\s*\([^)]*\)", "", plain)


def test_every_word_of_a_query_is_known():
    """Otherwise the checks below would overlook words that they do not recognise as metrics."""
    for query in queries():
        rest = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b[a-z]+_[a-z_]+\b", "", without(query.expression))
        assert set(re.findall(r"[a-zA-Z_]\w*", rest)) <= KNOWN_WORDS, query


async def test_every_query_asks_for_what_is_rendered(rendering: str):
    """A dashboard would show nothing otherwise, and an alert would never fire."""
    known = labels_by_name(rendering)

    for query in queries():
        used = list(selectors(query.expression))
        assert used, query
        for name, chosen in used:
            assert name in known, query
            assert chosen <= known[name], query
        there = set().union(*(known[name] for name, _ in used))
        assert groupings(query.expression) | query.shown <= there, query


async def test_every_metric_is_drawn(rendering: str):
    """Only the duration of drains is not, because the run has ended before it can be scraped."""
    drawn = {
        name for panel in panels() for t in panel["targets"] for name, _ in selectors(t["expr"])
    }

    left_out = {
        m.name for m in METRICS if not {m.name, f"{m.name}_bucket", f"{m.name}_sum"} & drawn
    }

    assert left_out == {"gracekit_drain_duration_seconds"}


def test_no_panel_is_without_a_query():
    """Each has a query, its own title and a sentence that says what it shows; none overlap."""
    drawn = panels()

    assert len(drawn) > 15
    assert len({panel["title"] for panel in drawn}) == len(drawn)
    assert all(panel["targets"] and all(t["expr"] for t in panel["targets"]) for panel in drawn)
    assert all(panel["description"].endswith(".") for panel in drawn)
    cells = [
        (x, y)
        for panel in drawn
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_every_alert_says_what_to_do():
    """It says how urgent it is, what has happened, and where to look; commands in it exist."""
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description"} == rule["annotations"].keys()
    names = {rule["alert"] for rule in alerts()}
    assert names >= {
        "GracekitDrainStuck",
        "GracekitAccountsUnbalanced",
        "GracekitOldestUnfinished",
        "GracekitRequestsWaiting",
        "GracekitNotificationsStuck",
        "GracekitRestartLoop",
        "GracekitNotReady",
        "GracekitStoreSlow",
        "GracekitGone",
        "GracekitTasksFailing",
        "GracekitTasksErrored",
        "GracekitJobFailing",
        "GracekitResourcesNotListed",
        "GracekitRequestsRefused",
    }
    assert all(f"`{name}`" in PAGE.read_text() for name in names)


def test_an_alert_about_a_drain_fires_at_the_first_scrape_that_shows_it():
    """A default drain of 25 s is over before a second scrape may come, so it is not waited for."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == "GracekitDrainWillCut")

    assert "for" not in rule


# -- the page -------------------------------------------------------------------------------


def line_of(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    renamed = [f"`{x.attribute}`" for x in metric.labels if x.attribute != x.name]
    otel = f"`{metric.instrument}`" + (f" ({', '.join(renamed)})" if renamed else "")
    return f"| `{metric.name}` | {otel} | {metric.kind.value} | {labels} | {metric.help} |"


def test_the_page_has_the_table():
    """The table of metrics in docs is the one in the code, row for row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `gracekit_")]
    lines += [line for line in PAGE.read_text().splitlines() if line.startswith("| `rpc_")]

    assert sorted(lines) == sorted(map(line_of, METRICS))


def scrape_config() -> str:
    """The file `prometheus.yml` that the page shows."""
    (block,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


def test_the_scrape_config_of_the_page_fits_the_endpoint():
    """It asks the default path by TLS with a token, as often as the alerts assume."""
    config = yaml.safe_load(scrape_config())

    (job,) = config["scrape_configs"]
    assert config["rule_files"] == [ALERTS.name]
    assert job.keys() == {
        *("job_name", "scrape_interval", "scheme"),
        *("authorization", "tls_config", "static_configs"),
    }
    assert job["scheme"] == "https"
    assert job["authorization"].keys() == {"credentials_file"}
    assert f"scrape interval of {job['scrape_interval'].rstrip('s')} s" in ALERTS.read_text()
    assert f"scrapes every {job['scrape_interval'].rstrip('s')} s" in PAGE.read_text()
    (targets,) = job["static_configs"]
    assert all(re.fullmatch(r"[\d.]+:9701", target) for target in targets["targets"])


# -- promtool -------------------------------------------------------------------------------


@pytest.mark.skipif(
    not os.environ.get(SOAK_VARIABLE), reason="its package is 100 MB: `make soak` runs it"
)
@pytest.mark.process
async def test_promtool_accepts_metrics_alerts_and_scrape_config(rendering: str, tmp_path: Path):
    """promtool, in Debian's package `prometheus`, checks names, help texts, rules and the
    config.
    """
    promtool = shutil.which("promtool")
    assert promtool, "there is no promtool: apt-get install --no-install-recommends prometheus"

    metrics = subprocess.run(
        [promtool, "check", "metrics"], input=rendering, capture_output=True, text=True, check=False
    )
    rules = subprocess.run(
        [promtool, "check", "rules", ALERTS], capture_output=True, text=True, check=False
    )

    assert (metrics.returncode, metrics.stdout + metrics.stderr) == (0, "")
    assert rules.returncode == 0, rules.stderr
    (tmp_path / "prometheus.yml").write_text(scrape_config())
    config = subprocess.run(
        [promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert config.returncode == 0, config.stderr
