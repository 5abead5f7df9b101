"""Settings whose values are not in a manifest or unit: from a Secret, a ConfigMap or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gracekit import Settings
from gracekit.config.loading import load
from gracekit.doctor.finding import Finding, Level
from gracekit.doctor.pods import check_manifest
from gracekit.doctor.units import check_unit
from tests.doctor.kit import one

NAME = "Pod compute, container main"
QUEUE = f"{NAME}: queue"
STORE = {"name": "GRACEKIT_STORE_URL", "value": "sqlite:////data/store.db"}
FROM_SECRET = {"secretKeyRef": {"name": "images", "key": "url"}}
FROM_MAP = {"configMapKeyRef": {"name": "times", "key": "it"}}


def of(name: str, source: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"GRACEKIT_{name}", "valueFrom": source}


def pod(tmp_path: Path, *env: dict[str, Any], grace: int = 30, **container: Any) -> Path:
    """The manifest of a pod with a volume at /data."""
    main = {
        "name": "main",
        "command": ["gracekit", "run", "compute:svc"],
        "env": [STORE, *env],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        **container,
    }
    spec = {
        "terminationGracePeriodSeconds": grace,
        "containers": [main],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "compute"}}],
    }
    path = tmp_path / "compute.json"
    path.write_text(json.dumps({"kind": "Pod", "metadata": {"name": "compute"}, "spec": spec}))
    return path


def checks(found: list[Finding]) -> set[str]:
    return {each.check for each in found}


def test_a_url_from_a_secret_is_not_judged_by_the_default(tmp_path):
    """Where the queue is, is not in the manifest, so doctor judges nothing."""
    path = pod(tmp_path, of("TRANSPORT_URL", FROM_SECRET))

    found = list(check_manifest(Settings(), path))

    assert one(found, QUEUE).level is Level.SKIP
    assert "the value of GRACEKIT_TRANSPORT_URL is not known here" in one(found, QUEUE).seen
    assert one(found, f"{NAME}: journal").level is Level.OK


def test_a_time_from_a_config_map_is_not_judged_by_the_default(tmp_path):
    """The hard limit is a sum, so it is not known if one of its times is not known."""
    path = pod(tmp_path, of("DRAIN_TIMEOUT", FROM_MAP), grace=20)

    found = one(check_manifest(Settings(), path), NAME)

    assert found.level is Level.SKIP
    assert "GRACEKIT_DRAIN_TIMEOUT may set other times" in found.seen


def test_a_kill_after_from_a_config_map_is_not_called_absent(tmp_path):
    """The pod has one; only its value is not in the manifest."""
    path = pod(tmp_path, of("KILL_AFTER", FROM_MAP))

    found = one(check_manifest(Settings(), path), f"{NAME}: GRACEKIT_KILL_AFTER")

    assert found.level is Level.SKIP
    assert "the value of GRACEKIT_KILL_AFTER is not known here" in found.seen


def test_a_value_beside_a_source_of_all_variables_is_known(tmp_path):
    """Kubernetes lets `env` win over `envFrom`, so the journal is known, and the queue is not."""
    path = pod(tmp_path, grace=20, envFrom=[{"secretRef": {"name": "images"}}])

    found = list(check_manifest(Settings(), path))

    assert one(found, f"{NAME}: journal").level is Level.OK
    assert one(found, QUEUE).level is Level.SKIP
    # The default of the drain may be right or wrong there, so nothing FAILs by it.
    assert one(found, NAME).level is Level.WARN
    assert "envFrom may set other times" in one(found, NAME).seen
    assert one(found, f"{NAME}: GRACEKIT_KILL_AFTER").level is Level.SKIP


def test_settings_that_only_fit_with_a_secret_do_not_fail(tmp_path):
    """An endpoint at all addresses needs a token file, whose name may come from a Secret."""
    admin = {"name": "GRACEKIT_ADMIN", "value": "0.0.0.0:9701"}
    path = pod(tmp_path, admin, of("ADMIN_TOKEN_FILE", FROM_SECRET))

    found = list(check_manifest(Settings(), path))

    assert Level.FAIL not in {each.level for each in found}
    assert "GRACEKIT_ADMIN_TOKEN_FILE may set what is missing" in one(found, NAME).seen


def test_a_hidden_settings_file_may_name_the_store_and_the_queue(tmp_path):
    """A pod's settings file is in its image or a ConfigMap, and is not judged as if it were
    empty.
    """
    run = ["gracekit", "run", "compute:svc", "--config", "/nowhere/compute.toml"]
    path = pod(tmp_path, command=run)

    found = list(check_manifest(Settings(), path))

    assert one(found, QUEUE).level is Level.SKIP
    assert "/nowhere/compute.toml" in one(found, f"{NAME}: settings").seen


UNIT = """[Service]
Type=notify
ExecStart=/usr/bin/gracekit run compute:svc
EnvironmentFile=/nowhere/compute.env
TimeoutStopSec=20
"""


def test_a_unit_with_a_hidden_environment_file_does_not_fail_by_the_default(tmp_path):
    """Often only root may read such a file: a default that does not fit WARNs, and names the
    file.
    """
    path = tmp_path / "compute.service"
    path.write_text(UNIT)

    unknown = one(check_unit(load(env={}), str(path)), "TimeoutStopSec")
    known = one(check_unit(load(env={"GRACEKIT_DRAIN_TIMEOUT": "5s"}), str(path)), "TimeoutStopSec")

    assert (unknown.level, known.level) == (Level.WARN, Level.OK)
    assert "/nowhere/compute.env may set other times" in unknown.seen
