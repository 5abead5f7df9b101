"""The life of a process that runs one service: signals, one Runtime, one drain, one exit code.

What a program or library does to the loop, to other tasks and to threads must not keep the process
from ending, nor change the exit code that is on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import Final, NoReturn

from gracekit import streams
from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.exits import ExitCode, exit_code_of, explained
from gracekit.process import NoThreadError, leave_at_once
from gracekit.runs.end_records import FailedStart, note_start
from gracekit.runtime.built import Ground
from gracekit.runtime.face import Runtime
from gracekit.runtime.loops import LoopFactory, loop_factory
from gracekit.runtime.serving import FOREIGN_CANCELLATION
from gracekit.service import Service
from gracekit.stop_signals import StopSignals
from gracekit.store.location import StoreLocation
from gracekit.telemetry.catalogue import LOGGER
from gracekit.telemetry.logs import said
from gracekit.telemetry.safe_text import escape

FLUSH_S: Final = 0.5
"""Seconds to flush logs and standard streams at the end of a process."""
BARRIER_S: Final = 0.5
"""Seconds for systemd to read the last messages."""
DEAD_AFTER_FAILURES: Final = 3
"""An event loop that failed so often, and ran nothing in between, will not recover."""
COLLECT_AFTER: Final = (20_000, 5, 10)
"""Thresholds of the garbage collector, see `gc.set_threshold`; Python's own are 700, 10 and 10."""


def run_service(service: Service, settings: Settings | LiveSettings | None = None) -> int:
    """Run *service* until a signal ends it; returns the exit code.

    If application code raises SystemExit or KeyboardInterrupt outside of its handlers, that
    is logged, and the service drains with exit code 70.

    Does not return if a handler or a thread has not ended: the process then exits
    by `os._exit`, so that its death frees its leases. With `LiveSettings`, SIGHUP
    reads the settings again, unless standard input is a terminal. After SIGINT at a
    terminal, the process ends by SIGINT. When this returns, stop signals are
    ignored, because the process is expected to exit.
    """
    given = settings.now if isinstance(settings, LiveSettings) else settings
    as_json = given is not None and given.log_format == "json"
    runtime = None
    try:
        runtime = Runtime(service, settings, signals=True)
        signals = runtime.ground.signals
        assert signals is not None, "signals=True"
        factory = loop_factory(runtime.settings)
        signals.take(for_good=True)  # before there is a loop, as a stop may come now
        calm_collector()
        try:
            report = _run_to_the_end(runtime, signals, factory)
        finally:
            signals.close()
        # systemd drops messages of a process that has ended before systemd has read them.
        runtime.ground.process.notify.barrier(timeout_s=BARRIER_S)
        # The interpreter would wait for threads and streams without a limit.
        if not _threads_ended(runtime.settings.exit_margin_s) or not streams.flush(FLUSH_S):
            _exit_now(runtime, report)
        # The interpreter's last garbage collections would walk all objects, which takes a tenth of
        # a second or more, for which a supervisor waits. Frozen objects are not walked.
        gc.freeze()
    except Exception as raised:  # noqa: BLE001 - of an on_start hook, or an error in gracekit
        if isinstance(error := NoThreadError.of(raised), GracekitError):
            if given is not None:
                _note_failed_start(service, given, error, runtime)
            why = said(explained(error), as_json=as_json)
            return _end_with(exit_code_of(error), why if as_json else f"Error: {why}")
        text = f"gracekit: {type(error).__name__} ended the start:"
        why = said(text, trace=traceback.format_exc(), as_json=as_json)
        return _end_with(ExitCode.INTERNAL, why)
    if signals.first == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(report.exit_code)


def _note_failed_start(
    service: Service, settings: Settings, error: GracekitError, runtime: Runtime | None
) -> None:
    """Let `gracekit exits` show it, though there may be no run on record."""
    start = FailedStart(
        service=service.topic,
        instance=settings.instance,
        at=time.time(),
        code=int(exit_code_of(error)),
        reason=str(error)[:500],
        run_id="" if runtime is None else runtime.run_id,
    )
    with contextlib.suppress(GracekitError):  # the location may be what is wrong
        note_start(StoreLocation(settings).run_directory, start)


def _run_to_the_end(
    runtime: Runtime, signals: StopSignals, factory: LoopFactory | None
) -> DrainReport:
    """Run the event loop until the drain has ended.

    If a callback or a task raises SystemExit, `asyncio.run` cancels all tasks, and requests in
    flight would be lost. Here the loop is entered again instead. If it cannot run at all, the
    process exits, because neither a signal nor a drain could get through.
    """
    untold: list[BaseException] = []

    def begin() -> None:
        signals.keep()  # uvloop has just taken the wake-up
        while untold:
            _obey_what_left(runtime.ground, untold.pop(0))

    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        loop.call_soon(begin)
        life = loop.create_task(_live(runtime), name="gracekit-life")
        while not life.done():
            try:
                loop.run_until_complete(life)
            except BaseException as error:
                if life.done():
                    raise
                untold.append(error)
                _leave_dead_loop(untold)
                loop.call_soon(begin)
        report = life.result()
        if not _others_ended(loop, runtime.settings.exit_margin_s):
            _exit_now(runtime, report)
        return report


def _obey_what_left(ground: Ground, error: BaseException) -> None:
    """Log an *error* that left the event loop, and drain."""
    ground.telemetry.emit("loop.left", error=repr(error))
    logging.getLogger(LOGGER).error("this left the event loop:", exc_info=error)
    ground.stops.fail(f"{error!r} left the event loop")
    ground.stops.ask(source="error", by=type(error).__name__, reason=repr(error)[:200])


def _leave_dead_loop(untold: list[BaseException]) -> None:
    """End the process if the loop itself has failed several times and ran nothing in between.

    Of the exceptions of callbacks, only SystemExit and KeyboardInterrupt leave asyncio's loop. So
    an OSError is the loop's own, mostly because something closed its descriptors.
    """
    own = [error for error in untold if isinstance(error, Exception)]
    if len(own) >= DEAD_AFTER_FAILURES:
        leave_at_once(
            f"gracekit: the event loop cannot run ({escape(repr(own[-1]))}): this process leaves, "
            "and the next start settles its tasks. Close only descriptors that you have opened."
        )


async def _live(runtime: Runtime) -> DrainReport:
    """Open the Runtime, serve, and drain."""
    try:
        async with runtime:
            await runtime.serve()
    except asyncio.CancelledError as error:
        # A handler has cancelled all tasks of the process. The end of the block has drained.
        if runtime.report is None:
            raise GracekitError(FOREIGN_CANCELLATION) from error
    report = await runtime.serve()
    if report.must_die or not await _default_executor_ended(runtime.settings.exit_margin_s):
        _exit_now(runtime, report)
    return report


def _exit_now(runtime: Runtime, report: DrainReport) -> NoReturn:
    """Exit at once: only the death of the process ends a handler or thread that still runs."""
    runtime.ground.process.exit_now(int(report.exit_code))


def _others_ended(loop: asyncio.AbstractEventLoop, within_s: float) -> bool:
    """Cancel the tasks that the application has left on *loop*; false if one does not end.

    Otherwise a task that swallows its cancellation would keep the process until the alarm, which
    replaces the exit code on record.
    """
    if not (others := asyncio.all_tasks(loop)):
        return True
    for task in others:
        task.cancel()
    try:
        _, left = loop.run_until_complete(asyncio.wait(others, timeout=within_s))
    except BaseException:  # noqa: BLE001 - a task raised SystemExit; the end is on record
        return False
    return not left


def _end_with(code: ExitCode, why: str) -> int:
    """Write *why* to standard error; returns the exit code."""
    if not streams.say(why) or not streams.flush(FLUSH_S):
        os._exit(int(code))  # the streams are not read, and the interpreter would wait for ever
    return int(code)


def calm_collector() -> None:
    """Let Python collect garbage less often, as is better with many requests in flight.

    A request has some forty objects that live until it ends. Hundreds of requests at a time would
    start the collector again and again, which takes a third of the processor time of a journaled
    request. Cycles are rare, and are collected a little later. Higher thresholds stay.
    """
    if gc.get_threshold()[0] < COLLECT_AFTER[0]:
        gc.set_threshold(*COLLECT_AFTER)


async def _default_executor_ended(within_s: float) -> bool:
    """End the threads of `asyncio.to_thread`; false if one does not end.

    `asyncio.run` would wait for it until the alarm, which replaces the exit code.
    """
    closing = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    done, _ = await asyncio.wait({closing}, timeout=within_s)
    return bool(done) and closing.exception() is None  # no thread could be started to wait for them


def _threads_ended(within_s: float) -> bool:
    """Wait for the threads that the interpreter would wait for without a limit."""
    deadline = time.monotonic() + within_s
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
    return True
