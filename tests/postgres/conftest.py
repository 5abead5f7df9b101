"""Servers for the tests of this directory, and what makes engines on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.postgres.fleet import Fleet
from tests.postgres.kit import Site
from tests.rabbit.broker import Broker
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
    return f"test_{next(_NUMBERS)}"


@pytest.fixture
def site(postgres: Postgres, schema: str) -> Iterator[Site]:
    """The shared server, a schema of it, and a wire that can be cut."""
    with Site(postgres, schema) as site:
        yield site


@pytest.fixture
def fleet(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, postgres: Postgres, schema: str
) -> Iterator[Fleet]:
    """No host yet."""
    made = Fleet(tmp_path, shared_broker, rabbit_vhost, postgres, schema)
    yield made
    made.close()
