"""Brokers for tests: one to share, with a virtual host for each test, and one to maltreat.

A worker of pytest starts each when the first test asks for it, and closes it in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.rabbit.broker import Broker
from tests.rabbit.certificates import Certificates, make_certificates


class Spare:
    """Starts a broker when it is wanted, and another when that one is beyond help."""

    def __init__(self, make: Callable[[], Broker]) -> None:
        self._make = make
        self._broker: Broker | None = None

    def get(self) -> Broker:
        if self._broker is None:
            self._broker = self._make()
            self._broker.start()
        return self._broker

    def heal(self) -> None:
        assert self._broker is not None
        try:
            self._broker.heal()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._broker is not None:
            self._broker.close()
            self._broker = None


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Not to be killed, frozen or alarmed: many tests live on it, in virtual hosts."""
    broker = Broker(tmp_path_factory.mktemp("rabbit-shared"))
    with contextlib.closing(broker):
        broker.start()
        yield broker


@pytest.fixture
def rabbit_vhost(shared_broker: Broker) -> Iterator[str]:
    """The name of a fresh virtual host on the shared broker."""
    name = shared_broker.fresh_vhost()
    yield name
    shared_broker.delete_vhost(name)


@pytest.fixture
def rabbit_url(shared_broker: Broker, rabbit_vhost: str) -> str:
    """Where a client finds it."""
    return shared_broker.url_of(rabbit_vhost)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Good ones and bad ones; made once, as keys take time."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def _spare_broker(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Spare]:
    make = lambda: Broker(tmp_path_factory.mktemp("rabbit-own"), tls=certificates.good)  # noqa: E731
    with contextlib.closing(Spare(make)) as spare:
        yield spare


@pytest.fixture
def own_broker(_spare_broker: Spare) -> Iterator[Broker]:
    """One that this test may kill, freeze and alarm; it serves TLS too.

    It was another test's before and is healed after each: only who kills it waits for a start.
    """
    yield _spare_broker.get()
    _spare_broker.heal()


@pytest.fixture
def own_vhost(own_broker: Broker) -> str:
    """The name of a fresh virtual host on it."""
    return own_broker.fresh_vhost()
