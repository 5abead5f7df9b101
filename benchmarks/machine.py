"""What was measured with what: versions, processors, and the cost of a flush to this disk."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Final

import apsw

FLUSHES: Final = 50


def describe(directory: Path) -> dict[str, str]:
    """Name and value of all that a reader must know beside the figures."""
    kernel = platform.release().partition("-")[0]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": f"{apsw.sqlite_lib_version()} (apsw {version('apsw')})",
        "msgspec": version("msgspec"),
        "aiormq": f"{version('aiormq')} (aio-pika {version('aio-pika')})",
        "system": f"{platform.system()} {kernel}, {os.cpu_count()} processors",
        "fdatasync of 4 KiB": f"{_flush_us(directory):.0f} us, median of {FLUSHES}",
        "load before": load,
    }


def _flush_us(directory: Path) -> float:
    taken = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(FLUSHES):
            file.write(bytes(4096))
            file.flush()
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(taken)
