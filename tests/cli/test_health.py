"""`gracekit health`: what an exec probe gets, from the real command and real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.kit import SERVICE, Running, Started, environment, gracekit, write_service

pytestmark = pytest.mark.process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_a_run_that_serves_passes_every_probe(directory):
    """It prints one word for people, or JSON with the run and the probe's answer."""
    with Running(directory, "--instance", "api-1"):
        for probe in ((), ("--ready",), ("--live",), ("--started",)):
            answer = gracekit(directory, "health", *probe)
            assert (answer.code, answer.out, answer.err) == (0, "pass\n", ""), probe

        seen = gracekit(directory, "health", "api-1", "--json")

    assert seen.code == 0
    keys = {"run_id", "service", "instance", "status", "phase", "why", "self_blocked"}
    assert seen.json.keys() == keys
    assert (seen.json["instance"], seen.json["phase"], seen.json["why"]) == ("api-1", "serving", [])


def test_of_two_services_of_one_instance_name_one_is_named_with_its_service(directory):
    """Both run on one store: SERVICE@INSTANCE means one of them, as for every other command."""
    other = SERVICE.replace('Service("compute")', 'Service("other")')
    (directory / "other.py").write_text(other)
    words = ("run", "other:svc", "--instance", "api-1")
    with Running(directory, "--instance", "api-1"), Started(directory, *words) as second:
        second.wait_line("service.serving")
        both = gracekit(directory, "health", "api-1")
        one = gracekit(directory, "health", "other@api-1", "--json")

    assert both.code == 2
    assert "several runs live (compute@api-1, other@api-1)" in both.err
    assert "name one as SERVICE@INSTANCE" in both.err
    assert (one.code, one.json["service"]) == (0, "other")


def test_a_quiet_run_fails_readiness_alone(directory):
    """The exit status is what a platform reads; the words are for people."""
    with Running(directory):
        gracekit(directory, "quiet")

        ready, live = gracekit(directory, "health"), gracekit(directory, "health", "--live")

    assert (ready.code, ready.out) == (1, "fail: it is quiet\n")
    assert (live.code, live.out) == (0, "pass\n")


def test_where_nobody_answers_a_probe_ends_in_time_with_4(directory):
    """Cases: a run that hangs, one that was killed, and a store that never had a run."""
    none = gracekit(directory, "health")
    with Running(directory) as run:
        run.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        hanging = gracekit(directory, "health", "--live")
        took_s = time.monotonic() - began
        run.kill()
        dead = gracekit(directory, "health", "--live")

    assert [answer.code for answer in (none, hanging, dead)] == [4, 4, 4]
    assert hanging.err == "Error: a run is alive and did not answer within 5 s\n"
    assert took_s < 8
    assert dead.err.startswith("Error: no run of ")
    assert dead.err.endswith(" answers\n")


def test_of_several_runs_one_must_be_named(directory):
    """The argument names it, or the variable by which the run itself was named."""
    with Running(directory, "--instance", "api-1"), Running(directory, "--instance", "api-2"):
        gracekit(directory, "quiet", "api-2")

        several = gracekit(directory, "health")
        named = gracekit(directory, "health", "api-1")
        by_variable = gracekit(directory, "health", GRACEKIT_INSTANCE="api-2")
        wrong = gracekit(directory, "health", "api-3")

    assert several.code == 2
    assert several.err.endswith(
        "several runs live (compute@api-1, compute@api-2): name one as INSTANCE or "
        "SERVICE@INSTANCE\n"
    )
    assert (named.code, by_variable.code) == (0, 1)
    # In a roll the name is right, and its process has not begun yet: so no other name is proposed.
    assert wrong.code == 4
    assert wrong.err.endswith(" answers; others do: compute@api-1, compute@api-2\n")


def test_a_probe_loads_neither_the_broker_s_client_nor_the_store(directory):
    """The command runs every few seconds for as long as the pod exists, so it must be cheap."""
    loaded = (
        "import sys, gracekit.cli.health; "
        "print([name for name in ('asyncio', 'apsw', 'aio_pika', 'msgspec', 'opentelemetry') "
        "if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", loaded],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "[]\n"
