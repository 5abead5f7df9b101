"""The service that the process tests start: each handler is one way to behave, or to misbehave.

What a handler does to the world is a line in the effects file, one `os.write` each, so that a
killed process leaves whole lines only.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gracekit import Context, Done, Retry, Service, life
from tests.logs import configure_logging

EFFECTS = "GRACEKIT_TEST_EFFECTS"
START = "GRACEKIT_TEST_START"
PROBE_S = "GRACEKIT_TEST_PROBE_S"
BOOT_ID = "GRACEKIT_TEST_BOOT_ID"
GO = Path("go")  # in the working directory, which is the site's own

svc = Service("shop")
LOST: list[asyncio.Task[None]] = []


def be_on_another_machine(boot_id: str) -> None:
    """Have the boot id of another machine, whose processes nobody here can see."""
    read = life._read
    life._read = lambda path: boot_id if path.endswith("boot_id") else read(path)


def effect(word: str, key: str, *more: object) -> None:
    """Append one line: monotonic nanoseconds, pid, word, key, and whatever else."""
    line = " ".join(map(str, (time.monotonic_ns(), os.getpid(), word, key, *more)))
    fd = os.open(os.environ[EFFECTS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def is_done(key: str) -> bool:
    """Whether the effect of *key* is in the world."""
    lines = Path(os.environ[EFFECTS]).read_text().splitlines()
    return any(line.split()[2:4] == ["done", key] for line in lines)


def is_alive(pid: int) -> bool:
    """Whether that process can still act."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# -- ordinary work ----------------------------------------------------------------


async def work(ctx: Context, key: str, s: float, again_s: float | None = None) -> str:
    """Start, take *s* seconds (*again_s* from the second attempt on), take effect."""
    effect("start", key, ctx.attempt, ctx.fence)
    await asyncio.sleep(s if again_s is None or ctx.attempt < 2 else again_s)
    effect("done", key)
    return key


async def until_go(ctx: Context, key: str) -> str:
    """Start, and take effect when the test says so."""
    effect("start", key, ctx.attempt)
    while not GO.exists():
        await asyncio.sleep(0.02)
    effect("done", key)
    return key


def wait_for_go(key: str) -> None:
    """Wait in a thread, and take effect when the test says so."""
    effect("start", key)
    while not GO.exists():
        time.sleep(0.02)
    effect("done", key)


def in_new_thread(call: Callable[[], object]) -> None:
    """Start a thread of the application's own, as Nova's spawn does."""
    threading.Thread(target=call, name="builder").start()


@svc.rpc(on_interrupt="retry")
async def spawned(ctx: Context, key: str) -> str:
    """Leave the work to a thread that is tracked."""
    ctx.track_call(in_new_thread, partial(wait_for_go, key))
    return key


@svc.ops
def resized(ctx: Context, key: str) -> str:
    """A long piece of work on the ops topic, in a thread."""
    wait_for_go(key)
    return key


@svc.rpc
async def untracked(ctx: Context, key: str) -> None:
    """Leave the work to a thread and an asyncio task that nothing tracks."""

    async def lost() -> None:
        await asyncio.sleep(3600)

    in_new_thread(partial(wait_for_go, key))
    LOST.append(asyncio.create_task(lost()))


@svc.rpc(on_interrupt="retry", resource="vm")
async def retried(ctx: Context, key: str, vm: str, s: float, again_s: float | None = None) -> str:
    return await work(ctx, key, s, again_s)


@svc.rpc(on_interrupt="retry", resource="vm")
def retried_in_thread(ctx: Context, key: str, vm: str, s: float) -> str:
    """The same in a worker thread, which nobody can cancel."""
    effect("start", key, ctx.attempt, ctx.fence)
    time.sleep(s)
    effect("done", key)
    return key


@svc.rpc(on_interrupt="probe")
async def probed(ctx: Context, key: str, s: float) -> str:
    return await work(ctx, key, s)


@probed.probe
async def _(ctx: Context, key: str, s: float) -> Done | Retry:
    effect("probe", key)
    await asyncio.sleep(float(os.environ.get(PROBE_S, "0")))
    return Done(key) if is_done(key) else Retry()


@svc.rpc
async def slow(ctx: Context, key: str, s: float) -> str:
    return await work(ctx, key, s)


@svc.rpc
async def through_drain(ctx: Context, key: str, s: float) -> str:
    """Ends *s* seconds after a drain began."""
    effect("start", key, ctx.attempt)
    while not ctx.draining:
        await asyncio.sleep(0.01)
    effect("draining", key)
    await asyncio.sleep(s)
    effect("done", key)
    return key


@svc.rpc
def in_thread(ctx: Context, key: str, s: float) -> str:
    """The same in a worker thread."""
    effect("start", key, ctx.attempt)
    while not ctx.draining:
        time.sleep(0.01)
    time.sleep(s)
    effect("done", key)
    return key


@svc.rpc(on_interrupt="retry", resource="vm")
async def held(ctx: Context, key: str, vm: str) -> str:
    return await until_go(ctx, key)


def numbers(after: int | None) -> Iterator[int]:
    """Each number after *after*, until the test says that it is enough."""
    at = -1 if after is None else after
    while not GO.exists():
        at += 1
        yield at


@svc.rpc
async def count(ctx: Context, key: str) -> None:
    async for i in ctx.steps(numbers):
        effect("step", key, i, ctx.attempt)
        await asyncio.sleep(0.01)


@svc.rpc
def count_in_thread(ctx: Context, key: str) -> None:
    for i in ctx.steps(numbers):
        effect("step", key, i, ctx.attempt)
        time.sleep(0.01)


@svc.rpc(timeout=2)
def timed_in_thread(ctx: Context, key: str) -> float | None:
    return ctx.time_left


@svc.rpc(on_interrupt="requeue")
async def fetched(ctx: Context, key: str) -> str:
    return await until_go(ctx, key)


@svc.rpc
async def leaves_a_thread(ctx: Context, key: str) -> None:
    """Can be cancelled, but the thread that it waits for goes on."""
    effect("start", key, ctx.attempt)
    await asyncio.to_thread(time.sleep, 60)


# -- ops, holds -------------------------------------------------------------------


@svc.ops
async def ping(ctx: Context) -> int:
    return os.getpid()


@svc.rpc
async def receive(ctx: Context, key: str, at_most: float) -> str:
    """Open a hold and return: nothing runs here until `received`."""
    await ctx.hold("transfer", key, at_most=at_most)
    return key


@svc.ops
async def received(ctx: Context, key: str) -> bool:
    return await ctx.end_hold("transfer", key)


# -- misbehaviour: all on one resource, for whose lease `take_over` waits ----------


@svc.rpc(resource="disk")
async def swallow(ctx: Context, disk: str) -> None:
    """Swallows every cancellation."""
    effect("start", disk, ctx.attempt, ctx.fence)
    while True:
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            effect("swallowed", disk)
        effect("beat", disk)


@svc.rpc(resource="disk")
def never_ends(ctx: Context, disk: str) -> None:
    """A thread that nobody can stop."""
    effect("start", disk, ctx.attempt, ctx.fence)
    while True:
        time.sleep(0.02)
        effect("beat", disk)


@svc.rpc(resource="disk")
async def block_loop(ctx: Context, disk: str) -> None:
    """Takes the event loop and never gives it back."""
    effect("start", disk, ctx.attempt, ctx.fence)
    while True:
        time.sleep(0.02)
        effect("beat", disk)


@svc.rpc
async def block_for(ctx: Context, key: str, s: float) -> str:
    """Takes the event loop for so many seconds."""
    time.sleep(s)
    return key


@svc.rpc(resource="disk")
async def compute(ctx: Context, disk: str) -> None:
    """Takes the event loop in C code that has let go of the interpreter's lock."""
    effect("start", disk, ctx.attempt, ctx.fence)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


@svc.rpc(resource="disk")
async def block_loop_with_alarm_of_its_own(ctx: Context, disk: str) -> None:
    """Takes SIGALRM for itself, as helpers for time-outs do, and blocks the event loop."""
    signal.signal(signal.SIGALRM, lambda *_: effect("alarm", disk))
    effect("start", disk, ctx.attempt, ctx.fence)
    while True:
        time.sleep(0.02)


@svc.rpc(resource="disk")
async def hold_interpreter(ctx: Context, disk: str) -> None:
    """In a drain, or when the test says so, enters a C call that keeps the interpreter's lock."""
    effect("start", disk, ctx.attempt, ctx.fence)
    while not (ctx.draining or GO.exists()):
        await asyncio.sleep(0.01)
    effect("beat", disk)
    ctypes.PyDLL(None).sleep(60)
    effect("beat", disk)


@svc.rpc
async def prints(ctx: Context) -> None:
    print("hello")  # noqa: T201 - as applications do


@svc.rpc
async def take_signals(ctx: Context, ignore: bool) -> None:
    """What a library may do that thinks the process is its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if ignore else lambda *_: effect("stolen", "-"))


@svc.rpc
async def terminate_child(ctx: Context) -> int:
    """How a child that a handler starts ends by SIGTERM."""
    child = await asyncio.create_subprocess_exec("sleep", "20")
    child.terminate()
    return await child.wait()


@svc.rpc(resource="disk", on_interrupt="retry")
async def take_over(ctx: Context, disk: str, pid: int) -> bool:
    """Tells whether process *pid* still lived when this one got the resource."""
    alive = is_alive(pid)
    effect("taken", disk, alive, ctx.fence)
    return alive


# -- forks, locks -----------------------------------------------------------------


@svc.rpc
async def touches_locks(ctx: Context, key: str, directory: str) -> int:
    """Opens and closes each lock file, as a backup does."""
    paths = list(Path(directory).glob("*.lock"))
    for path in paths:
        os.close(os.open(path, os.O_RDWR))
    effect("touched", key)
    return len(paths)


@svc.rpc
async def leaves_a_child(ctx: Context, key: str, how: str) -> int:
    """Starts a process that outlives this one, and says its pid."""
    pid = start_child(how)
    effect("child", key, pid)
    return pid


def start_child(how: str) -> int:
    if how == "fork":
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        return pid
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        return child.pid or 0
    popen = subprocess.Popen(["sleep", "60"], close_fds=False)
    return popen.pid


@svc.rpc
async def forks(ctx: Context, key: str, then: str) -> int:
    """Forks; the child does not leave by `os._exit`, as it should."""
    asyncio.get_running_loop().call_soon(effect, "ready", key)
    asyncio.get_running_loop().call_soon_threadsafe(effect, "woken", key)
    pid = os.fork()
    if pid:
        time.sleep(0.3)  # the child may take the wake-up first
        effect("child", key, pid)
        return pid
    match then:
        case "exits":
            sys.exit(3)
        case "raises":
            raise RuntimeError("in the child")
        case "awaits":
            await asyncio.sleep(0)
            effect("went_on", key)
    return 0


@svc.rpc
def forks_in_thread(ctx: Context, key: str) -> int:
    """The same in a worker thread: the child has that thread alone."""
    pid = os.fork()
    if pid:
        effect("child", key, pid)
    return pid


@svc.rpc(on_interrupt="retry", settle=0)
async def replaces_process(ctx: Context, key: str) -> None:
    """Replaces its process by another one of this service once, as a self-upgrade does."""
    effect("start", key, ctx.attempt)
    if ctx.attempt == 1:
        os.execv(sys.executable, [sys.executable, *sys.argv])


@svc.rpc
async def fills_disk(ctx: Context, key: str) -> None:
    """No file of this process may grow any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    effect("full", key)
    await asyncio.sleep(60)


def starve() -> None:
    """From here on, no thread of this process can be started."""
    threading.stack_size(1 << 46)  # bytes


@svc.rpc
async def starves(ctx: Context, key: str) -> None:
    """Use a thread of the loop's executor, and let no other be started after it."""
    await asyncio.to_thread(effect, "in_thread", key)
    starve()


# -- life -------------------------------------------------------------------------


@svc.on_start
async def _start() -> None:
    effect("on_start", "-")
    match os.environ.get(START):
        case "slow":
            await asyncio.sleep(60)
        case "fail":
            raise RuntimeError("the device is not there")


@svc.on_start
def _start_in_thread() -> None:
    if os.environ.get(START) == "thread":
        effect("in_thread", "-")
        time.sleep(60)


@svc.on_stop
async def _stop() -> None:
    effect("on_stop", "-")


if __name__ == "__main__":
    configure_logging("text", level=logging.DEBUG)
    if os.environ.get(START) == "starved":
        starve()
    if boot_id := os.environ.get(BOOT_ID):
        be_on_another_machine(boot_id)
    svc.run()
