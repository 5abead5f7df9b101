"""Names of a run's files in the run directory of its store."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

DOOR_SUFFIX: Final = ".sock"
_LONGEST_NAME: Final = 200


def instance_lock_name(service: str, instance: str) -> str:
    """Name of the file whose lock prevents a second run of the instance.

    Names of services and instances may have characters that a file name cannot
    have, which are percent-encoded. A name that is too long ends in a digest.
    """
    name = f"{quote(service, safe='')}@{quote(instance, safe='')}"
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest)]}%-{digest}"  # `quote` writes no "%-"
    return f"{name}.lock"


def door_name(run_id: str) -> str:
    """Name of the socket by which operators send verbs to a run; see `control.door`."""
    return f"{run_id}{DOOR_SUFFIX}"


def crash_name(run_id: str) -> str:
    """Name of the file into which faulthandler writes what crashed."""
    return f"{run_id}.crash"


def lock_name(run_id: str) -> str:
    """Name of the file whose lock proves that a run lives."""
    return f"{run_id}.lock"
