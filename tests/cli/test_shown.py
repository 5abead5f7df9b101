"""What the command line shows of a caller's context, and of a resource that an ops method names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gracekit import RpcClient
from tests.cli.kit import Running, gracekit, write_service

pytestmark = pytest.mark.process

SERVICE = """
from __future__ import annotations

import asyncio
import logging

from gracekit import Context, Service

svc = Service("compute", context_keys=("request_id", "user_id", "project_id"))
go = asyncio.Event()


@svc.ops(resource="vm")
async def look(ctx: Context, vm: str) -> None:
    logging.info("looking")
    await go.wait()


@svc.rpc(on_interrupt="requeue")
async def peek(ctx: Context) -> None:
    logging.info("peeking")
    await go.wait()


@svc.ops
async def release(ctx: Context) -> None:
    go.set()
"""
CALLER = {"request_id": "req-1", "user_id": "ann b", "token": "canary"}
WORDS = 'request_id=req-1 user_id="ann b"'
IDS = {"request_id": "req-1", "user_id": "ann b"}


def cast(directory: Path, request_id: str, method: str, *, ops: bool = False, **args: Any) -> None:
    """A cast with the context, which commands cannot send."""

    async def send() -> None:
        async with RpcClient(f"sqlite:///{directory / 'gracekit.db'}", "compute") as client:
            view = client.prepare(ops=ops, request_id=request_id, context=CALLER)
            await view.cast(method, **args)

    asyncio.run(send())


def test_commands_and_log_show_the_callers_ids_and_what_an_ops_method_is_about(tmp_path: Path):
    """As text and as JSON, while the tasks run and afterwards; a task without a row, too. Commands
    about a service without keys have no such column.
    """
    write_service(tmp_path, text=SERVICE)
    with Running(tmp_path, GRACEKIT_LOG_FORMAT="text") as run:
        cast(tmp_path, "look-1", "look", ops=True, vm="vm:1")
        assert run.wait_line("looking").endswith(f"looking task_id=look-1 {WORDS}")
        cast(tmp_path, "peek-1", "peek")
        run.wait_line("peeking")

        listed = gracekit(tmp_path, "tasks")
        of_vm = gracekit(tmp_path, "tasks", "--resource", "vm:vm:1", "--json").json
        whole = gracekit(tmp_path, "tasks", "--json").json
        live = gracekit(tmp_path, "tasks", "show", "peek-1", "--json").json["live"]
        status = gracekit(tmp_path, "status", "--json").json
        stacks = gracekit(tmp_path, "dump")
        gracekit(tmp_path, "call", "compute", "release", "--ops")
    shown = gracekit(tmp_path, "tasks", "show", "look-1")
    ended = gracekit(tmp_path, "tasks", "--state", "all", "--resource", "vm:")
    record = gracekit(tmp_path, "tasks", "show", "look-1", "--json").json

    header, *rows = listed.out.splitlines()
    assert header.split()[-1] == "CONTEXT"
    assert [row.endswith(WORDS) for row in rows] == [True, True]
    assert "vm:vm:1" in listed.out
    (task,) = of_vm["tasks"]
    assert (task["resource"], task["resource_kind"]) == ("vm:vm:1", None)
    assert (task["ops_kind"], task["ops_id"], task["shown_context"]) == ("vm", "vm:1", IDS)
    assert [task["shown_context"] for task in whole["tasks"]] == [IDS, IDS]
    assert live["shown_context"] == IDS
    assert status["runs"][0]["status"]["longest"]["resource"] == "vm:vm:1"
    assert "resource=vm:vm:1" in stacks.out
    assert f"\ncontext   {WORDS}\n" in shown.out
    assert "\nresource  vm:vm:1\n" in shown.out
    assert "look-1" in ended.out
    assert record["task"]["shown_context"] == IDS
    assert "canary" not in f"{listed.out}{shown.out}{whole}{record}"


def test_without_keys_the_table_is_as_before(tmp_path: Path):
    """The column is there only if a listed task has something in it."""
    write_service(tmp_path)
    with Running(tmp_path):
        cast(tmp_path, "echo-1", "echo")
        gracekit(tmp_path, "call", "compute", "echo")

    listed = gracekit(tmp_path, "tasks", "--state", "all")

    assert listed.out.splitlines()[0].split()[-1] == "REASON"
