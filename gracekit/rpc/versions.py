"""Versions of interfaces: which version serves a request for which."""

from __future__ import annotations

import functools
from typing import Final


def major(version: str) -> int:
    """The number before the first dot; -1 if the text is no version."""
    return _parts(version)[0]


def _parts(version: str) -> tuple[int, ...]:
    try:
        parts = tuple(int(part) for part in version.split("."))
    except ValueError:
        return (-1,)
    return parts if len(parts) > 1 else (*parts, 0)


def serves(served: str, asked: str) -> bool:
    """Whether version *served* can answer a request for *asked*: same major, minor not lower."""
    # Cache only short versions, as any client can send any text: this bounds the cache's memory.
    return _short_serves(served, asked) if len(asked) <= _SHORT else _serves(served, asked)


def _serves(served: str, asked: str) -> bool:
    have, want = _parts(served), _parts(asked)
    return have[0] == want[0] >= 0 and _steps(want) <= _steps(have)


_SHORT: Final = 16
_short_serves: Final = functools.lru_cache(256)(_serves)


def _steps(parts: tuple[int, ...]) -> tuple[int, int]:
    """Minor version and revision; a missing revision is 0, and a fourth part is ignored."""
    minor, revision, *_ = (*parts[1:], 0, 0)
    return minor, revision
