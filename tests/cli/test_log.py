"""The log of `gracekit run`: what fails is said once, with its request id, and by the settings."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import Answer, Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

SERVICE = """
from __future__ import annotations

import logging

from gracekit import Context, Service

svc = Service("compute")
LOG = logging.getLogger("app")


@svc.rpc
async def kept(ctx: Context, disk: str) -> None:
    raise LookupError(f"no disk {disk}\\x1b[2J")


@svc.rpc(on_interrupt="requeue")
async def asked(ctx: Context, disk: str) -> None:
    raise LookupError(f"no disk {disk}\\x1b[2J")


@svc.rpc
async def says(ctx: Context) -> None:
    LOG.info("from a coroutine")


@svc.rpc
def says_in_thread(ctx: Context) -> None:
    LOG.info("from a thread")
"""
ID = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"


def entries(run: Started) -> list[dict[str, Any]]:
    """End it; every line of its log."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    return [json.loads(line) for line in run.rest().splitlines()]


def call(directory: Path, method: str, *words: str) -> Answer:
    return gracekit(directory, "call", "compute", method, "--id", ID, *words)


@pytest.mark.parametrize("method", ["kept", "asked"])
def test_a_handler_that_raises_is_one_line(tmp_path: Path, method: str):
    """
    By default a warning with class, message and the whole request id, journaled or not.

    What the caller has sent is not in it, and no terminal code is.
    """
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path) as run:
        assert call(tmp_path, method, "disk=canary-1").code == 1
        told = [entry for entry in entries(run) if ID in json.dumps(entry)]

    (line,) = told
    assert (line["level"], line["event"], line["task_id"]) == ("WARNING", "task.failed", ID)
    assert (line["method"], line["attempt"]) == (method, 1)
    assert line["error"] == "LookupError: no disk <disk>\\x1b[2J"
    assert "exception" not in line


def test_its_traceback_is_a_setting(tmp_path: Path):
    """
    `log_failures` adds the traceback, in whose text the request is masked as well, or is silent.
    """
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path, "--log-failures", "traceback") as run:
        call(tmp_path, "kept", "disk=canary-1")
        traced = [entry for entry in entries(run) if entry.get("event") == "task.failed"]
    with Running(tmp_path, GRACEKIT_LOG_FAILURES="off") as run:
        assert gracekit(tmp_path, "call", "compute", "kept", "disk=canary-2").code == 1
        silent = entries(run)

    (line,) = traced
    assert 'raise LookupError(f"no disk {disk}' in line["exception"]
    assert line["exception"].endswith("LookupError: no disk <disk>\\x1b[2J")
    assert "canary" not in json.dumps(line)
    assert [entry for entry in silent if entry["level"] != "INFO"] == []


def test_a_log_level_is_a_setting(tmp_path: Path):
    """
    `warning` leaves a quiet service silent; `debug` tells each request.
    """
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path, "--log-level", "debug") as run:
        call(tmp_path, "says")
        told = {entry.get("event") for entry in entries(run)}
    with Started(tmp_path, "run", "compute", "--log-level", "WARNING") as run:
        assert gracekit(tmp_path, "call", "compute", "says").code == 0
        quiet = entries(run)
    wrong = gracekit(tmp_path, "run", "compute", "--log-level", "warn")

    assert {"task.started", "task.finished"} <= told
    assert quiet == []
    assert wrong.code == 78
    assert "log_level = 'warn' must be debug, info, warning, error or critical" in wrong.err


def test_lines_of_a_handler_carry_its_request_id(tmp_path: Path):
    """
    Whatever code logs while a handler runs, in a coroutine or a thread, its line names the task.
    """
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path) as run:
        assert call(tmp_path, "says").code == 0
        told = [entry for entry in entries(run) if entry["logger"] == "app"]
    with Running(tmp_path, "--log-format", "text") as run:
        gracekit(tmp_path, "call", "compute", "says_in_thread", "--id", "my id")
        run.wait_line(' INFO    app: from a thread task_id="my id"')

    (line,) = told
    assert (line["message"], line["task_id"], line["method"]) == ("from a coroutine", ID, "says")


def test_the_logging_of_an_application_stands(tmp_path: Path):
    """
    A service's module that configures logging has its format and level, gracekit's lines included.

    A format that is asked for goes before it; `logging.warning()` at import is no configuration.
    """
    own = 'logging.basicConfig(level=logging.INFO, format="OWN %(name)s %(message)s")\n'
    write_service(tmp_path, text=SERVICE + own)
    with Started(tmp_path, "run", "compute") as run:
        run.wait_line("OWN gracekit service.serving")
        assert call(tmp_path, "says").code == 0
        run.wait_line("OWN app from a coroutine")
    with Running(tmp_path, "--json") as run:
        assert json.loads(run.seen[-1])["event"] == "service.serving"
        run.kill()
    write_service(tmp_path, text=SERVICE + 'logging.warning("while it loads")\n')
    with Running(tmp_path) as run:
        assert json.loads(run.seen[-1])["event"] == "service.serving"
