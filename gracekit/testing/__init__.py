"""The test kit for services: everything in memory, and in virtual time.

Start with `InMemoryService` and `run`; docs/testing.md explains the rest.
"""

from gracekit.process import Point
from gracekit.recovery.resources.results import ResourceOutcome, Result
from gracekit.testing.callers import Caller, Pending
from gracekit.testing.faults import Fault
from gracekit.testing.kit import InMemoryService, ServiceFaultError
from gracekit.testing.loop import NothingLeftError, VirtualLoop, run
from gracekit.testing.parked import ParkedTask
from gracekit.tracker.task import TaskState

__all__ = [
    "Caller",
    "Fault",
    "InMemoryService",
    "NothingLeftError",
    "ParkedTask",
    "Pending",
    "Point",
    "ResourceOutcome",
    "Result",
    "ServiceFaultError",
    "TaskState",
    "VirtualLoop",
    "run",
]
