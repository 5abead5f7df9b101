"""Notifications in the oslo.messaging wire: what a service says to whoever listens.

    {"oslo.version":"2.0","oslo.message":"<JSON text of the notification>"}

Their queue is named `<topic>.<priority in lower case>`, and their publisher
makes it (oslo's format `messagingv2`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import msgspec

from gracekit.rpc.oslo_wire import enveloped
from gracekit.rpc.plain import plain


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """One notification.

    Attributes:
        message_id: The same each time that it is sent.
        publisher_id: `service.host`.
        event_type: Such as `task.update`.
        priority: In capitals: `INFO`, `ERROR`, ...
        payload: Plain JSON data.
        timestamp: UTC, as oslo.messaging writes it: `2026-11-25 03:54:31.123456`.
        context: Of the request that it comes from.
    """

    message_id: str
    publisher_id: str
    event_type: str
    priority: str
    payload: dict[str, Any]
    timestamp: str
    context: Mapping[str, Any] = msgspec.field(default_factory=dict)


def timestamp_of(wall: float) -> str:
    """A wall time as notifications have it."""
    moment = dt.datetime.fromtimestamp(wall, dt.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S.%f}"


def encode_notification(notification: Notification, *, unique_id: str) -> bytes:
    """Write a notification.

    Raises:
        UnserialisableError: payload or context is no plain data.
    """
    message: dict[str, Any] = {
        "message_id": notification.message_id,
        "publisher_id": notification.publisher_id,
        "event_type": notification.event_type,
        "priority": notification.priority,
        "payload": plain(notification.payload, "payload"),
        "timestamp": notification.timestamp,
        "_unique_id": unique_id,
    }
    for key, value in notification.context.items():
        message[f"_context_{key}"] = plain(value, f"context.{key}")
    return enveloped(message, f"notification {notification.event_type}")
