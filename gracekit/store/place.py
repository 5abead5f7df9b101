"""Where a store is; `store.location` opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gracekit.config.urls import UrlKind, absolute, file_of, kind_of, shown_url


class StorePlace:
    """Where a store is. This class imports no engine.

    Attributes:
        url: Its URL without secrets, for messages.
        name: Its absolute path as text; None for a store in memory. The transport keeps a mark of
            the store's epoch under this name, which shows when an older copy is put back.
        path: Its absolute path; None for a store in memory.
        run_directory: The directory of its runs' locks, doors and wake-up pipes; None for a store
            in memory, which no other process can open.
    """

    def __init__(self, url: str) -> None:
        self.url: Final = shown_url(url)
        self.path: Final[Path | None] = (
            None if kind_of(url) is UrlKind.MEMORY else absolute(file_of(url))
        )
        self.name: Final = None if self.path is None else str(self.path)
        self.run_directory: Final[Path | None] = (
            None if self.path is None else self.path.with_name(f"{self.path.name}-runs")
        )
