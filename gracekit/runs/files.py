"""Names of a run's files in the run directory of its store."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

DOOR_SUFFIX: Final = ".sock"
_LONGEST_NAME: Final = 200


def instance_lock_name(service: str, instance: str) -> str:
    """Name of the file whose lock keeps a second run of the instance out.

    Names of services and instances hold what no file name may; `%40` stands
    for `@`, and a digest for the rest of what is too long.
    """
    name = f"{quote(service, safe='')}@{quote(instance, safe='')}"
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _LONGEST_NAME - len(digest)]}%-{digest}"  # `quote` writes no "%-"
    return f"{name}.lock"


def door_name(run_id: str) -> str:
    """Name of the socket by which operators ask a run; see `control.door`."""
    return f"{run_id}{DOOR_SUFFIX}"


def lock_name(run_id: str) -> str:
    """Name of the file whose lock proves the life of a run."""
    return f"{run_id}.lock"
