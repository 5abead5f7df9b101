"""The records and the backend of examples/shares, empty for each test that asks for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.shares import manager
from examples.shares.database import Database
from examples.shares.driver import DummyDriver
from tests.examples.shares_site import HOST


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """An empty one, which the manager uses."""
    found = Database(tmp_path / "shares.db")
    found.create()
    monkeypatch.setattr(manager, "database", found)
    monkeypatch.setattr(manager, "config", SimpleNamespace(host=HOST))
    return found


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DummyDriver:
    """An empty one, which the manager uses."""
    found = DummyDriver(tmp_path / "backend")
    monkeypatch.setattr(manager, "driver", found)
    return found
