"""Where a worker's processor time goes, by stage, sampled on its event loop.

A timer on the processor time of the main thread interrupts it at each tick of the
kernel (4 ms with 250 Hz); the innermost function that the table knows names the stage.
So what asyncio, pamqp or msgspec take is the stage's that called them. Shares are
right to about a tenth of themselves after some seconds of work.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

OTHER_THREADS: Final = "journal, its threads"
LOOP: Final = "event loop: polls, turns, callbacks"

TABLE: Final[Mapping[str, Sequence[str]]] = {
    "socket: recv": ("asyncio/selector_events.py:_SelectorSocketTransport._read_ready",),
    "socket: send": ("asyncio/selector_events.py:_SelectorSocketTransport.write",),
    "aiormq: bytes to frames": (
        "aiormq/connection.py:Connection.__reader",
        "aiormq/connection.py:FrameReceiver",
    ),
    "aiormq: frames to a task a delivery": (
        "aiormq/channel.py:Channel._reader",
        "aiormq/channel.py:Channel._on_consumer_done",
        "aiormq/base.py:FutureStore.__on_task_done",
        "aio_pika/queue.py:consumer",
    ),
    "intake, and a task of ours": (
        "gracekit/rpc/amqp/intake.py:Intake._on_message",
        "gracekit/rpc/server.py:",
        "gracekit/dispatcher.py:Dispatcher.take",
        "gracekit/dispatcher.py:Dispatcher._spawn",
    ),
    "decode": (
        "gracekit/rpc/envelope.py:open_message",
        "gracekit/rpc/oslo_wire.py:request_in",
        "gracekit/rpc/oslo_wire.py:caller_in",
        "benchmarks/brokered.py:opened",
    ),
    "method, arguments, record of the task": (
        "gracekit/request/arrivals.py:",
        "gracekit/rpc/methods.py:",
    ),
    "tracking, turns, states": (
        "gracekit/dispatcher.py:",
        "gracekit/request/lanes.py:",
        "gracekit/tracker/",
        "gracekit/telemetry/",
    ),
    "handler and what is around it": (
        "gracekit/request/attempt.py:",
        "gracekit/request/context.py:",
        "benchmarks/brokered.py:",
        "benchmarks/plain.py:",
    ),
    "journal, on the loop": (
        "gracekit/request/custody.py:",
        "gracekit/journal/",
        "gracekit/store/",
    ),
    "reply": (
        "gracekit/request/answers.py:",
        "gracekit/rpc/amqp/publisher.py:",
        "aiormq/channel.py:Channel.basic_publish",
        "aiormq/channel.py:Channel._on_confirm_frame",
        "aiormq/channel.py:Channel._confirm_delivery",
        "aio_pika/exchange.py:",
        "benchmarks/brokered.py:_answer",
    ),
    "timeouts": ("asyncio/timeouts.py:",),
    "ack": (
        "gracekit/rpc/amqp/intake.py:",
        "gracekit/rpc/transport.py:Delivery",
        "gracekit/rpc/transport.py:settle",
        "aiormq/channel.py:Channel.basic_ack",
        "aio_pika/message.py:IncomingMessage.ack",
    ),
    "aiormq: writer's task": (
        "aiormq/connection.py:Connection.__writer",
        "aiormq/connection.py:FrameGenerator",
    ),
}
"""Stage to functions: their file from the package on, and how their qualified name begins."""

STAGES: Final = (*TABLE, LOOP, OTHER_THREADS)

_BY_LENGTH: Final = sorted(
    ((start, stage) for stage, starts in TABLE.items() for start in starts),
    key=lambda one: -len(one[0]),
)
_PACKAGES: Final = ("asyncio", "aiormq", "aio_pika", "gracekit", "benchmarks")


class Sampler:
    """Seconds of processor time by stage, while it is on; of the thread that made it, the main one.

    SIGALRM is its own: nothing else in the process may want it.
    """

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()
        self._stages: dict[str, str | None] = {}  # by function
        signal.signal(signal.SIGALRM, self._take)

    @contextlib.contextmanager
    def on(self) -> Iterator[list[float]]:
        """Fills the list with the seconds of each of `STAGES` at the end."""
        self._samples.clear()
        seconds: list[float] = []
        every, mine = time.process_time(), time.thread_time()
        with _ticking():
            yield seconds
        mine, every = time.thread_time() - mine, time.process_time() - every
        each = mine / max(1, self._samples.total())
        seconds += [each * self._samples[stage] for stage in STAGES[:-1]]
        seconds.append(every - mine)

    def _take(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if (stage := self._stage(frame)) is not None:
                self._samples[stage] += 1
                return
            frame = frame.f_back
        self._samples[LOOP] += 1

    def _stage(self, frame: FrameType) -> str | None:
        code = frame.f_code
        name = f"{code.co_filename}:{code.co_qualname}"
        if name not in self._stages:
            self._stages[name] = _stage_of(name)
        return self._stages[name]


def _stage_of(name: str) -> str | None:
    for package in _PACKAGES:
        _, found, rest = name.rpartition(f"/{package}/")
        if found:
            inside = f"{package}/{rest}"
            return next((stage for start, stage in _BY_LENGTH if inside.startswith(start)), None)
    return None


# -- a timer on a thread's processor time, which Python's signal module has not -------

_CLOCK_THREAD_CPUTIME_ID: Final = 3
_EVERY_NS: Final = 1_000_000


class _Spec(ctypes.Structure):
    """struct itimerspec: interval and first, each in seconds and nanoseconds."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


@contextlib.contextmanager
def _ticking() -> Iterator[None]:
    """SIGALRM, its default, after each so much processor time of this thread."""
    libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.timer_create(_CLOCK_THREAD_CPUTIME_ID, None, ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), "timer_create")
    try:
        libc.timer_settime(timer, 0, ctypes.byref(_Spec(0, _EVERY_NS, 0, _EVERY_NS)), None)
        yield
    finally:
        libc.timer_delete(timer)
