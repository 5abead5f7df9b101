"""One server for the tests of this directory, and a schema of it for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import pytest

from tests.store.postgres import Postgres

_NUMBERS: Final = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Not to be killed, stopped or exhausted: many tests live on it, in their schemas."""
    with Postgres().running() as server:
        yield server


@pytest.fixture
def schema() -> str:
    """The name of a schema that no other test uses."""
    return f"test {next(_NUMBERS)}"
