"""Parked tasks and notifications, for tests of a service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gracekit.config.settings import Settings
from gracekit.journal.outbox import NO_CAPACITY, UPDATE
from gracekit.journal.rows import from_json
from gracekit.rpc.notification_listener import NotificationListener
from gracekit.rpc.notifications import Notification, decode_notification
from gracekit.service import Service
from gracekit.testing.faults import NO_FAULTS
from gracekit.testing.given import check_event_type
from gracekit.testing.instance import InstanceMachine
from gracekit.testing.ports import PlayedProcess, PlayedTransport

_PENDING: Final = """
SELECT request_id, method, coalesce(resource_kind, ops_kind) AS resource_kind,
    coalesce(resource_id, ops_id) AS resource_id, parkings, pending_deadline, requested, detail
FROM task WHERE service = ? AND state = 'pending' ORDER BY id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedTask:
    """A parked task, from its row in the journal.

    Attributes:
        task_id: Its request id.
        method: Name of the handler that found no capacity.
        resource: `kind:id`, as in notifications; None if the method has none.
        version: How often it was parked; an order about it names this number.
        deadline: Wall time until which it waits, as `one.clock.wall()` counts.
        requested: The missing capacity, as its handler described it.
        reason: The text of its NoCapacity.
    """

    task_id: str
    method: str
    resource: str | None
    version: int
    deadline: float
    requested: Mapping[str, Any]
    reason: str


class ParkedSight:
    """The methods of InMemoryService about the state PENDING."""

    service: Service
    _settings: Settings

    @property
    def machine(self) -> InstanceMachine:
        """The simulated machine: broker, disk and processes."""
        raise NotImplementedError

    def pending(self) -> list[ParkedTask]:
        """The parked tasks of the service, in the order of their acceptance."""
        return [_parked(row) for row in self.machine.rows(_PENDING, self.service.topic)]

    def notifications(self, event_type: str | None = None) -> list[Notification]:
        """The notifications sent about parked tasks so far, by all processes, read or not.

        If a process is killed just after sending one, the next process sends it again, and it is
        listed twice with the same `message_id`. Use `settled()` to wait until all are sent.

        Args:
            event_type: Only `task.update`, or only `task.no_capacity`; None for both.

        Raises:
            GracekitError: there is no such type.
        """
        check_event_type(event_type, (UPDATE, NO_CAPACITY))
        noted, mine = self.machine.broker.notifications, self._notification_topic()
        sent = [decode_notification(body) for topic, body in noted if topic == mine]
        return [one for one in sent if event_type in {None, one.event_type}]

    @contextlib.asynccontextmanager
    async def listening(
        self, *, priorities: Sequence[str] = ("info", "error")
    ) -> AsyncIterator[NotificationListener]:
        """Read notifications, as a resolver in another process does.

        Use it as `async with one.listening() as listener:`.
        """
        transport = PlayedTransport(self.machine.broker, PlayedProcess(set(), 1), NO_FAULTS)
        await transport.start()
        try:
            async with NotificationListener(
                transport,
                self._notification_topic(),
                priorities=priorities,
                clock=self.machine.clock,
            ) as listener:
                yield listener
        finally:
            await transport.stop()

    def _notification_topic(self) -> str:
        return self._settings.notification_topic_of(self.service.topic)


def _parked(row: Mapping[str, Any]) -> ParkedTask:
    kind = row["resource_kind"]
    return ParkedTask(
        task_id=row["request_id"],
        method=row["method"],
        resource=None if kind is None else f"{kind}:{row['resource_id']}",
        version=row["parkings"],
        deadline=row["pending_deadline"],
        requested=from_json(row["requested"]),
        reason=row["detail"],
    )
