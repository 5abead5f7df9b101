"""FastStream, from exec to the first message: an application with one subscriber, ends by TERM."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from faststream import FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from benchmarks.plain import note_moment, url_of


def main(directory: str, file: str) -> None:
    """Note the moment of the first message in *file*."""
    channel = Channel(prefetch_count=256)
    broker = RabbitBroker(url_of(Path(directory)), default_channel=channel, logger=None)

    async def work(vm: str, note: str) -> None:  # noqa: ARG001 - as sent
        note_moment(Path(file))

    broker.subscriber(RabbitQueue("first-faststream", durable=True))(work)
    asyncio.run(FastStream(broker, logger=None).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
