"""Checked by mypy, never run: words that users choose between are plain text, and are checked."""

from __future__ import annotations

from gracekit import Context, Runtime, Service, Settings, rpc_method

svc = Service("compute")


@svc.rpc(on_interrupt="retry", resource="vm")
async def migrate(ctx: Context, vm: str) -> None:
    """A method that may run twice."""


@svc.ops(on_interrupt="error", in_drain="refuse")
async def rescan(ctx: Context) -> None:
    """A method that a drain refuses."""


@svc.rpc(version="2.0", namespace="admin")
async def resize(ctx: Context, vm: str) -> None:
    """A function that is served at a place of its own."""


@rpc_method(version="2.0")  # type: ignore[call-overload, untyped-decorator]
async def elsewhere(self: object, ctx: Context) -> None:
    """A method of a class, whose place `include` says."""


@svc.rpc(on_interrupt="retyr")  # type: ignore[call-overload, untyped-decorator]
async def misspelt(ctx: Context) -> None:
    """A method whose policy does not exist."""


@svc.ops(in_drain="later")  # type: ignore[call-overload, untyped-decorator]
async def undecided(ctx: Context) -> None:
    """A method whose answer does not exist."""


def stop(runtime: Runtime) -> None:
    """A stop that the program asks for, and one that nobody can."""
    runtime.request_stop(source="user")
    runtime.request_stop(source="nobody")  # type: ignore[arg-type]


Settings(error_details="message", log_format="json", log_level="debug", log_failures="traceback")
Settings(log_format="xml")  # type: ignore[arg-type]
