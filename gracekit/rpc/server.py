"""An RPC server: takes deliveries from its queues while its lane has free places.

It neither decodes messages nor runs handlers. A delivery that gets a place is passed
to `handle`; the others wait for a place. Intake is closed when the transport has
confirmed it (cancel-ok), and deliveries without a place are given back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final

from gracekit import background, backoff
from gracekit.rpc.transport import Consumer, Delivery, Queue, ReadFailure, Transport

READ_AGAIN_WITHIN_S: Final = 5.0
"""Seconds in which deliveries that were given back are read again: a pause of reading that begins
within this time after the last one counts as the same pause."""
WIDEN_S: Final = 1.0
"""Seconds until a consumer with too low a prefetch is replaced, as more places may become free."""


class Capacity:
    """The places of one lane: how many deliveries it may have in flight. Its servers share it.

    Attributes:
        total: Number of places.
        free: Number of free places; negative while more are taken than there are.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._listeners: list[Callable[[], None]] = []

    def take(self) -> bool:
        """Take a place; return whether one was free."""
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    def give(self) -> None:
        """Give a place back, and call the listeners."""
        self.free += 1
        for listener in self._listeners:
            listener()

    def resize(self, total: int) -> None:
        """Change the number of places; who has one keeps it, even if they are too many then."""
        self.free += total - self.total
        self.total = total
        for listener in self._listeners:
            listener()

    def on_free(self, listener: Callable[[], None]) -> None:
        """Call *listener* each time a place becomes free."""
        self._listeners.append(listener)


Handle = Callable[[Delivery], None]


class _Held:
    """The prefetch of one consumer, and how many of its deliveries are unsettled."""

    __slots__ = ("limit", "number")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.number = 0


class RpcServer:
    """The server of one topic: reads its shared, directed and fanout queues.

    `start`, `close_intake`, `wait` and `stop` may each be called twice, and in
    any order.

    Args:
        transport: Carries the queues.
        queues: The queues to read.
        handle: Called with each delivery that got a place; the task made of it gives
            the place back. Must not block.
        capacity: The places of the lane.
        prefetch: How many deliveries may be unsettled at a time.
        prefetch_bytes: Most bytes of deliveries that are read but no tasks yet. Above this,
            reading pauses; if deliveries wait for places, they are given back instead.
        wait_s: Seconds after which a delivery that got no place is given back.
        cancel_ok_timeout_s: Seconds to wait for cancel-ok.

    Attributes:
        queues: The queues that it reads.
        is_local: Whether its transport is.
        returned: How many deliveries were given back because they got no place.
        fresh: By queue name, how many deliveries came for the first time (not `redelivered`),
            without those that were given back because they got no place.
        kept: By queue name, how many deliveries became tasks but stay unsettled until these
            have ended. Only for a local transport, whose `depth` counts them.
    """

    def __init__(
        self,
        transport: Transport,
        queues: Sequence[Queue],
        handle: Handle,
        capacity: Capacity,
        *,
        prefetch: int,
        prefetch_bytes: int,
        wait_s: float,
        cancel_ok_timeout_s: float,
    ) -> None:
        self._transport = transport
        self.queues: Final = tuple(queues)
        self._handle = handle
        self._capacity = capacity
        self._prefetch = prefetch
        self._prefetch_bytes = prefetch_bytes
        self._wait_s = wait_s
        self._cancel_ok_timeout_s = cancel_ok_timeout_s
        self._waiting: deque[Delivery] = deque()
        self._bytes = 0  # of deliveries that are read and no tasks yet
        self._held: ReadFailure | None = None  # set while reading pauses because of them
        self._stuck_since: float | None = None  # start of pauses without an acceptance
        self._eased_at = 0.0  # when the last pause ended
        self._ending = False  # consuming is being ended: too many or too long waits
        self._consumer: Consumer | None = None
        self._here = _Held(prefetch)  # of the present consumer
        self._widening: asyncio.TimerHandle | None = None
        self._failure: ReadFailure | None = None  # why there is no consumer (yet)
        self._open = False
        self._timer: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()  # serialises starts and ends of consuming
        self._background: set[asyncio.Task[None]] = set()
        self._resuming = False
        self.returned = 0
        self.fresh: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.is_local: Final = transport.is_local  # a broker's count lacks delivered messages
        capacity.on_free(self._place_is_free)

    async def start(self) -> None:
        """Declare the queues and begin to take deliveries."""
        await self._transport.declare(self.queues)
        self._open = True
        await self._consume(self._prefetch)

    async def open_intake(self) -> None:
        """Take deliveries again; if that fails, it is retried in the background."""
        self._open = True
        if self._consumer is None:  # if the broker is away, this takes many seconds
            since = asyncio.get_running_loop().time()
            self._failure = ReadFailure(since=since, why="it is not read yet")
        await self._consume_again()

    async def close_intake(self) -> int:
        """Stop taking deliveries; return how many were given back.

        When it returns, the transport has confirmed the end of delivery (or did not within
        `cancel_ok_timeout_s`), and all deliveries without a place are given back.
        """
        self._open = False
        before = self.returned
        await self._end_consuming()
        return self.returned - before

    async def wait(self) -> None:
        """Wait until pauses and resumptions that are under way have ended."""
        while self._background:
            await asyncio.wait(tuple(self._background))

    async def stop(self) -> None:
        """Close intake, and wait for background work."""
        await self.close_intake()
        await self.wait()

    @property
    def is_open(self) -> bool:
        """Whether intake is open; it may be pausing because no place is free."""
        return self._open

    @property
    def is_held(self) -> bool:
        """Whether reading pauses because too many bytes are read but not accepted yet."""
        return self._open and self._held is not None

    @property
    def failure(self) -> ReadFailure | None:
        """Why an open intake reads nothing now; None if it only waits for a free place."""
        if not self._open:
            return None
        return self._held or self.lost

    @property
    def lost(self) -> ReadFailure | None:
        """Why an open intake cannot read its queues; a mere pause does not count.

        Any thread may read this.
        """
        if not self._open:
            return None
        consumer = self._consumer
        return self._failure if consumer is None else consumer.failure

    @property
    def has_waiting(self) -> bool:
        """Whether deliveries wait for a place."""
        return bool(self._waiting)

    async def depth(self, queue: Queue | None = None) -> int:
        """How many messages its queues, or one of them, hold; see `Transport.depth`.

        Raises:
            DependencyError: the broker or file cannot be asked now.
        """
        return await self._transport.depth(self.queues if queue is None else [queue])

    async def waiting(self) -> tuple[int, float | None]:
        """As `Transport.waiting`, with the deliveries here that wait for a place; 0 s if none."""
        number, oldest_s = await self._transport.waiting(self.queues)
        if self._timer is not None:  # it began when the first of them came
            held_s = asyncio.get_running_loop().time() - self._timer.when() + self._wait_s
            oldest_s = max(oldest_s or 0.0, held_s)
        number += len(self._waiting)
        return number, oldest_s if number else 0.0

    # -- deliveries ------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        # The size is taken here, as a task may drop the body before it calls `taken`.
        size = len(delivery.body)
        self._bytes += size
        delivery.on_taken = partial(self._taken, delivery, size)
        if self._here.limit < self._prefetch:  # others need no counting
            delivery.on_settled = partial(self._settled, self._here)
            self._here.number += 1
        if not delivery.redelivered:
            self.fresh[delivery.queue.name] += 1
        self._waiting.append(delivery)
        self._pump()
        if self._bytes > self._prefetch_bytes:
            self._read_less()

    def _read_less(self) -> None:
        """Pause reading until the bytes read so far belong to tasks, or end consuming.

        A pause stops everything on the connection, ops requests too, so it must be short. If
        deliveries wait for places it would not be, so consuming ends and they are given back.
        """
        if not self._waiting:
            if self._consumer is not None:
                self._hold()
                self._consumer.pause()
        elif self._consumer is not None and not self._ending:
            self._waited_too_long()
        else:  # it arrived while consuming is being ended
            background.run_beside(self._background, self._return([self._waiting.pop()]))

    def _hold(self) -> None:
        if self._held is None:
            now = asyncio.get_running_loop().time()
            if self._stuck_since is None or now - self._eased_at > READ_AGAIN_WITHIN_S:
                self._stuck_since = now
            why = f"{self._bytes} bytes wait to be accepted, and {self._prefetch_bytes} may"
            self._held = ReadFailure(since=self._stuck_since, why=why)

    def _ease(self) -> None:
        if self._held is not None:
            self._held = None
            self._eased_at = asyncio.get_running_loop().time()

    def _taken(
        self,
        delivery: Delivery,
        size: int,
        goes_back: bool,  # noqa: FBT001 - see `Delivery.on_taken`
    ) -> None:
        self._bytes -= size
        if self.is_local and not delivery.settled:
            self.kept[delivery.queue.name] += 1
            delivery.on_settled = partial(self._ended, delivery.queue.name, delivery.on_settled)
        if not goes_back:
            self._stuck_since = None
        if self._held and self._bytes <= self._prefetch_bytes:
            self._ease()
            if self._consumer is not None:
                self._consumer.resume()

    def _ended(self, queue: str, on_settled: Callable[[], None] | None) -> None:
        self.kept[queue] -= 1
        if on_settled is not None:
            on_settled()

    def _settled(self, here: _Held) -> None:
        here.number -= 1

    def _pump(self) -> None:
        while self._waiting and self._open and self._capacity.take():
            self._handle(self._waiting.popleft())
        if not self._waiting:
            self._end_timer()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._wait_s, self._waited_too_long)

    def _waited_too_long(self) -> None:
        """Give back the waiting deliveries, as other hosts may have places; pause until we have."""
        self._end_timer()
        self._ending = True
        background.run_beside(self._background, self._pause())

    async def _pause(self) -> None:
        try:
            await self._end_consuming()
        finally:
            self._ending = False
            self._resume()  # if a place became free meanwhile

    def _place_is_free(self) -> None:
        self._pump()
        self._resume()
        if self._here.limit < self._prefetch and self._widening is None and self._is_narrow():
            self._widening = asyncio.get_running_loop().call_later(WIDEN_S, self._widen)

    def _is_narrow(self) -> bool:
        """Whether the consumer's prefetch is too low to fill the free places.

        It was set when fewer places were free. A request that is acked only at its end, as that of
        a `requeue` method, counts towards the prefetch until then.
        """
        left = max(0, self._here.limit - self._here.number)
        room = min(self._prefetch, self._capacity.free)
        return self._consumer is not None and self._here.limit < self._prefetch and room > left

    def _widen(self) -> None:
        self._widening = None
        if self._open and not self._ending and self._is_narrow():
            self._waited_too_long()

    def _resume(self) -> None:
        if self._open and self._consumer is None and self._capacity.free > 0 and not self._resuming:
            self._resuming = True
            background.run_beside(self._background, self._consume_again())

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_widening(self) -> None:
        if self._widening is not None:
            self._widening.cancel()
            self._widening = None

    # -- consuming -------------------------------------------------------------------

    async def _consume(self, prefetch: int) -> None:
        async with self._changing:
            self._resuming = False
            if self._open and self._consumer is None:
                here = self._here = _Held(max(1, prefetch))
                self._consumer = await self._transport.consume(
                    self.queues, self._on_delivery, prefetch=here.limit
                )
                self._failure = None
                if self._bytes > self._prefetch_bytes:
                    self._read_less()
                if not self.is_open:  # a close was cancelled while it waited for the lock
                    background.run_beside(self._background, self._end_consuming())

    async def _consume_again(self) -> None:
        """Consume after a pause; if that fails, retry while intake is open."""
        try:
            await self._consume(min(self._prefetch, self._capacity.free))
        except Exception as error:  # noqa: BLE001 - no other task would try again
            loop = asyncio.get_running_loop()
            since = loop.time() if self._failure is None else self._failure.since
            self._failure = ReadFailure(since=since, why=str(error) or repr(error))
            loop.call_later(backoff.CONSUME_S, self._resume)

    async def _end_consuming(self) -> None:
        async with self._changing:
            self._end_timer()
            self._end_widening()
            consumer, self._consumer = self._consumer, None
            self._ease()
            if consumer is not None:
                # Without a cancel-ok the deliveries are still given back, and none is handled.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._cancel_ok_timeout_s):
                        await consumer.cancel()
            waiting, self._waiting = self._waiting, deque()
            await self._return(waiting)

    def _return(self, deliveries: Collection[Delivery]) -> Coroutine[Any, Any, None]:
        """Give back deliveries that got no place; they are counted at once."""
        self.returned += len(deliveries)
        self.fresh.subtract(one.queue.name for one in deliveries if not one.redelivered)
        return self._give_back(deliveries)

    async def _give_back(self, deliveries: Iterable[Delivery]) -> None:
        # If one fails, its transport retries it; the others must not wait for that.
        await asyncio.gather(
            *(delivery.give_back() for delivery in deliveries), return_exceptions=True
        )
