"""aiormq, from exec to the first message: a program that reads one queue, and ends by TERM.

With nothing but aiormq and what it loads: `benchmarks.brokered` loads gracekit as well.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiormq
from aiormq.abc import DeliveredMessage

from benchmarks.plain import note_moment, url_of


async def main(directory: str, note: str) -> None:
    """Note the moment of the first message in the file *note*."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with aiormq.connect(url_of(Path(directory))) as connection:
        channel = await connection.channel()
        await channel.queue_declare("first-aiormq", durable=True)
        await channel.basic_qos(prefetch_count=256)

        async def on_message(message: DeliveredMessage) -> None:
            json.loads(message.body)
            note_moment(Path(note))
            assert message.delivery_tag is not None
            await channel.basic_ack(message.delivery_tag)

        await channel.basic_consume("first-aiormq", on_message)
        await over.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
