"""A service inside a web application: what doctor says of a command that starts uvicorn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gracekit import Settings
from gracekit.doctor.finding import Finding, Level
from gracekit.doctor.pods import check_manifest
from gracekit.doctor.units import check_unit
from tests.doctor.kit import one

UNIT = """[Service]
Type=notify
ExecStart={command}
TimeoutStopSec={stop}
"""
BOUNDED = "/opt/app/bin/uvicorn app:app --timeout-graceful-shutdown 3"


def unit(directory: Path, command: str, *, stop: int = 34) -> list[Finding]:
    path = directory / "app.service"
    path.write_text(UNIT.format(command=command, stop=stop))
    return list(check_unit(Settings(), str(path)))


def manifest(directory: Path, command: list[str], **env: str) -> list[Finding]:
    variables = {"GRACEKIT_STORE_URL": "memory://", "GRACEKIT_TRANSPORT_URL": "memory://", **env}
    main = {
        "name": "main",
        "command": command,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    spec = {"terminationGracePeriodSeconds": 34, "containers": [main]}
    path = directory / "app.json"
    path.write_text(json.dumps({"kind": "Pod", "metadata": {"name": "app"}, "spec": spec}))
    return list(check_manifest(Settings(), path))


@pytest.mark.parametrize(
    "command",
    [
        "/opt/app/bin/uvicorn app:app",
        "/usr/bin/python3 -m uvicorn app:app --port 80",
        "/usr/bin/env uvicorn app:app",
    ],
)
def test_a_uvicorn_that_waits_for_ever_before_the_drain_fails(tmp_path: Path, command: str):
    """Without a limit it waits for open HTTP requests, until the platform kills a service that
    serves.
    """
    found = one(unit(tmp_path, command), "uvicorn")

    assert found.level is Level.FAIL
    assert "before the drain begins" in found.seen
    assert "--timeout-graceful-shutdown 3" in found.remedy


@pytest.mark.parametrize(
    "command",
    [
        BOUNDED,
        BOUNDED.replace("down 3", "down=3"),
        "/bin/sh -c 'exec uvicorn app:app --timeout-graceful-shutdown 3'",
    ],
)
def test_a_uvicorn_with_a_limit_is_accepted(tmp_path: Path, command: str):
    """Its seconds come before the drain, and both fit into the platform's limit."""
    found = unit(tmp_path, command)

    assert one(found, "uvicorn").level is Level.OK
    assert one(found, "TimeoutStopSec").level is Level.OK
    assert "uvicorn 3s + hard limit 29s" in one(found, "TimeoutStopSec").seen


def test_seconds_of_uvicorn_count_against_the_platforms_limit(tmp_path: Path):
    """31 s are enough for the drain alone, and not for 3 s before it."""
    found = one(unit(tmp_path, BOUNDED, stop=31), "TimeoutStopSec")

    assert found.level is Level.FAIL
    assert "34" in found.remedy


def test_a_manifest_is_judged_like_a_unit(tmp_path: Path):
    """The option may also be uvicorn's variable."""
    name = "Pod app, container main: uvicorn"

    without = one(manifest(tmp_path, ["uvicorn", "app:app"]), name)
    by_option = one(manifest(tmp_path, BOUNDED.split()), name)
    variable = {"UVICORN_TIMEOUT_GRACEFUL_SHUTDOWN": "3"}
    by_variable = one(manifest(tmp_path, ["uvicorn", "app:app"], **variable), name)

    assert (without.level, by_option.level, by_variable.level) == (
        Level.FAIL,
        Level.OK,
        Level.OK,
    )
