"""gracekit: the runtime for long-running RPC services that stop, crash and restart safely.

The public names are loaded when they are first used (PEP 562): the command line needs few of them,
and all together they take a quarter of a second of processor time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gracekit.callables import plain
    from gracekit.config.settings import Settings
    from gracekit.drain.report import DrainReport
    from gracekit.end_timer import die_with_me
    from gracekit.errors import (
        CallTimeoutError,
        ConfigError,
        ConflictingRequestError,
        DeclarationError,
        Draining,
        Gone,
        GracekitError,
        HeartbeatTimeoutError,
        InvalidArgumentsError,
        LeaseExists,
        LeaseHeld,
        MethodTimeoutError,
        NoAnswerError,
        NoCapacity,
        NoSuchLease,
        NoSuchMethodError,
        Parked,
        RemoteError,
        RpcError,
        RunEndedError,
        StaleVersionError,
        TaskCancelledError,
        TaskInterruptedError,
        TryAgain,
        UnconfirmedError,
        Undeliverable,
        UnknownTaskError,
        UnsupportedVersionError,
        VersionCapError,
    )
    from gracekit.leases.leases import Guard
    from gracekit.leasing import HeldLease, Leases
    from gracekit.listings.host_list import HostState
    from gracekit.listings.lease_list import LeaseInfo
    from gracekit.phase import ServiceState
    from gracekit.recovery.decisions import Done, Fail, Retry, Wait
    from gracekit.recovery.resources.found import Absent, Broken, Found, Settled
    from gracekit.recovery.resources.kinds import ResourceKind
    from gracekit.request.context import Context
    from gracekit.request.current import current
    from gracekit.rpc.callers.sync_client import SyncClient
    from gracekit.rpc.callers.task_lookups import Progress, TaskInfo
    from gracekit.rpc.client import RpcClient
    from gracekit.rpc.methods import Method
    from gracekit.rpc.notification_listener import NotificationListener
    from gracekit.rpc.notifications import Notification
    from gracekit.runtime.face import Runtime
    from gracekit.service import Service, ops_method, rpc_method
    from gracekit.tracker.task import TaskState

__all__ = [
    "Absent",
    "Broken",
    "CallTimeoutError",
    "ConfigError",
    "ConflictingRequestError",
    "Context",
    "DeclarationError",
    "Done",
    "DrainReport",
    "Draining",
    "Fail",
    "Found",
    "Gone",
    "GracekitError",
    "Guard",
    "HeartbeatTimeoutError",
    "HeldLease",
    "HostState",
    "InvalidArgumentsError",
    "LeaseExists",
    "LeaseHeld",
    "LeaseInfo",
    "Leases",
    "Method",
    "MethodTimeoutError",
    "NoAnswerError",
    "NoCapacity",
    "NoSuchLease",
    "NoSuchMethodError",
    "Notification",
    "NotificationListener",
    "Parked",
    "Progress",
    "RemoteError",
    "ResourceKind",
    "Retry",
    "RpcClient",
    "RpcError",
    "RunEndedError",
    "Runtime",
    "Service",
    "ServiceState",
    "Settings",
    "Settled",
    "StaleVersionError",
    "SyncClient",
    "TaskCancelledError",
    "TaskInfo",
    "TaskInterruptedError",
    "TaskState",
    "TryAgain",
    "UnconfirmedError",
    "Undeliverable",
    "UnknownTaskError",
    "UnsupportedVersionError",
    "VersionCapError",
    "Wait",
    "current",
    "die_with_me",
    "ops_method",
    "plain",
    "rpc_method",
]

_ELSEWHERE = {
    "Absent": "recovery.resources.found",
    "Broken": "recovery.resources.found",
    "Context": "request.context",
    "Done": "recovery.decisions",
    "DrainReport": "drain.report",
    "Fail": "recovery.decisions",
    "Found": "recovery.resources.found",
    "Guard": "leases.leases",
    "HeldLease": "leasing",
    "HostState": "listings.host_list",
    "LeaseInfo": "listings.lease_list",
    "Leases": "leasing",
    "Method": "rpc.methods",
    "Notification": "rpc.notifications",
    "NotificationListener": "rpc.notification_listener",
    "Progress": "rpc.callers.task_lookups",
    "ResourceKind": "recovery.resources.kinds",
    "Retry": "recovery.decisions",
    "RpcClient": "rpc.client",
    "Runtime": "runtime.face",
    "Service": "service",
    "ServiceState": "phase",
    "Settings": "config",
    "Settled": "recovery.resources.found",
    "SyncClient": "rpc.callers.sync_client",
    "TaskInfo": "rpc.callers.task_lookups",
    "TaskState": "tracker.task",
    "Wait": "recovery.decisions",
    "current": "request.current",
    "die_with_me": "end_timer",
    "ops_method": "service",
    "plain": "callables",
    "rpc_method": "service",
}
"""Modules of the public names that are no errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gracekit' has no attribute {name!r}")
    module = importlib.import_module(f"gracekit.{_ELSEWHERE.get(name, 'errors')}")
    value = getattr(module, name)
    globals()[name] = value  # so this is asked once for each name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
