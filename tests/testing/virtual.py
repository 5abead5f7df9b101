"""Tests of the test kit run as its users' do: plain functions around `run`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from gracekit.testing import run


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of virtual time; pytest sees a plain function."""

    @functools.wraps(test)
    def plain(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    plain.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    del plain.__wrapped__
    return plain
