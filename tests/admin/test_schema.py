"""The HTTP API under requests that schemathesis generates from its OpenAPI description."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.admin.kit import TOKEN, ask_now, write_tokens
from tests.admin.test_drains import free_port
from tests.cli.kit import Running, write_service
from tests.scale import scale
from tools import dev

pytestmark = pytest.mark.process

LEFT_OUT: Final = ("/api/v1/events", "/api/v1/drain")
"""Paths left out: a stream never ends, and a drain would end the service."""
CONFIG: Final = """
[checks.negative_data_rejection]
# 413 too: a text that is far too long makes a body that is.
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""


@pytest.mark.timeout(scale(240, 1800))
def test_schemathesis_finds_nothing(tmp_path: Path):
    """Each answer has a status, a type and a schema of the description, and the service
    survives.
    """
    write_service(tmp_path)
    tokens = write_tokens(tmp_path)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    port = free_port()
    address = f"127.0.0.1:{port}"
    with Running(tmp_path, GRACEKIT_ADMIN=address, GRACEKIT_ADMIN_TOKEN_FILE=str(tokens)) as run:
        done = subprocess.run(
            [
                *(str(dev.python(dev.API_LOCK)), "-m", "schemathesis.cli", "run"),
                f"http://{address}/api/v1/openapi.json",
                *("-H", f"Authorization: Bearer {TOKEN}"),
                *(word for path in LEFT_OUT for word in ("--exclude-path", path)),
                *("--phases", scale("fuzzing", "examples,coverage,fuzzing,stateful")),
                *("--max-examples", str(scale(8, 200))),
                "--no-color",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        alive = ask_now(address, "/livez").status
        run.process.send_signal(signal.SIGTERM)
        code = run.wait()

    assert done.returncode == 0, done.stdout
    assert (alive, code) == (200, 0)
