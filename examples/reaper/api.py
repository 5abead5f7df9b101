"""The users' side: asks the scheduler for machines.

python -m examples.reaper.api build vm-1 --memory 4096
python -m examples.reaper.api build vm-2 --memory 4096 --preemptible
python -m examples.reaper.api delete vm-1
python -m examples.reaper.api show
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import os

from examples.reaper.scheduler import PreemptibleRefusedError, build, cloud, delete, svc
from gracekit import Parked, RpcClient


async def ask_for(client: RpcClient, vm: str, memory_mb: int, *, preemptible: bool = False) -> str:
    """Ask for a machine; says what became of the request."""
    user = client.prepare(context={"preemptible": preemptible}, pending=True)
    try:
        return await user.call(build, vm=vm, memory_mb=memory_mb)
    except Parked as parked:
        until = dt.datetime.fromtimestamp(parked.deadline).astimezone()
        return f"{vm} waits for room, until {until:%H:%M:%S} at the latest"
    except PreemptibleRefusedError as error:
        return f"{vm} is refused: {error}"


def show() -> None:
    """The machines, the oldest first, and those that were not built."""
    for machine in cloud.machines():
        kind = "preemptible" if machine.preemptible else "normal"
        print(f"{machine.vm} {machine.memory_mb} MiB {kind}")
    for vm, reason in cloud.failures().items():
        print(f"{vm} error: {reason}")


async def ask(given: argparse.Namespace) -> None:
    """Carry one command out."""
    url = os.environ.get("GRACEKIT_TRANSPORT_URL", "sqlite:///gracekit.db")
    async with svc.client(url) as client:
        if given.command == "delete":
            await client.call(delete, vm=given.vm)
        else:
            print(await ask_for(client, given.vm, given.memory, preemptible=given.preemptible))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="api")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    building = commands.add_parser("build")
    building.add_argument("vm")
    building.add_argument("--memory", type=int, default=1024, metavar="MIB")
    building.add_argument("--preemptible", action="store_true")
    commands.add_parser("delete").add_argument("vm")
    commands.add_parser("show")
    given = parser.parse_args()
    cloud.create()
    if given.command == "show":
        show()
    else:
        asyncio.run(ask(given))


if __name__ == "__main__":
    main()
