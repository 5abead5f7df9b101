"""The log of `gracekit run`: what fails is said once, with its request id, and by the settings."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from gracekit import RpcClient
from tests.cli.kit import Answer, Running, Started, gracekit, write_service
from tests.process.helpers import read_rows

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
    """By default a warning with class, message and the whole request id, journaled or not.

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
    """`log_failures` adds the traceback, in whose text the request is masked as well, or is
    silent.
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
    """`warning` leaves a quiet service silent; `debug` tells each request."""
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
    """Whatever code logs while a handler runs, in a coroutine or a thread, its line names the
    task.
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
    """A service's module that configures logging has its format and level, gracekit's lines
    included.

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


DICT_CONFIG = """
import logging.config
logging.config.dictConfig({
    "version": 1,
    "formatters": {"f": {"format": "DICT %(name)s %(message)s"}},
    "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f"}},
    "root": {"level": "INFO", "handlers": ["h"]},
})
"""


def test_a_dict_config_disables_no_line_of_gracekit(tmp_path: Path):
    """Python's default there disables each logger that exists before it, gracekit's too."""
    write_service(tmp_path, text=SERVICE + DICT_CONFIG)
    with Started(tmp_path, "run", "compute") as run:
        run.wait_line("DICT gracekit service.serving")
    with Running(tmp_path, "--json") as run:
        assert json.loads(run.seen[-1])["event"] == "service.serving"


# -- a drain, read from the log alone ------------------------------------------------------------

DRAINED = """
from __future__ import annotations

import asyncio
import threading
import time

from gracekit import Context, Service

svc = Service("compute")

# Each line is one write: a thread and the loop print at the same moment.


async def until_drain(ctx: Context) -> None:
    print(f"began {ctx.method}\\n", end="", flush=True)
    while not ctx.draining:
        await asyncio.sleep(0.01)


@svc.rpc(resource="vm", on_interrupt="retry")
async def moves(ctx: Context, vm: str) -> None:
    print("began moves\\n", end="", flush=True)
    await asyncio.sleep(1000)


@svc.rpc
async def ends(ctx: Context) -> None:
    await until_drain(ctx)


@svc.rpc
async def fails(ctx: Context) -> None:
    await until_drain(ctx)
    raise LookupError("no such disk")


@svc.rpc
async def copies(ctx: Context) -> None:
    print("began copies\\n", end="", flush=True)
    async for _ in ctx.steps(range(1000000)):
        await asyncio.sleep(0.01)


@svc.rpc
def stays(ctx: Context) -> None:
    print("began stays\\n", end="", flush=True)
    while True:
        time.sleep(0.01)


@svc.rpc(on_interrupt="requeue")
async def asks(ctx: Context) -> None:
    print("began asks\\n", end="", flush=True)
    await asyncio.sleep(1000)


@svc.ops(resource="vm")
async def resizes(ctx: Context, vm: str) -> None:
    await ctx.hold("resize", vm, at_most="1m")
    await until_drain(ctx)
    await asyncio.sleep(1)
    await ctx.end_hold("resize", vm)


@svc.ops
async def watches(ctx: Context) -> None:
    await ctx.hold("watch", "all", at_most="1m")
    print("began watches\\n", end="", flush=True)
    await asyncio.sleep(1000)


def build(ctx: Context) -> None:
    while not ctx.draining:
        time.sleep(0.01)
    time.sleep(1)


@svc.rpc
async def spawns(ctx: Context) -> None:
    ctx.track_call(lambda call: threading.Thread(target=call).start(), lambda: build(ctx))
    print("began spawns\\n", end="", flush=True)
"""

UNFINISHED: Final = {"task.handed_over", "task.given_back", "task.not_started", "task.stuck"}


async def cast_all(directory: Path) -> None:
    """One of each, by its name, and a second one for the same machine."""
    async with RpcClient(f"sqlite:///{directory}/gracekit.db", "compute") as client:
        for task_id in ("moves", "ends", "fails", "copies", "stays", "asks", "spawns"):
            args = {"vm": "vm-1"} if task_id == "moves" else {}
            await client.prepare(request_id=task_id).cast(task_id, **args)
            if args:
                await client.prepare(request_id="second").cast(task_id, **args)
        await client.prepare(request_id="watches", ops=True).cast("watches")
        await client.prepare(request_id="resizes", ops=True).cast("resizes", vm="vm-9")


def drained(directory: Path) -> list[dict[str, Any]]:
    """The lines of a drain in which one of each runs."""
    write_service(directory, text=DRAINED)
    with Running(directory, "--drain-timeout", "3s", "--handover-grace", "1s") as run:
        asyncio.run(cast_all(directory))
        for _ in range(9):
            run.wait_line("began ")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75
        return [json.loads(line) for line in run.rest().splitlines() if line.startswith("{")]


def test_a_drain_can_be_read_from_its_log(tmp_path: Path):
    """What ran at its start, how each of them ended, what was handed over, from where, and what not
    started: each unfinished id is in one line, as in the journal, and the sums are in the last one.
    """
    lines = drained(tmp_path)

    def told(event: str) -> dict[str, dict[str, Any]]:
        return {line["task_id"]: line for line in lines if line.get("event") == event}

    (started,) = [line for line in lines if line.get("event") == "drain.started"]
    assert (started["running"], started["timeout_s"]) == (10, 3.0)
    awaited = told("task.awaited")
    (block,) = [task_id for task_id, line in awaited.items() if line["lane"] == "background"]
    tasks = {"moves", "ends", "fails", "copies", "stays", "asks", "spawns", "watches", "resizes"}
    assert set(awaited) == {*tasks, block}
    assert (awaited["moves"]["resource"], awaited["resizes"]["resource"]) == ("vm:vm-1", "vm:vm-9")
    assert awaited[block]["method"] == "spawns:<lambda>"

    ends = ("task.finished", "task.handed_over", "task.given_back", "work.ended")
    finished, cut, back, blocks = map(told, ends)
    assert set(awaited) == {*finished, *cut, *back, *blocks}
    assert blocks[block]["outcome"] == "ended"
    outcomes = {task_id: line["outcome"] for task_id, line in finished.items()}
    ended = dict.fromkeys(("ends", "spawns", "resizes"), "succeeded")
    assert outcomes == ended | {"fails": "failed"}
    assert told("task.failed")["fails"]["error"] == "LookupError: no such disk"
    cuts = {task_id: line["cut"] for task_id, line in (cut | back).items()}
    assert cuts == {
        "copies": "safe_point",
        "moves": "cancelled",
        "stays": "unclean",
        "asks": "cancelled",
        "watches": "cancelled",
    }
    levels = {task_id: line["level"] for task_id, line in (cut | back).items()}
    assert levels == dict.fromkeys(cuts, "WARNING") | {"copies": "INFO"}
    (late,) = [line for line in lines if line.get("event") == "drain.out_of_time"]
    assert (late["level"], late["running"], late["holds"]) == ("WARNING", 4, "watch all")
    assert late["not_begun"] == "second"
    unfinished = Counter(line["task_id"] for line in lines if line.get("event") in UNFINISHED)
    assert unfinished == dict.fromkeys((*cuts, "second"), 1)
    holds = [(line["event"], line["key"]) for line in lines if "hold" in line]
    assert sorted(holds) == [
        ("hold.awaited", "all"),
        ("hold.awaited", "vm-9"),
        ("hold.ended", "vm-9"),
    ]
    one = cut["moves"]
    assert (one["method"], one["lane"], one["resource"]) == ("moves", "requests", "vm:vm-1")
    assert (one["attempt"], one["running_s"] >= 1) == (1, True)
    assert (cut["copies"]["safe_point_s"] >= 0, int(cut["copies"]["cursor"]) >= 0) == (True, True)
    unstarted = told("task.not_started")["second"]
    assert (unstarted["method"], unstarted["resource"]) == ("moves", "vm:vm-1")

    closed = [line["lane"] for line in lines if line.get("event") == "intake.closed"]
    opened = [line["lane"] for line in lines if line.get("event") == "intake.opened"]
    assert (closed, set(opened)) == (["requests", "ops"], {"requests", "ops"})
    end, last = [line for line in lines if "event" in line][-2:]
    assert (end["event"], last["event"]) == ("drain.finished", "service.stopped")
    assert (end["finished"], end["handed_over"], end["exit_code"]) == (4, 4, 75)
    assert (end["not_started"], end["given_back"], end["open_holds"]) == (1, 1, 1)

    rows = read_rows(tmp_path / "gracekit-store.db", "SELECT request_id, state FROM task", ())
    states = {row["request_id"]: row["state"] for row in rows}
    assert states == {**outcomes, **dict.fromkeys(cut, "handed_over"), "second": "accepted"}


# -- words that a peer has chosen ------------------------------------------------------------------

NASTY = r"""
TEXT = "\x1b[2Jgone \u202e\n12:00:00 INFO    forged\namqp://bob:s3cret@h/v is gone"
"""


def check_harmless(text: str) -> None:
    """No terminal code, no line of its own, no password."""
    assert text.replace("\n", "").isprintable()
    assert [line for line in text.splitlines() if line.startswith("12:00:00")] == []
    assert "s3cret" not in text
    assert "forged" in text


@pytest.mark.parametrize("error", ["ConfigError", "RuntimeError"])
@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_a_start_that_fails_says_so_harmlessly(tmp_path: Path, error: str, words: tuple[str, ...]):
    """What a broker or a hook has put into an error is escaped and redacted; --json keeps to
    JSON.
    """
    hook = f"""
@svc.on_start
async def begin() -> None:
    from gracekit import ConfigError
    raise {error}(TEXT)
"""
    write_service(tmp_path, text=SERVICE + NASTY + hook)

    answer = gracekit(tmp_path, "run", "compute", *words)

    assert answer.code == (78 if error == "ConfigError" else 70)
    check_harmless(answer.err)
    if words:
        (said,) = [json.loads(line) for line in answer.err.splitlines()]
        assert (said["level"], error.lower() in str(said).lower()) == ("CRITICAL", True)
    else:
        begins = "Error: " if error == "ConfigError" else "gracekit: RuntimeError"
        assert answer.err.startswith(begins)


def test_a_module_that_cannot_be_loaded_says_so_harmlessly(tmp_path: Path):
    """So does an import, and a setting; under --json both are JSON."""
    write_service(tmp_path, text=f"{NASTY}raise LookupError(TEXT)")

    plain = gracekit(tmp_path, "run", "compute")
    as_json = gracekit(tmp_path, "run", "compute", "--json")
    setting = gracekit(tmp_path, "run", "compute", GRACEKIT_LOG_FORMAT="json", GRACEKIT_THREADS="x")

    check_harmless(plain.err)
    check_harmless(as_json.err)
    assert "LookupError" in json.loads(as_json.err)["exception"]
    assert "GRACEKIT_THREADS" in json.loads(setting.err)["message"]


def test_a_thread_of_the_application_says_so_harmlessly(tmp_path: Path):
    """What no code of gracekit sees, Python itself would print: it goes into the log."""
    thread = """
import threading


def fall() -> None:
    raise LookupError(TEXT)


@svc.on_start
async def begin() -> None:
    LOG.info("%d", TEXT)
    thread = threading.Thread(target=fall)
    thread.start()
    thread.join()
"""
    write_service(tmp_path, text=SERVICE + NASTY + thread)
    with Running(tmp_path) as run:
        told = entries(run)

    fallen = [entry for entry in told if "LookupError" in entry.get("exception", "")]
    unwritten = [entry for entry in told if "cannot be written" in entry["message"]]
    assert (len(fallen), len(unwritten)) == (1, 1)
    check_harmless(json.dumps(told))


# -- what anybody can cause ------------------------------------------------------------------------


async def cast_what_nobody_serves(directory: Path, number: int) -> None:
    async with RpcClient(f"sqlite:///{directory}/gracekit.db", "compute") as client:
        for _ in range(number):
            await client.cast("nobody_serves_this")


def test_a_flood_of_refusals_is_one_line_a_second(tmp_path: Path):
    """With the number that was left out, so that none is lost from the sum."""
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path, "--look-every", "100ms") as run:
        asyncio.run(cast_what_nobody_serves(tmp_path, 60))
        gracekit(tmp_path, "call", "compute", "says")  # behind them
        told = [entry for entry in entries(run) if entry.get("event") == "task.rejected"]

    seen = [entry for entry in told if "task_id" in entry]
    assert len(seen) + sum(entry.get("left_out", 0) for entry in told) == 60
    assert len(seen) < 30


def test_what_a_flood_left_out_is_told_while_the_service_lives_on(tmp_path: Path):
    """Also if nothing of its kind comes any more."""
    write_service(tmp_path, text=SERVICE)
    known = 0
    with Running(tmp_path, "--look-every", "100ms") as run:
        asyncio.run(cast_what_nobody_serves(tmp_path, 60))
        while known < 60:
            entry = json.loads(run.wait_line("task.rejected"))
            known += ("task_id" in entry) + entry.get("left_out", 0)

    assert known == 60
