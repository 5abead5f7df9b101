"""Logging of the tests' own programs, as `gracekit run` sets it up."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

from gracekit.config.choices import LogFormat
from gracekit.telemetry.logs import logging_around


def configure_logging(
    log_format: LogFormat = "auto", *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send all logs of this process to *stream*, or to standard output."""
    with (
        contextlib.redirect_stdout(stream or sys.stdout),
        logging_around(log_format, level=level, overrides=True),
    ):
        pass
