"""Notifications in oslo.messaging's wire format: events that a service publishes for any reader.

    {"oslo.version":"2.0","oslo.message":"<JSON text of the notification>"}

This is oslo's format `messagingv2`. A notification goes to the queue
`<topic>.<priority in lower case>`, which its publisher declares.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gracekit.errors import BadMessageError
from gracekit.rpc.envelope import (
    MAX_BODY_BYTES,
    context_in,
    enveloped,
    name_in,
    object_in,
    open_message,
    put_context,
    required_in,
)
from gracekit.rpc.message import JsonObject
from gracekit.rpc.plain import plain

PRIORITIES: Final = ("audit", "debug", "info", "warn", "error", "critical", "sample")
"""oslo.messaging's priorities, with which the names of notification queues end."""


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """One notification.

    Attributes:
        message_id: The same at each delivery, so that readers can ignore repetitions.
        publisher_id: `service.host`; empty if the publisher gave none.
        event_type: Such as `task.update`.
        priority: In capitals: `INFO`, `ERROR`, ...
        payload: Plain JSON data.
        timestamp: UTC, as oslo.messaging writes it: `2026-11-25 03:54:31.123456`.
        context: The context of the request behind it; it may hold secrets and is never logged.
    """

    message_id: str
    publisher_id: str
    event_type: str
    priority: str
    payload: dict[str, Any]
    timestamp: str
    context: Mapping[str, Any] = msgspec.field(default_factory=dict)


def timestamp_of(wall: float) -> str:
    """A wall time in seconds, in the format of notifications."""
    moment = dt.datetime.fromtimestamp(wall, dt.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S.%f}"


def encode_notification(notification: Notification, *, unique_id: str) -> bytes:
    """Write a notification.

    Args:
        notification: The notification to write.
        unique_id: New for each send, as oslo.messaging's readers drop a repeated id.

    Raises:
        UnserialisableError: payload or context is no plain data.
    """
    message: JsonObject = {
        "message_id": notification.message_id,
        "publisher_id": notification.publisher_id,
        "event_type": notification.event_type,
        "priority": notification.priority,
        "payload": plain(notification.payload, "payload"),
        "timestamp": notification.timestamp,
        "_unique_id": unique_id,
    }
    put_context(message, notification.context)
    return enveloped(message, f"notification {notification.event_type}")


def decode_notification(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> Notification:
    """Read a notification, in oslo's format 2.0 or in 1.0, which has no envelope.

    Only `publisher_id` may be missing or null, as in messages of an oslo notifier without one.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: it is no notification.
    """
    message = open_message(body, max_bytes=max_bytes)
    if "payload" not in message:  # `object_in` would return an empty one
        raise BadMessageError("message has no payload")
    return Notification(
        message_id=required_in(message, "message_id"),
        publisher_id=name_in(message, "publisher_id") or "",
        event_type=required_in(message, "event_type"),
        priority=required_in(message, "priority"),
        payload=object_in(message, "payload"),
        timestamp=required_in(message, "timestamp"),
        context=context_in(message),
    )
