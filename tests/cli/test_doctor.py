"""`gracekit doctor`: what it says, its exit codes, and starts beside a foreign reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import Answer, Running, gracekit, write_service

pytestmark = pytest.mark.process

OTHER_STORE = {"GRACEKIT_STORE_URL": "sqlite:///other.db"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    write_service(tmp_path)
    return tmp_path


def findings(answer: Answer, level: str) -> list[dict[str, Any]]:
    return [one for one in answer.json["findings"] if one["level"] == level]


def test_a_sound_service_ends_with_0(directory):
    """Before its first start nothing is made; every area is in the picture."""
    answer = gracekit(directory, "doctor", "compute", "--host", "node-1", "--kill-after", "35s")

    assert answer.code == 0, answer
    for area in ("settings", "application", "platform", "store", "transport", "host"):
        assert f"\n{area}\n" in f"\n{answer.out}"
    assert "hard limit 29s, alarm at 29.5s, is below kill_after = 35s" in answer.out
    assert " 0 FAIL" in answer.out
    assert sorted(path.name for path in directory.glob("*.db*")) == []


def test_wrong_settings_end_with_78_and_their_remedy(directory):
    """Each is a finding of its own; what does not need them is looked at all the same."""
    answer = gracekit(
        directory, "doctor", "compute", "--json", "--kill-after", "20s", "--threads", "0"
    )

    failed = findings(answer, "fail")
    assert (answer.code, answer.json["exit_code"]) == (78, 78)
    assert [one["area"] for one in failed] == ["settings", "settings"]
    assert "threads = 0 must be more than 0" in failed[0]["seen"]
    assert failed[0]["remedy"] == "set GRACEKIT_THREADS"
    assert "exit_margin 1s = 29s must be below kill_after = 20s" in failed[1]["seen"]
    assert failed[1]["remedy"].endswith("set GRACEKIT_DRAIN_TIMEOUT=15s")
    assert answer.json["counts"]["fail"] == 2
    areas = {one["area"] for one in answer.json["findings"]}
    assert {"application", "host"} <= areas


def test_an_application_that_cannot_be_imported_fails(directory):
    """As a start would: a wrong name is configuration, a fault in the module its own."""
    write_service(directory, "broken", "raise RuntimeError('at import')\n")

    missing = gracekit(directory, "doctor", "compude", "--json")
    broken = gracekit(directory, "doctor", "broken", "--json")

    assert (missing.code, broken.code) == (78, 70)
    assert "did you mean compute?" in findings(missing, "fail")[0]["seen"] + str(
        findings(missing, "fail")[0]["remedy"]
    )
    assert "RuntimeError when it was imported: at import" in findings(broken, "fail")[0]["seen"]


def test_no_finding_shows_the_login_of_a_url(directory):
    """An application may say anything when it is imported; JSON goes into logs."""
    (directory / "broken.py").write_text('raise LookupError("amqp://u:canary@host/v")')

    said = [gracekit(directory, "doctor", "broken", *more) for more in ([], ["--json"])]

    for answer in said:
        assert "amqp://***@host/v" in answer.out
        assert "canary" not in answer.out


def test_only_what_is_not_ok_is_shown_when_quiet(directory):
    """One screen for a cron job: findings, and the counts."""
    (directory / "gracekit-store.db").write_text("not a database" * 100)
    (directory / "gracekit-store.db").chmod(0o600)

    answer = gracekit(directory, "doctor", "--quiet")

    assert answer.code == 69
    assert "\nFAIL  " in answer.out
    assert "\nok    " not in f"\n{answer.out}"


def test_units_and_manifests_are_read(directory):
    """Files of the platform are judged by the settings that the run will have."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    main = {"name": "main", "workingDir": "/data", "volumeMounts": mounts}
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "x"}}]
    spec = {"containers": [main], "volumes": volumes}
    pod = {"kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    (directory / "pod.json").write_text(json.dumps(pod))
    (directory / "x.service").write_text("[Service]\nExecStart=gracekit run x\nTimeoutStopSec=10\n")

    answer = gracekit(
        directory,
        *("doctor", "--json", "--unit", "x.service", "--manifest", "pod.json"),
        GRACEKIT_DRAIN_TIMEOUT="10s",
    )

    assert answer.code == 78
    assert [one["check"] for one in findings(answer, "fail")] == ["TimeoutStopSec"]
    checks = {one["check"]: one["level"] for one in answer.json["findings"]}
    assert checks["Pod x, container main"] == "ok"


def test_with_a_unit_only_named_files_are_examined(directory):
    """The store of the working directory is not the unit's: advice about it could break the
    service.
    """
    directory.chmod(0o755)
    (directory / "x.service").write_text("[Service]\nExecStart=gracekit run x\nTimeoutStopSec=60\n")

    def levels(*options: str) -> dict[str, set[str]]:
        found = gracekit(directory, "doctor", "--json", "--unit", "x.service", *options)
        levels: dict[str, set[str]] = {}
        for one in found.json["findings"]:
            levels.setdefault(one["area"], set()).add(one["level"])
        return levels

    unnamed, named = levels(), levels("--store", f"sqlite:///{directory}/gracekit-store.db")

    assert (unnamed["store"], unnamed["transport"]) == ({"skip"}, {"skip"})
    assert "warn" in named["store"]
    assert named["transport"] == {"skip"}


def test_a_living_run_is_looked_at(directory):
    """Its process is found in the store: signals, alarm and what stands above it."""
    with Running(directory, "--instance", "api-1") as run:
        answer = gracekit(directory, "doctor", "compute", "--json")

        checks = {one["check"]: one for one in answer.json["findings"]}
        pid = run.process.pid
    assert checks[f"signals of {pid}"]["level"] == "ok"
    assert checks[f"alarm of {pid}"]["level"] == "ok"
    assert f"compute@api-1 (pid {pid}, serving)" in checks["runs"]["seen"]
    assert checks["foreign readers"]["level"] == "ok"


def test_a_start_beside_a_foreign_reader_ends_with_78_until_that_one_is_dead(directory):
    """Start and doctor say the same; death is proved, so a killed reader is in nobody's way."""
    with Running(directory) as run:
        refused = gracekit(directory, "run", "compute", **OTHER_STORE)
        seen = gracekit(directory, "doctor", "compute", "--json", **OTHER_STORE)
        run.kill()

    after = gracekit(directory, "doctor", "compute", "--json", **OTHER_STORE)
    with Running(directory, **OTHER_STORE):
        pass

    assert (refused.code, seen.code, after.code) == (78, 78, 0)
    assert "this one, with the store sqlite:///other.db, and compute@" in refused.err
    assert "GRACEKIT_ACCEPT_UNSHARED_STORE=true" in refused.err
    (found,) = findings(seen, "fail")
    assert (found["area"], found["check"]) == ("transport", "foreign readers")
