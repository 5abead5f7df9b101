"""Settles deliveries, and recognises those that come back although they were acknowledged."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from gracekit.errors import StoreError
from gracekit.journal.rows import Outcome
from gracekit.rpc.transport import Delivery
from gracekit.telemetry.telemetry import Telemetry

REMEMBERED: Final = 10_000
"""Ended requests without a row that are remembered. After a broken connection a broker delivers
again what it has read no ack of, which is at most the prefetch of each queue."""
OWED_BYTES: Final = 16 << 20
"""Total size of their answers that could not be sent and are remembered."""


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
        self._ended: dict[_Known, None] = {}  # oldest first, like `_owed`
        self._owed: dict[_Known, Outcome] = {}
        self._owed_bytes = 0

    def add(self, request_id: str, delivery: Delivery, owed: Outcome | None) -> None:
        """Note a request that has ended, and the answer its caller has not got, or None."""
        known = _known(request_id, delivery)
        self._ended[known] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if self._owed:
            self._forget_owed(known)
        if owed is not None:
            self._owed[known] = owed
            self._owed_bytes += _size_of(owed)
            while self._owed_bytes > OWED_BYTES:
                self._forget_owed(next(iter(self._owed)))

    def _forget_owed(self, known: _Known) -> None:
        if (owed := self._owed.pop(known, None)) is not None:
            self._owed_bytes -= _size_of(owed)

    def knows(self, request_id: str, delivery: Delivery) -> bool:
        """Whether the request has ended here, and this is the same message."""
        return _known(request_id, delivery) in self._ended

    def owed(self, request_id: str, delivery: Delivery) -> Outcome | None:
        """The answer that its caller has not got; None if nothing is due."""
        return self._owed.get(_known(request_id, delivery))


def _known(request_id: str, delivery: Delivery) -> _Known:
    return request_id, delivery.queue.name, hash(delivery.body)


def _size_of(outcome: Outcome) -> int:
    return len(outcome.result or "") + len(outcome.failure or "") + 500
