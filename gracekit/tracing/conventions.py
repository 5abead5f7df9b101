"""The names of attributes: those of OpenTelemetry's semantic conventions, and gracekit's own.

The conventions for RPC are a release candidate; those for messaging are in development and may
change. Only this module contains such names, so a new version is adopted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM: Final = "gracekit"

RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
ERROR_TYPE: Final = "error.type"
MESSAGING_SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
ROUTING_KEY: Final = "messaging.rabbitmq.destination.routing_key"
MESSAGE_ID: Final = "messaging.message.id"

ATTEMPT: Final = "gracekit.attempt"
CONTEXT: Final = "gracekit.context"
CUT: Final = "gracekit.cut"
OUTCOME: Final = "gracekit.outcome"
REASON: Final = "gracekit.reason"


class Messaging(msgspec.Struct, frozen=True):
    """The messaging system, for traces.

    Attributes:
        system: The broker's well-known name, or `gracekit`.
        exchange: The exchange of requests; None if there are only queues.
    """

    system: str
    exchange: str | None = None

    def destination(self, queue: str) -> Mapping[str, Any]:
        """The attributes of a message to *queue*, or to the topic of a fanout."""
        if self.exchange is None:
            return {MESSAGING_SYSTEM: self.system, DESTINATION: queue}
        return {MESSAGING_SYSTEM: self.system, DESTINATION: self.exchange, ROUTING_KEY: queue}


LOCAL_QUEUES: Final = Messaging(SYSTEM)
"""gracekit's own queues, in a file or in memory."""


def request_attributes(method: str, operation: str, message_id: str) -> dict[str, Any]:
    """The attributes of every span of a request."""
    return {
        RPC_SYSTEM: SYSTEM,
        RPC_METHOD: method,
        OPERATION_NAME: operation,
        MESSAGE_ID: message_id,
    }
