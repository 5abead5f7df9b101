"""Pages use one name for different files, and tests import them in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def forget_modules_of_pages(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What any test has imported from a directory of its own is not there for the next one."""
    place = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(sys, "path", sys.path[:])
    _forget_modules_in(place)
    yield
    _forget_modules_in(place)


def _forget_modules_in(place: Path) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and place in Path(file).parents:
            del sys.modules[name]
