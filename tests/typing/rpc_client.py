"""Checked by mypy, never run: a method passed to a client is typed in arguments and result."""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, assert_type

from gracekit.rpc.callers.sync_client import SyncClient, SyncView
from gracekit.rpc.callers.task_lookups import TaskInfo
from gracekit.rpc.client import ClientView, RpcClient
from gracekit.rpc.methods import Method

P = ParamSpec("P")
R = TypeVar("R")


def rpc(handler: Callable[Concatenate[Any, P], Awaitable[R]]) -> Method[P, R]:
    """As a service's decorator is typed."""
    raise NotImplementedError


@rpc
async def migrate(ctx: object, vm: str, dest: int = 0) -> dict[str, str]:
    """A method of a service."""
    return {}


async def calls(client: RpcClient) -> None:
    """What a checker knows of a call, a cast and a view."""
    assert_type(await client.call(migrate, vm="vm"), dict[str, str])
    assert_type(await client.prepare(ops=True).call(migrate, vm="vm", dest=1), dict[str, str])
    assert_type(await client.cast(migrate, vm="vm"), str)
    assert_type(client.prepare(host="n", timeout="5m", context={"user_id": 1}), ClientView)
    assert_type(client.prepare(monitor_timeout="1m", fail_fast=True), ClientView)
    assert_type(client.prepare(monitor_timeout=None, version_cap=None, ops_since=None), ClientView)
    capped = client.prepare(version_cap="6.4", ops_since="6.5")
    assert_type(capped.can_send_version("6.5"), bool)
    assert_type(capped.can_send_version(), bool)
    await client.call("by name", anything=1)
    wider: object = await client.call(migrate, vm="vm")
    assert wider

    await client.call(migrate, dest=1)  # type: ignore[call-overload]
    await client.call(migrate, vm=1)  # type: ignore[call-overload]
    await client.cast(migrate, vm="vm", dst=1)  # type: ignore[call-overload]
    await client.call("by name", 1)  # type: ignore[call-overload]
    client.prepare(timout=3)  # type: ignore[call-arg]
    client.prepare(ops="yes")  # type: ignore[arg-type]
    client.prepare(version_cap=6.4)  # type: ignore[arg-type]
    client.prepare(fail_fast="1s")  # type: ignore[arg-type]
    client.can_send_version(6.4)  # type: ignore[arg-type]


@dataclass
class Guest:
    """A typed argument and result."""

    until: dt.datetime


@rpc
async def extend(ctx: object, guest: Guest, by: dt.timedelta) -> Guest:
    """A method whose arguments and result are converted."""
    return Guest(guest.until + by)


async def typed(client: RpcClient, guest: Guest) -> None:
    """What a checker knows is what is true at run time."""
    assert_type(await client.call(extend, guest=guest, by=dt.timedelta(days=1)), Guest)
    assert_type(await client.call("extend", guest=guest, by="P1D"), Any)
    await client.call(extend, guest={"until": ""}, by=dt.timedelta(1))  # type: ignore[call-overload]


def blocking_calls(client: SyncClient) -> None:
    """The same of a client that blocks."""
    assert_type(client.call(migrate, vm="vm"), dict[str, str])
    assert_type(client.prepare(ops=True).call(migrate, vm="vm", dest=1), dict[str, str])
    assert_type(client.cast(migrate, vm="vm"), str)
    assert_type(client.prepare(host="n", timeout="5m"), SyncView)
    assert_type(client.state("id"), TaskInfo)
    assert_type(client.prepare(host="n").states(["id"]), dict[str, TaskInfo])
    client.result("id", wait="1m")
    client.result("id", wiat=1)  # type: ignore[call-arg]
    client.fanout("by name", anything=1)
    client.call(migrate, vm=1)  # type: ignore[call-overload]
    client.prepare(timeuot=1)  # type: ignore[call-arg]
