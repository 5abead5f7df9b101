"""The event loops on which a service may run, and the one that `--uvloop` has chosen."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

import pytest
import uvloop

LOOP_VARIABLE: Final = "GRACEKIT_LOOP"

LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def without_settings() -> dict[str, str]:
    """The environment of this process without gracekit's variables, but for the chosen loop."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == LOOP_VARIABLE or not name.startswith("GRACEKIT_")
    }


class OnUvloop:
    """Runs tests on uvloop, but those in virtual time, which is made of asyncio's own loop."""

    def pytest_asyncio_loop_factories(
        self, item: pytest.Item
    ) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
        """See pytest-asyncio."""
        name = "asyncio" if item.get_closest_marker("looptime") else "uvloop"
        return {name: LOOPS[name]}
