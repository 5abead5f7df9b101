"""`gracekit lease run`: holds a lease for as long as a command runs.

The command must not outlive its hold, so it dies with this process, the keeper: with any end of the
keeper, as by the kernel's timer (`end_timer`). As root all that the command has started dies, too:
it is in a pid namespace of its own, whose process 1 is `lease_init`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from gracekit.cli import lease_init
from gracekit.cli.main import end, tell
from gracekit.cli.options import CommonOptions, common, need_duration
from gracekit.config.settings import Settings
from gracekit.end_timer import die_with_me
from gracekit.errors import InvalidArgumentsError, LeaseHeld, StoreError
from gracekit.exits import ExitCode
from gracekit.leases.declarations import shown
from gracekit.leases.leases import Resource
from gracekit.leasing import HeldLease, Leases
from gracekit.listings.lease_list import why_held
from gracekit.process import Process
from gracekit.rpc.argument_paths import need_resource_id

TOKEN_VARIABLE: Final = "GRACEKIT_LEASE_TOKEN"
NOTICED_S: Final = 2.0
"""A loss is noticed a second late at most; the other one is for the end after SIGKILL."""
LEAVE_S: Final = 10.0
"""Without its store, this process ends after that; others get the lease when it counts as dead."""
_CLONE_NEWPID: Final = 0x20000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def read_name(_ctx: click.Context, _parameter: click.Parameter, given: str | None) -> Any:
    """Kind and id of `KIND:ID`."""
    if given is None:
        return None
    kind, _, name = given.partition(":")
    try:
        return need_resource_id(kind, "kind of lease"), need_resource_id(name, kind)
    except InvalidArgumentsError as error:
        raise click.BadParameter(f"{error}; write KIND:ID, such as vm:vm-1") from error


name_argument: Final = click.argument("resource", metavar="KIND:ID", callback=read_name)


@click.command()
@name_argument
@click.argument("command", metavar="-- CMD ...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--wait",
    metavar="DURATION",
    callback=need_duration,
    help="So long for a lease that is held.  [default: do not wait]",
)
@common
def run(
    options: CommonOptions, /, *, resource: Resource, command: tuple[str, ...], wait: str | None
) -> None:
    """Hold a lease while CMD runs, and end as CMD ends.

    CMD finds the token in GRACEKIT_LEASE_TOKEN. If the lease is lost, CMD gets
    SIGTERM, and SIGKILL before another one can get the lease. It dies with this
    command; as root, all that it has started does. SIGTERM, SIGINT and SIGHUP are
    passed on to CMD.

    Exit status: that of CMD, or 128 and the number of the signal that has ended
    it; 75 if the lease is held.
    """
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"no program {command[0]!r} is found: give its path")
    try:
        code = asyncio.run(_keep(options.settings, resource, command, wait))
    except LeaseHeld as error:
        end(str(error), ExitCode.HANDED_OVER)
    click.get_current_context().exit(code)


async def _keep(
    settings: Settings, resource: Resource, command: tuple[str, ...], wait: str | None
) -> int:
    """Returns the exit code, as a shell would say it."""
    times = settings.timings
    async with Leases(settings=settings) as leases, contextlib.AsyncExitStack() as stack:
        if wait is not None:
            await _tell_who_has_it(leases, resource, wait)
        held = await stack.enter_async_context(leases.hold(*resource, wait=wait))
        process = _start(command, held.token)
        for number in lease_init.PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                asyncio.get_running_loop().add_signal_handler(number, process.send_signal, number)
        code = await _watch(process, held, times.hard_s - times.fail_s - NOTICED_S)
        code = code if code >= 0 else 128 - code
        Process().exit_within(LEAVE_S, code)
    return code


async def _tell_who_has_it(leases: Leases, resource: Resource, wait: str) -> None:
    with contextlib.suppress(StoreError):  # while the store is away, it is waited for as well
        if (info := await leases.status(*resource)).holder is not None:
            tell(f"{why_held(info)}: waiting for up to {wait}", prefix="")


async def _watch(process: subprocess.Popen[bytes], held: HeldLease, grace_s: float) -> int:
    """Wait for its end; if the lease is lost, it has *grace_s* for that."""
    ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
    lost = asyncio.ensure_future(held.lost.wait())
    try:
        await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            tell(f"lease {shown(held.resource)} is lost: {held.why_lost}", prefix="")
            process.terminate()
            await asyncio.wait({ended}, timeout=max(0.5, grace_s))
    finally:
        lost.cancel()
        if not ended.done():
            process.kill()
            await asyncio.wait({ended})
    return ended.result()


def _start(command: tuple[str, ...], token: int) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; if the kernel permits it, in a pid namespace too."""
    words, keeper_lives = list(command), os.pipe()
    with Path("/proc/thread-self/ns/pid").open("rb") as own:
        # For the next child of this thread. Until it is undone, this thread can start no thread.
        is_apart = _LIBC.unshare(_CLONE_NEWPID) == 0
        if is_apart:
            words = [sys.executable, "-I", lease_init.__file__, str(keeper_lives[0]), *words]
        try:
            return subprocess.Popen(  # noqa: S603 - what the user wants to run
                words,
                env=os.environ | {TOKEN_VARIABLE: str(token)},
                start_new_session=True,
                preexec_fn=_begin_apart if is_apart else die_with_me,  # noqa: PLW1509 - no lock
                pass_fds=keeper_lives[:1] if is_apart else (),
            )
        finally:
            if is_apart:
                _LIBC.setns(own.fileno(), _CLONE_NEWPID)
            os.close(keeper_lives[0])


def _begin_apart() -> None:
    """In the new process 1: signals that come before it listens wait; the kernel drops others."""
    signal.pthread_sigmask(signal.SIG_BLOCK, lease_init.PASSED_ON)
    die_with_me()
