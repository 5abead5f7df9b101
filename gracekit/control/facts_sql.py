"""What a run asks its store for probes and metrics."""

from __future__ import annotations

from typing import Final

from gracekit.store.open_rows import IS_OPEN

UNFINISHED: Final = f"""
SELECT state, count(*), min(accepted_at) FROM task WHERE service = ? AND {IS_OPEN} GROUP BY state"""
