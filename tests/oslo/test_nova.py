"""`examples/nova_oslo`: a compute service in Nova's shape before its move and after it."""

from __future__ import annotations

import difflib
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs.pages import Page
from tests.oslo.kit import ROOT, OsloClient, oslo_client, oslo_python, serving
from tests.process.helpers import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

EXAMPLES: Final = ROOT / "examples" / "nova_oslo"
PAGE: Final = Page("adopting-nova.md")
MOST_LINES: Final = 10
CONTEXT: Final = {
    "request_id": "req-8f2c6a1e-5b1c-4a44-9c55-2f8f5b6b7c11",
    "user_id": "ann",
    "project_id": "p1",
    "is_admin": True,
}
DRAINED = (signal.SIGTERM, 0)
HANDED_OVER = (signal.SIGTERM, 75)
KILLED = (signal.SIGKILL, -signal.SIGKILL)  # a stop of its own takes the library some seconds


def config(directory: Path, rabbit_url: str, *, more: str = "") -> Path:
    file = directory / "nova.conf"
    file.write_text(
        f"[DEFAULT]\ntransport_url = {rabbit_url.replace('amqp://', 'rabbit://')}\nhost = host1\n"
        f"{more}\n[oslo_messaging_rabbit]\namqp_durable_queues = true\n"
    )
    return file


def program(which: str, conf: Path) -> tuple[str, ...]:
    return "-m", f"examples.nova_oslo.{which}", "--config-file", str(conf)


def instance(uuid: str, memory_mb: int = 1024) -> dict[str, Any]:
    """As Nova's serializer writes it."""
    data = {"uuid": uuid, "memory_mb": memory_mb, "vm_state": "building"}
    return {"nova_object.name": "Instance", "nova_object.data": data}


def conductor(client: OsloClient) -> OsloClient:
    """What a conductor sends to a host."""
    return client.prepare(server="host1", version="6.4", timeout=30)


def written(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def tasks(directory: Path, *arguments: str) -> str:
    """What `gracekit tasks` prints."""
    done = subprocess.run(
        [oslo_python(), "-m", "gracekit", "tasks", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout


@pytest.mark.parametrize(("which", "end"), [("before", KILLED), ("after", DRAINED)])
async def test_both_build_and_answer_alike(
    rabbit_url: str, tmp_path: Path, which: str, end: tuple[signal.Signals, int]
):
    """Instances and contexts by the serializer, a build in a thread, a call, and the periodic
    task.
    """
    run = program(which, config(tmp_path, rabbit_url))
    said: list[str] = []
    async with (
        serving(tmp_path, *run, until="serving", end=end, said=said),
        oslo_client(rabbit_url, "compute", profile="durable") as client,
    ):
        host = conductor(client)
        await host.cast(CONTEXT, "build_and_run_instance", instance=instance("vm-1"))
        await until(lambda: written(tmp_path / "vm-1.state") == "active", "a build")
        stopped = await host.call(CONTEXT, "stop_instance", instance=instance("vm-1"))
        assert stopped["nova_object.data"] == {
            "uuid": "vm-1",
            "memory_mb": 1024,
            "vm_state": "stopped",
        }
        assert await host.call(CONTEXT, "get_host_uptime") > 0
        await until(lambda: written(tmp_path / "synced") == "1", "the periodic task")

    (line,) = [line for line in "".join(said).splitlines() if "building vm-1" in line]
    assert CONTEXT["request_id"] in line


async def test_a_drain_waits_for_a_build_in_its_thread(rabbit_url: str, tmp_path: Path):
    """The method has returned long before, and its thread was free; the build ends, and the exit
    code is 0. The task is listed with the ids of its caller.
    """
    run = program("after", config(tmp_path, rabbit_url))
    async with (
        oslo_client(rabbit_url, "compute", profile="durable") as client,
        serving(tmp_path, *run, until="service.serving", end=DRAINED, GRACEKIT_THREADS="1"),
    ):
        host = conductor(client)
        await host.cast(CONTEXT, "build_and_run_instance", instance=instance("vm-1", 4096))
        await until(lambda: written(tmp_path / "vm-1.vm"), "the first part of a build")
        assert await host.call(CONTEXT, "get_host_uptime") > 0
        assert written(tmp_path / "vm-1.state") == ""

    assert written(tmp_path / "vm-1.vm") == "4"
    assert written(tmp_path / "vm-1.state") == "active"
    listed = tasks(tmp_path, "--state", "succeeded")
    assert "build_and_run_instance" in listed
    assert CONTEXT["request_id"] in listed


async def test_a_build_that_outlives_the_drain_is_listed(rabbit_url: str, tmp_path: Path):
    """Exit code 75: it is on record, and the next start ends it as ERRORED, without a second
    build.
    """
    run = program("after", config(tmp_path, rabbit_url, more="graceful_shutdown_timeout = 1"))
    async with (
        oslo_client(rabbit_url, "compute", profile="durable") as client,
        serving(tmp_path, *run, until="service.serving", end=HANDED_OVER),
    ):
        await conductor(client).cast(
            CONTEXT, "build_and_run_instance", instance=instance("vm-1", 60 * 1024)
        )
        await until(lambda: written(tmp_path / "vm-1.vm"), "the first part of a build")

    parts = written(tmp_path / "vm-1.vm")
    assert "build_and_run_instance" in tasks(tmp_path)
    soon = {"GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0.1s"}
    async with serving(tmp_path, *run, until="service.serving", end=DRAINED, **soon):
        await until(lambda: "build_and_run" in tasks(tmp_path, "--state", "errored"), "its end")

    assert written(tmp_path / "vm-1.state") == ""
    assert written(tmp_path / "vm-1.vm") == parts


async def test_with_the_options_of_the_page_one_instance_has_one_task(
    rabbit_url: str, tmp_path: Path
):
    """The id of the instance is inside of an object: a stop waits until the build's thread has
    ended.
    """
    PAGE.write_to(tmp_path)
    settings = {
        "GRACEKIT_TRANSPORT_URL": f"{rabbit_url}?exchange=openstack&profile=oslo-durable",
        "GRACEKIT_HOST": "host1",
        "PYTHONPATH": str(ROOT),
    }
    run = ("-m", "gracekit", "run", "compute_options:svc")
    async with (
        oslo_client(rabbit_url, "compute", profile="durable") as client,
        serving(tmp_path, *run, until="service.serving", end=DRAINED, **settings),
    ):
        host = conductor(client)
        await host.cast(CONTEXT, "build_and_run_instance", instance=instance("vm-1", 3072))
        await until(lambda: written(tmp_path / "vm-1.vm"), "the first part of a build")
        await host.call(CONTEXT, "stop_instance", instance=instance("vm-2"))
        assert written(tmp_path / "vm-1.state") == ""
        await host.call(CONTEXT, "stop_instance", instance=instance("vm-1"))
        assert written(tmp_path / "vm-1.vm") == "3"
        assert written(tmp_path / "vm-1.state") == "stopped"


def changed() -> list[str]:
    """The lines of the programs that differ, each with its sign; without their first docstring."""
    texts = [(EXAMPLES / name).read_text().split('"""', 2)[2] for name in ("before.py", "after.py")]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def test_the_move_is_as_long_as_the_page_says():
    """What differs between the two programs is the diff on the page, and at most ten new lines."""
    shown, _ = re.findall(r"^```diff\n(.*?)^```", PAGE.text, re.MULTILINE | re.DOTALL)
    marked = [line for line in shown.splitlines() if line.startswith(("+", "-"))]

    assert marked == changed()
    assert sum(line.startswith("+") and line != "+" for line in marked) <= MOST_LINES
