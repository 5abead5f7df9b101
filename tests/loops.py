"""The event loops on which a service may run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import uvloop

LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
