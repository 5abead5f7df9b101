"""From a URL to a transport, and what is wrong with a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit.clock import Clock
from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Transport


def opened(url: str, broker: MemoryBroker | None = None) -> Transport:
    return open_transport(url, process=Process(), clock=Clock(), broker=broker)


def test_a_sqlite_url_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three slashes are relative to the working directory, four are absolute."""
    monkeypatch.chdir(tmp_path)

    relative, absolute = opened("sqlite:///a/b.db"), opened("sqlite:////var/b.db")

    assert isinstance(relative, SqliteTransport)
    assert isinstance(absolute, SqliteTransport)
    assert (relative.path, absolute.path) == (tmp_path / "a/b.db", Path("/var/b.db"))


def test_a_memory_url_needs_its_broker():
    """Nothing in a URL can name an object: the broker is passed."""
    assert isinstance(opened("memory://", MemoryBroker()), MemoryTransport)
    with pytest.raises(ConfigError, match="pass broker="):
        opened("memory://")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqllite:///a.db", "did you mean sqlite"),
        ("redis://host", "its scheme is none of sqlite, amqp, amqps, rabbit, memory"),
        ("", "its scheme is none of"),
        ("sqlite://a.db", "write sqlite:///relative.db"),
        ("sqlite:///", "write sqlite:///relative.db"),
        ("memory://host", "no host"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy(url, said):
    """The error names what is possible."""
    with pytest.raises(ConfigError, match=said):
        opened(url, MemoryBroker())


def test_a_password_is_not_shown():
    """A URL's credentials do not reach errors and logs."""
    with pytest.raises(ConfigError) as refused:
        opened("nope://user:canary@host/x")

    assert "canary" not in str(refused.value)
