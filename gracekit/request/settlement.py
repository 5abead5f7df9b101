"""Settles deliveries, and recognises those that come back although they were acknowledged."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from gracekit.errors import StoreError
from gracekit.rpc.transport import Delivery
from gracekit.telemetry.telemetry import Telemetry

REMEMBERED: Final = 10_000
"""Ended requests without a row that are remembered. After a broken connection a broker delivers
again what it has read no ack of, which is at most the prefetch of each queue."""


async def settle(settlement: Coroutine[Any, Any, None], telemetry: Telemetry) -> None:
    """Settle a delivery; an error is only logged, as the transport settles or delivers it later."""
    try:
        await settlement
    except StoreError as error:
        telemetry.emit("store.error", what="settlement", error=str(error))


_Known = tuple[str, str, int]


class EndedRequests:
    """Requests without a row that have ended in this process, so that it runs none of them again.

    If a connection breaks after an ack was written, the broker may not have read the ack, and
    delivers the message again. A message is recognised by its request id, its queue and its
    bytes: another call with the same id has another caller, and runs.
    """

    def __init__(self) -> None:
        self._ended: dict[_Known, None] = {}  # oldest first

    def add(self, request_id: str, delivery: Delivery) -> None:
        """Note a request that has ended."""
        self._ended[_known(request_id, delivery)] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def knows(self, request_id: str, delivery: Delivery) -> bool:
        """Whether the request has ended here, and this is the same message."""
        return _known(request_id, delivery) in self._ended


def _known(request_id: str, delivery: Delivery) -> _Known:
    return request_id, delivery.queue.name, hash(delivery.body)
