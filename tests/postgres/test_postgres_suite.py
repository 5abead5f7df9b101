"""The engine of PostgreSQL keeps every promise of an engine whose store hosts share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Final

import pytest

from gracekit.process import Process
from gracekit.store.engine import Engine
from gracekit.store.postgres.postgres_engine import PostgresEngine
from tests.postgres.kit import KV
from tests.rabbit.proxy import Proxy
from tests.store.engine_suite import SharedEngineSuite
from tests.store.postgres import Postgres

pytestmark = pytest.mark.server

_NUMBERS: Final = itertools.count()


@pytest.fixture(scope="module")
def proxy(postgres: Postgres):
    """The way to the server."""
    with Proxy(postgres.port) as proxy:
        yield proxy


class TestPostgresEngine(SharedEngineSuite):
    """Over a wire that is cut and refused."""

    @pytest.fixture(autouse=True)
    def _place(self, postgres: Postgres, proxy: Proxy):
        self.proxy = proxy
        self.url = postgres.url(port=proxy.port)
        yield
        proxy.heal()

    def make(self, migrations: Sequence[str], process: Process) -> Engine:
        schema = f"suite_{next(_NUMBERS)}"
        return PostgresEngine(self.url, schema, process=process, migrations=KV)

    async def disconnect(self, engine: Engine) -> None:
        await asyncio.to_thread(self.proxy.refuse)
        await asyncio.to_thread(self.proxy.cut)

    async def reconnect(self, engine: Engine) -> None:
        await asyncio.to_thread(self.proxy.heal)

    async def fence(self, engine: Engine) -> None:
        engine.guard("SELECT 1 WHERE 1 = ?", 0)

    @contextlib.asynccontextmanager
    async def opened(self, process: Process | None = None) -> AsyncIterator[Engine]:
        async with super().opened(process) as engine:
            engine.guard("SELECT 1 WHERE 1 = ?", 1)
            yield engine
