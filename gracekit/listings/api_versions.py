"""The API versions of listed tasks: 1.0 does not have the state PENDING, 1.1 does.

A request without a version means 1.0, so that older clients get only states that they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gracekit.journal.pending import as_errored

V1_0: Final = "1.0"
V1_1: Final = "1.1"
API_VERSIONS: Final = (V1_0, V1_1)
OF_PARKING: Final = ("parkings", "parked_at", "pending_deadline", "requested")
"""Fields of a task that 1.1 has and 1.0 has not."""


def as_version(shown: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The columns of a task in API *version*."""
    if version != V1_0:
        return dict(shown)
    return {name: value for name, value in as_errored(shown).items() if name not in OF_PARKING}
