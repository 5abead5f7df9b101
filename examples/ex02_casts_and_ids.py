"""02 - A cast returns when the request is safe, and its id makes sure that it runs once.

    python examples/ex02_casts_and_ids.py

A shop sends one order several times, because it cannot know whether the first
one arrived. All carry the id that the shop gave to the order, so the service
ships once and answers every later copy from its record, also after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile

from gracekit import ConflictingRequestError, Context, Runtime, Service

svc = Service("shop")
shipped: list[str] = []


@svc.rpc
async def ship(_ctx: Context, parcel: str) -> str:
    """Send a parcel; a second one would be a loss."""
    shipped.append(parcel)
    return f"{parcel}: parcel number {len(shipped)}"


async def main() -> None:
    """Order too often, change an order, and order while nobody is there."""
    async with svc.client("sqlite:///gracekit.db") as client:
        lamp = client.prepare(request_id="order-17")
        table = client.prepare(request_id="order-18")

        async with Runtime(svc):
            for _ in range(3):
                await lamp.cast(ship, parcel="a lamp")
            answer = await lamp.call(ship, parcel="a lamp")
            print(f"order-17 was sent 4 times; shipped: {shipped}; the answer: {answer}")
            try:
                await lamp.call(ship, parcel="a chair")
            except ConflictingRequestError:
                print("order-17 with other content is refused, and ships nothing")

        await table.cast(ship, parcel="a table")
        print(f"order-18 was cast while no service ran; shipped: {shipped}")

        async with Runtime(svc):
            answer = await table.call(ship, parcel="a table")
            print(f"the next service found it in the queue: {answer}")
            answer = await lamp.call(ship, parcel="a lamp")
            print(f"and still knows order-17: {answer}")
    print(f"shipped in all: {shipped}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
