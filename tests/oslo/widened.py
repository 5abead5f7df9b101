"""The peer of `peer.py` with odd values, and with gracekit serving the same endpoints beside.

    OS_DEFAULT__TRANSPORT_URL=rabbit://… python -m tests.oslo.widened

An argument `{"odd": "tuple"}` of a command is sent as the value of that name.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Mapping
from typing import Any

from gracekit import Runtime, Service, Settings
from tests.oslo import peer
from tests.oslo.values import VALUES

Data = Mapping[str, Any]


class Endpoint(peer.Endpoint):
    """Returns odd values too."""

    def give(self, ctxt: Any, value: str) -> Any:
        """A value by its name."""
        return VALUES[value]

    def fail_as(self, ctxt: Any, name: str, args: list[Any]) -> None:
        """Raise a builtin exception."""
        raise getattr(builtins, name)(*args)


class Peer(peer.Peer):
    """Sends odd values, and can serve by gracekit."""

    def call(self, target: Data, options: Data, ctxt: Data, method: str, args: Data) -> Any:
        return super().call(target, options, ctxt, method, _meant(args))

    def cast(self, target: Data, options: Data, ctxt: Data, method: str, args: Data) -> None:
        super().cast(target, options, ctxt, method, _meant(args))

    def adapt(self, topic: str, endpoints: Mapping[str, Data], settings: Data) -> None:
        """Serve the same endpoints by gracekit's adapter; ready when it returns."""
        from gracekit.rpc.oslo_adapter import include_endpoints  # threads must be chosen before

        svc = Service(topic)
        include_endpoints(svc, [Endpoint(name, self, place) for name, place in endpoints.items()])
        ready = threading.Event()
        threading.Thread(
            target=lambda: asyncio.run(_serve(svc, Settings(**settings), ready)), daemon=True
        ).start()
        assert ready.wait(20), "see the log"


async def _serve(svc: Service, settings: Settings, ready: threading.Event) -> None:
    async with Runtime(svc, settings) as runtime:
        ready.set()
        await runtime.serve()


def _meant(args: Data) -> dict[str, Any]:
    return {
        name: VALUES[value["odd"]] if isinstance(value, dict) and value.keys() == {"odd"} else value
        for name, value in args.items()
    }


if __name__ == "__main__":
    peer.Endpoint, peer.Peer = Endpoint, Peer  # type: ignore[misc]
    peer.COMMANDS = (*peer.COMMANDS, "adapt")  # type: ignore[misc]
    peer.main()
