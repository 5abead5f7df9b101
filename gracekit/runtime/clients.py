"""The clients of one run, on its own transport: what handlers, hooks and jobs send requests by."""

from __future__ import annotations

from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.rpc.client import RpcClient
from gracekit.rpc.transport import Transport
from gracekit.service import Service


class Clients:
    """Clients by topic, each made when it is first asked for."""

    def __init__(
        self, transport: Transport, clock: Clock, settings: Settings, service: Service
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._settings = settings
        self._service = service
        self._clients: dict[str, RpcClient] = {}

    def of(self, topic: str | None) -> RpcClient:
        """The client of the service with that topic; None for this one.

        Raises:
            ConfigError: *topic* cannot be one.
        """
        own = self._service.topic
        topic = own if topic is None else topic
        client = self._clients.get(topic)
        if client is None:
            client = self._clients[topic] = RpcClient(
                self._transport,
                topic,
                ops_topic=self._settings.ops_topic_of(topic) if topic == own else None,
                exceptions=self._service.exceptions,
                clock=self._clock,
                max_body_bytes=self._settings.max_body_bytes,
            )
        return client

    async def stop(self) -> None:
        """End the calls that still wait."""
        for client in self._clients.values():
            await client.stop()
