"""A machine with a systemd of its own, for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.kit import Shop
from tests.systemd.machine import HERE, Machine, what_is_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session")
def _can_have_systemd() -> None:
    """Fail the tests if a part is missing: skipped tests would look as if they had passed."""
    if missing := what_is_missing():
        pytest.fail(missing)


@pytest.fixture
def machine(_can_have_systemd: None) -> Iterator[Machine]:
    """A directory outside of `tmp_path`, whose parents the services' user may not enter."""
    directory = Path(tempfile.mkdtemp(prefix="gracekit-systemd-"))
    try:
        with Machine(directory).running() as made:
            yield made
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def shop(machine: Machine) -> Shop:
    """The service with its unit loaded, but not started."""
    return Shop(machine)
