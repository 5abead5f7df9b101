"""The version of gracekit that is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """Of gracekit, as installed; `unknown` from a bare source tree."""
    try:
        return version("gracekit")
    except PackageNotFoundError:
        return "unknown"
