"""gracekit: the runtime for long-running RPC services that stop, crash and restart safely."""

from gracekit.config import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    ConflictingRequestError,
    ControlOffError,
    Draining,
    GracekitError,
    HeartbeatTimeoutError,
    InvalidArgumentsError,
    LeaseHeld,
    MethodTimeoutError,
    NoSuchMethodError,
    RemoteError,
    RpcError,
    RunEndedError,
    TaskCancelledError,
    TaskInterruptedError,
    UnconfirmedError,
    Undeliverable,
    UnsupportedVersionError,
    VersionCapError,
)
from gracekit.phase import ServiceState
from gracekit.recovery.verdicts import Done, Fail, Retry, Wait
from gracekit.request.context import Context
from gracekit.rpc.client import RpcClient
from gracekit.rpc.methods import Method
from gracekit.runtime import Runtime
from gracekit.service import Service, ops_method, rpc_method

__all__ = [
    "CallTimeoutError",
    "ConfigError",
    "ConflictingRequestError",
    "Context",
    "ControlOffError",
    "Done",
    "DrainReport",
    "Draining",
    "Fail",
    "GracekitError",
    "HeartbeatTimeoutError",
    "InvalidArgumentsError",
    "LeaseHeld",
    "Method",
    "MethodTimeoutError",
    "NoSuchMethodError",
    "RemoteError",
    "Retry",
    "RpcClient",
    "RpcError",
    "RunEndedError",
    "Runtime",
    "Service",
    "ServiceState",
    "Settings",
    "TaskCancelledError",
    "TaskInterruptedError",
    "UnconfirmedError",
    "Undeliverable",
    "UnsupportedVersionError",
    "VersionCapError",
    "Wait",
    "ops_method",
    "rpc_method",
]
