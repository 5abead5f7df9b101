"""oslo.messaging's own RPC tests against gracekit: where their bodies notice a difference."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from tests.oslo.kit import ROOT, oslo_python
from tests.rabbit.broker import Broker
from tests.scale import scale

TIMEOUT_S: Final = 3600
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(TIMEOUT_S),
    pytest.mark.skipif(scale(True, False), reason="a quarter of an hour: a part of `make soak`"),
]

RPC: Final = "TestRPCServer.test_"
CALL: Final = "CallTestCase.test_"
OBJECT: Final = "it looks into the library's server object"

# Of their own server and client, over RabbitMQ and without eventlet.
CROSSED: Final[Mapping[str, str]] = {
    f"TestMultipleServers.test_multiple_servers({scenario})": "fanouts of one topic in two "
    "control exchanges cross over"
    for scenario in (
        "diff_exchange,same_topic,diff_server,fanout,cast,one_endpoint",
        "diff_exchange,same_topic,diff_server,fanout,cast,two_endpoints",
    )
}
MADE_FOR_FAKE: Final[Mapping[str, str]] = {
    f"{RPC}constructor": "over RabbitMQ a server's `conf` is a proxy",
    f"{RPC}constructor_with_eventlet_executor": "the same",
}
WITH_TRACEBACK: Final[Mapping[str, str]] = {
    f"{RPC}failure": "over RabbitMQ str() of an error ends with its traceback",
    f"{RPC}expected_failure": "the same",
}
EXPECTED: Final[Mapping[tuple[str, str], Mapping[str, str]]] = MappingProxyType(
    {
        ("oslo", "functional"): {},
        ("oslo", "server"): {**CROSSED, **MADE_FOR_FAKE, **WITH_TRACEBACK},
        ("server", "functional"): {},
        ("server", "server"): {
            **CROSSED,
            **MADE_FOR_FAKE,
            **WITH_TRACEBACK,
            f"{RPC}constructor_with_unrecognized_executor": "there are no executors",
            f"{RPC}unknown_executor": "there are no executors",
            f"{RPC}no_server_topic": "a service without a topic cannot be declared",
            f"{RPC}no_target_server": "a server without a name has the machine's",
            f"{RPC}server_wait_method": OBJECT,
            f"{RPC}warning_when_notifier_transport": OBJECT,
        },
        ("client", "functional"): {
            f"{CALL}endpoint_version_namespace": "refusals are gracekit's UnsupportedVersionError",
            f"{CALL}mandatory_call": "a topic that nobody serves is Undeliverable at once",
            f"{CALL}timeout": "the same",
        },
        ("client", "server"): {
            **CROSSED,
            **MADE_FOR_FAKE,
            f"{RPC}no_client_topic_call": "a client without a topic cannot be made",
            f"{RPC}no_client_topic_cast": "the same",
        },
    }
)
"""By what is replaced, and by suite, the tests that fail, and why."""


@pytest.mark.parametrize(("what", "suite"), EXPECTED)
def test_their_tests_notice_what_is_known(
    shared_broker: Broker, tmp_path: Path, what: str, suite: str
):
    """With our servers, and with our clients, each passes but for those that are on the list. With
    none replaced those fail that are about another broker.
    """
    expected = EXPECTED[what, suite].keys()
    ends = run_on(shared_broker, what, suite, tmp_path / "first")
    noticed = {name: end for name, end in ends.items() if end}
    for turn in ("second", "third"):  # theirs wait for a second or two, which a busy machine takes
        if noticed.keys() != expected:
            again = run_on(shared_broker, what, suite, tmp_path / turn)
            noticed = {name: end for name, end in noticed.items() if again[name]}

    assert noticed.keys() == expected, noticed
    assert len(ends) == {"functional": 13, "server": 55}[suite]


def run_on(broker: Broker, what: str, suite: str, folder: Path) -> dict[str, str]:
    """As `run`, each test in a virtual host of its own."""
    folder.mkdir()
    vhosts = [broker.fresh_vhost() for _ in range(60)]
    try:
        return run(what, suite, folder, [broker.url_of(vhost) for vhost in vhosts])
    finally:
        for vhost in vhosts:
            broker.delete_vhost(vhost)


def run(what: str, suite: str, folder: Path, urls: list[str]) -> dict[str, str]:
    """How each test ended, by name; empty if well."""
    answer = subprocess.run(
        [oslo_python(), "-m", "tests.oslo.suites", what, suite, folder],
        cwd=ROOT,
        input="\n".join(urls) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    ends: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return ends
