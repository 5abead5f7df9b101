"""The versions in which tasks are shown: 1.0 knows no PENDING, 1.1 does.

A request without a version is of 1.0, so that a client of before gets the states that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gracekit.journal.pending import as_errored

V1_0: Final = "1.0"
V1_1: Final = "1.1"
API_VERSIONS: Final = (V1_0, V1_1)
OF_PARKING: Final = ("parkings", "parked_at", "pending_deadline", "requested")
"""What 1.1 shows of a task beside the fields of 1.0."""


def as_version(shown: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The columns of a task as clients of *version* know them."""
    if version != V1_0:
        return dict(shown)
    return {name: value for name, value in as_errored(shown).items() if name not in OF_PARKING}
