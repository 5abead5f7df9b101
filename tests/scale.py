"""How large a test is: quick by default, large under `make soak`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

SOAK_VARIABLE = "GRACEKIT_SOAK"


def scale(small: T, large: T) -> T:
    """*small* in a test run, *large* in a soak."""
    return large if os.environ.get(SOAK_VARIABLE) else small
