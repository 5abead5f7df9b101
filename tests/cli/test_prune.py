"""`gracekit prune`: what hosts that are gone have left goes, and nothing that is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.kit import SERVICE, Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

QUEUES = ["compute-ops.pod-a", "compute-ops.pod-a-0", "compute.pod-a"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def live_once(directory: Path, host: str) -> None:
    """A run of *host* that serves and stops."""
    with Running(directory, "--host", host) as run:
        run.process.terminate()
        assert run.wait() == 0


def test_what_a_host_that_is_gone_has_left_is_removed(directory: Path):
    """A dry run lists the same queues, and the living host keeps its own."""
    live_once(directory, "pod-a")
    with Running(directory, "--host", "pod-b"):
        kept = gracekit(directory, "prune")
        tried = gracekit(directory, "prune", "--gone-for", "0", "--dry-run", "--json").json
        done = gracekit(directory, "prune", "--gone-for", "0", "--json").json
        again = gracekit(directory, "prune", "--gone-for", "0")
        cast = gracekit(directory, "cast", "compute", "echo", "--host", "pod-b")
        lost = gracekit(directory, "cast", "compute", "echo", "--host", "pod-a")

    assert kept.out == "nothing to remove\n"
    assert tried["queues"] == done["queues"] == QUEUES
    assert again.out == "nothing to remove\n"
    assert cast.code == 0, cast
    assert "no service ever declared queue 'compute.pod-a'" in lost.err


def test_what_a_host_may_still_need_is_kept(directory: Path):
    """A task that is for this host alone, and a message in its queue; the rest of it goes."""
    with Running(directory, "--host", "pod-a") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--host", "pod-a")
        run.wait_line("at work")
        run.kill()
    live_once(directory, "pod-c")
    gracekit(directory, "cast", "compute", "echo", "--host", "pod-c")

    said = gracekit(directory, "prune", "--gone-for", "0", "--dry-run")
    done = gracekit(directory, "prune", "--gone-for", "0", "--json").json

    left = ["compute-ops.pod-a-0", "compute-ops.pod-c", "compute-ops.pod-c-0"]
    assert done["queues"] == left
    assert done["kept"] == [{"queue": "compute.pod-c", "messages": 1}]
    assert done["kept_hosts"] == ["pod-a"]
    assert said.out.splitlines()[-2:] == [
        "kept queue compute.pod-c: 1 message waits",
        "kept the queues of pod-a: a task or hold in the store waits for it",
    ]
    with Running(directory, "--host", "pod-a") as run:
        run.wait_line("at work")


def test_a_queue_that_another_service_shares_is_kept(directory: Path):
    """`compute.b` is the name of a host's queue of `compute`, and of a service of that name."""
    write_service(directory, "other", SERVICE.replace('"compute"', '"compute.b"'))
    live_once(directory, "pod-a")
    with Started(directory, "run", "other", "--host", "pod-a") as run:
        run.wait_line("service.serving")
        run.process.terminate()
        assert run.wait() == 0

    done = gracekit(directory, "prune", "--gone-for", "0", "--host", "b", "--json").json
    cast = gracekit(directory, "cast", "compute.b", "echo")

    assert "compute.pod-a" in done["queues"]
    assert "compute.b" not in done["queues"]
    assert cast.code == 0, cast.err
