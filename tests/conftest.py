"""What all tests share: peace between two plugins, and no need of a quiet machine."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.rabbit.fixtures import (  # brokers start when a test asks for one
    _spare_broker,
    certificates,
    own_broker,
    own_vhost,
    rabbit_url,
    rabbit_vhost,
    shared_broker,
)

__all__ = (
    "_spare_broker",
    "certificates",
    "own_broker",
    "own_vhost",
    "rabbit_url",
    "rabbit_vhost",
    "shared_broker",
)

# A busy machine makes an example slow, not wrong.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# Started in the background by a shell, we would hand an ignored INT on to every process that the
# tests start, and those that are to end by Ctrl-C would not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """
    looptime 0.9 asks pytest-asyncio's policy for a loop also before a sync test; the policy then
    makes one that nobody closes, and the ResourceWarning fails the run.
    """
    if not inspect.iscoroutinefunction(inspect.unwrap(pyfuncitem.obj)):
        pyfuncitem.funcargs.pop("event_loop_policy", None)
    return (yield)
