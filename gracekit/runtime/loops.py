"""The event loop of a process that runs one service: asyncio's own, or uvloop (extra `uvloop`)."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable
from typing import Any, Final

from gracekit.config.settings import Settings
from gracekit.errors import ConfigError

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

OLDEST_UVLOOP: Final = (0, 21)
"""The extra in pyproject.toml has it too."""
_REMEDY: Final = "pip install 'gracekit[uvloop]', or set GRACEKIT_LOOP=asyncio"


def loop_factory(settings: Settings) -> LoopFactory | None:
    """Makes the loop that the setting `loop` names; None for asyncio's own.

    Raises:
        ConfigError: it is `uvloop`, which cannot be used here.
    """
    if settings.loop == "asyncio":
        return None
    try:
        return _uvloop().new_event_loop  # type: ignore[no-any-return]
    except ConfigError:
        if settings.loop == "auto":
            return None
        raise


def running_loop_name() -> str:
    """Name of the package that the running loop comes from, such as `asyncio` or `uvloop`."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def _uvloop() -> Any:
    """The package, if it can be used here; raises ConfigError if it cannot."""
    try:
        package = importlib.import_module("uvloop")
    except Exception as error:  # whatever a broken package raises when it is loaded
        why = str(error).replace(";", ",")  # the remedy begins at the first semicolon
        raise ConfigError(
            f"loop = uvloop needs the package uvloop, which cannot be imported here ({why}); "
            f"{_REMEDY}"
        ) from error
    if tuple(map(int, re.findall(r"\d+", package.__version__)[:2])) < OLDEST_UVLOOP:
        least = ".".join(map(str, OLDEST_UVLOOP))
        raise ConfigError(
            f"loop = uvloop needs uvloop {least} or newer, and {package.__version__} is installed; "
            f"{_REMEDY}"
        )
    return package
