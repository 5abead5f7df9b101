"""A program with two Runtimes, and a meter provider of its own that it sets once both run."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from gracekit import Context, RpcClient, Runtime, Service, Settings
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport

Callback = Callable[[CallbackOptions], Iterable[Observation]]

gauges: dict[str, Callback] = {}
sums: dict[str, float] = {}
made: list[str] = []


class Count(metrics.NoOpCounter):
    def __init__(self, name: str, *rest: Any, **more: Any) -> None:
        super().__init__(name, *rest, **more)
        made.append(name)
        self._what = name

    def add(self, amount: float, *_: Any, **__: Any) -> None:
        sums[self._what] = sums.get(self._what, 0) + amount


class Meter(metrics.NoOpMeter):
    def create_counter(self, name: str, *rest: Any, **more: Any) -> Any:
        return Count(name, *rest, **more)

    def create_histogram(self, name: str, *rest: Any, **more: Any) -> Any:
        made.append(name)
        return super().create_histogram(name, *rest, **more)

    def create_observable_gauge(self, name: str, callbacks: Any = None, *_: Any, **__: Any) -> Any:
        made.append(name)
        (gauges[name],) = callbacks


class Provider(metrics.MeterProvider):
    def get_meter(self, name: str, *rest: Any, **more: Any) -> metrics.Meter:
        return Meter(name)


def asked(name: str) -> list[Any]:
    """What a gauge says, without what there is none of."""
    seen = gauges[name](CallbackOptions())
    return sorted(([one.value, dict(one.attributes or {})] for one in seen if one.value), key=str)


def shop(go: asyncio.Event, entered: asyncio.Semaphore) -> Service:
    svc = Service("shop")

    @svc.rpc
    async def work(ctx: Context) -> None:
        entered.release()
        await go.wait()

    return svc


async def main() -> None:
    told: dict[str, Any] = {}
    entered, going = asyncio.Semaphore(0), [asyncio.Event(), asyncio.Event()]
    settings = Settings(transport_url="memory://", store_url="memory://", look_every_s=0.01)
    runtimes = []
    for go in going:
        broker = MemoryBroker()
        runtimes.append(Runtime(shop(go, entered), settings, broker=broker))
        await runtimes[-1].__aenter__()
        transport = MemoryTransport(broker, Process())
        await transport.start()
        async with RpcClient(transport, "shop") as client:
            await client.cast("work")
        await entered.acquire()
    metrics.set_meter_provider(Provider())
    await asyncio.sleep(0.1)
    told["two run"] = asked("gracekit.tasks.in_flight")
    told["two are open"] = asked("gracekit.intake.open")
    going[0].set()
    await runtimes[0].__aexit__(None, None, None)
    del runtimes[0]
    gc.collect()
    told["one runs"] = asked("gracekit.tasks.in_flight")
    told["one is open"] = asked("gracekit.intake.open")
    told["finished"] = sums["gracekit.tasks.finished"]
    told["instruments"] = len(made)
    going[1].set()
    await runtimes[0].__aexit__(None, None, None)
    sys.stdout.write(json.dumps(told))


asyncio.run(main())
