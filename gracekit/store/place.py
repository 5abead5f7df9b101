"""Where a store is, and what stands beside it; `store.location` opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gracekit.config.urls import UrlKind, file_of, kind_of, shown_url


class StorePlace:
    """Where a store is, and what stands beside it. Imports no engine.

    Attributes:
        url: As messages show it: without secrets.
        name: Its name on this machine, also in the marks that queues keep; None for one in
            memory.
        path: Its file, through no symbolic link of its directory; None for one in memory.
        run_directory: Where its runs have their locks, doors and wake-up pipes; None for one in
            memory, which no other process sees.
    """

    def __init__(self, url: str) -> None:
        self.url: Final = shown_url(url)
        self.path: Final[Path | None] = (
            None if kind_of(url) is UrlKind.MEMORY else file_of(url).absolute()
        )
        self.name: Final = None if self.path is None else str(self.path)
        self.run_directory: Final[Path | None] = (
            None if self.path is None else self.path.with_name(f"{self.path.name}-runs")
        )
