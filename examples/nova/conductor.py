"""The conductor: boots a vm, sends it to another host, and shows where the vms are.

python -m examples.nova.conductor boot vm-1 src --pages 100
python -m examples.nova.conductor migrate vm-1 dst
python -m examples.nova.conductor resize vm-1 --pages 200
python -m examples.nova.conductor show
"""

from __future__ import annotations

import argparse
import asyncio
import os

from examples.nova.compute import CLOUD, ComputeManager, svc
from examples.nova.hypervisor import Hypervisor
from gracekit import Draining, RpcClient, Settings

TRANSPORT = os.environ.get("GRACEKIT_TRANSPORT_URL", "sqlite:///gracekit.db")


def connect() -> RpcClient:
    """A client of the hosts' services."""
    ops_topic = os.environ.get("GRACEKIT_OPS_TOPIC", "{topic}-ops")
    return svc.client(TRANSPORT, Settings(ops_topic=ops_topic))


def boot(vm: str, host: str, pages: int) -> None:
    """A new vm, without any service: it runs whether or not one does."""
    Hypervisor(CLOUD, host).boot(vm, pages)
    print(f"{vm} runs on {host}")


async def migrate(vm: str, dests: list[str]) -> None:
    """Ask the vm's host to move it, to the first of *dests* that is not draining."""
    source = Hypervisor(CLOUD, "").record(vm).host
    async with connect() as client:
        view = client.prepare(host=source, timeout="1h")
        for dest in dests:
            try:
                answer = await view.call(ComputeManager.live_migration, vm=vm, dest=dest)
            except Draining as error:
                print(error)
            else:
                print(f"{vm} runs on {answer}")
                return
    print(f"no host takes {vm}: it stays on {source}")


async def resize(vm: str, pages: int) -> None:
    """Ask the vm's host to give it more memory."""
    host = Hypervisor(CLOUD, "").record(vm).host
    async with connect() as client:
        view = client.prepare(host=host, timeout="1h")
        print(
            f"{vm} has {await view.call(ComputeManager.resize_instance, vm=vm, pages=pages)} pages"
        )


def show() -> None:
    """Where each vm is, and what each host has of it."""
    for path in sorted(CLOUD.glob("vms/*.json")):
        vm = path.stem
        record = Hypervisor(CLOUD, "").record(vm)
        going = f", going to {record.dest}" if record.dest else ""
        hosts = sorted(found.parent.name for found in CLOUD.glob("*/domains.jsonl"))
        states = [f"{host} {Hypervisor(CLOUD, host).state(vm)}" for host in hosts]
        print(f"{vm} is of {record.host}{going}: {', '.join(states)}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="conductor")
    commands = parser.add_subparsers(dest="command", required=True)
    booting = commands.add_parser("boot")
    booting.add_argument("vm")
    booting.add_argument("host")
    booting.add_argument("--pages", type=int, default=20)
    migrating = commands.add_parser("migrate")
    migrating.add_argument("vm")
    migrating.add_argument("dest", nargs="+", help="hosts, in the order in which they are asked")
    resizing = commands.add_parser("resize")
    resizing.add_argument("vm")
    resizing.add_argument("--pages", type=int, default=40)
    commands.add_parser("show")
    given = parser.parse_args()
    match given.command:
        case "boot":
            boot(given.vm, given.host, given.pages)
        case "migrate":
            asyncio.run(migrate(given.vm, given.dest))
        case "resize":
            asyncio.run(resize(given.vm, given.pages))
        case _:
            show()


if __name__ == "__main__":
    main()
