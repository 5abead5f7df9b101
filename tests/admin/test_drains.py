"""Probes of real processes that are stopped by a signal, asked in a loop until they are gone."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.admin.kit import PATIENCE_S, connection_to
from tests.cli.kit import Running, gracekit, write_service
from tests.scale import scale

pytestmark = pytest.mark.process

SEEN_S: Final = 0.1
"""After a signal readiness fails within this time."""
SLACK_S: Final = 0.4
"""Seconds that a busy machine may add to it."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@dataclass
class Curl:
    """Asks one path again and again, each time by a new connection, until the process is gone."""

    address: str
    path: str
    pid: int
    answers: list[tuple[float, int]] = field(default_factory=list)
    refused_early: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def _ask_on(self) -> None:
        while True:
            began = time.monotonic()
            connection = connection_to(self.address)
            try:
                connection.request("GET", self.path)
                self.answers.append((began, connection.getresponse().status))
            except (ConnectionRefusedError, FileNotFoundError):
                if not self._is_gone():
                    self.refused_early.append(began)
                return
            except (OSError, http.client.HTTPException):
                self.cut.append(began)
            finally:
                connection.close()
            time.sleep(0.005)

    def _is_gone(self) -> bool:
        """Whether the process has ended, or is being taken down by the kernel right now."""
        for _ in range(20):
            try:
                stat = Path(f"/proc/{self.pid}/stat").read_text()
            except OSError:
                return True
            if stat.rpartition(")")[2].split()[0] in {"Z", "X"}:
                return True
            time.sleep(0.005)
        return False

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_probes_answer_until_the_process_is_gone(tmp_path: Path, kind: str):
    """Readiness fails at once and for good; liveness passes to the end; until then no connection
    is refused.
    The file of a unix socket outlives the process, and the next start replaces it.
    """
    write_service(tmp_path)
    for _ in range(scale(3, 20)):
        address = f"127.0.0.1:{free_port()}" if kind == "tcp" else f"unix:{tmp_path}/admin.sock"
        with Running(tmp_path, GRACEKIT_ADMIN=address) as run:
            pid = run.process.pid
            asked: dict[str, Any] = {p: Curl(address, p, pid) for p in ("/livez", "/readyz")}
            gracekit(tmp_path, "cast", "compute", "work", "vm=vm-1")
            run.wait_line("at work")
            run.process.send_signal(signal.SIGTERM)
            stopped_at = time.monotonic()
            time.sleep(SEEN_S + SLACK_S)  # the drain waits for the task meanwhile
            gracekit(tmp_path, "call", "compute", "release", "--ops")
            code = run.wait()
            gone_at = time.monotonic()
            for curl in asked.values():
                curl.wait()

        live, ready = asked["/livez"], asked["/readyz"]
        assert code == 0
        assert live.refused_early == ready.refused_early == []
        assert {status for _, status in live.answers} == {200}
        late = [status for at, status in ready.answers if at > stopped_at + SEEN_S + SLACK_S]
        assert set(late) == {503}
        statuses = [status for _, status in ready.answers]
        assert statuses == sorted(statuses)  # never ready again
        assert gone_at - live.answers[-1][0] < 1.0
        assert all(gone_at - at < 1.0 for at in live.cut)
        assert kind == "tcp" or (tmp_path / "admin.sock").is_socket()


def test_a_port_that_is_taken_ends_the_command_with_78(tmp_path: Path):
    """With a message on standard error, before others could see a run."""
    write_service(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = gracekit(tmp_path, "run", "compute", GRACEKIT_ADMIN=f"127.0.0.1:{port}")

    assert answer.code == 78
    assert f"admin = 127.0.0.1:{port} cannot be listened at" in answer.err
    assert gracekit(tmp_path, "status", "--json").json["runs"] == []
