"""Imports the named blocks of a page in the process of the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import Page


def load(directory: Path, name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import the file *name*`.py` of *directory* until the end of the test.

    Modules that it imports are to be loaded before: pages use one name for different files.
    """
    spec = importlib.util.spec_from_file_location(name, directory / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def make_importable(page: Page, directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the named blocks of *page*; until the end of the test they can be imported."""
    page.write_to(directory)
    patch.syspath_prepend(str(directory))
    for file in page.files:  # pages use one name for different files
        name = Path(file).stem
        patch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
