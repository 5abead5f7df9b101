"""The platform's patience: units, programs, manifests and containers against the hard limit."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from gracekit import Settings
from gracekit.config.loading import load
from gracekit.doctor.finding import Level
from gracekit.doctor.grace import compare
from gracekit.doctor.platform import check_container, check_systemd
from gracekit.doctor.pods import check_manifest
from gracekit.doctor.start_command import hides_signals, is_interactive
from gracekit.doctor.units import check_unit, time_span
from gracekit.errors import ConfigError
from tests.cli.kit import ROOT
from tests.doctor.kit import levels, one, process

SETTINGS = Settings(host="node-1")  # hard limit 29 s, alarm at 29.5 s
UNIT = """
[Unit]
Description=compute

[Service]
Type=notify
ExecStart=/usr/bin/gracekit run compute:svc
KillMode=mixed
Restart=on-failure
RestartPreventExitStatus=78
SuccessExitStatus=75
RestartForceExitStatus=75
TimeoutStopSec=35
WatchdogSec=30
"""


# -- the comparison -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit_s", "level"),
    [
        (29.0, Level.FAIL),
        (29.2, Level.WARN),
        (29.5, Level.WARN),
        (30.0, Level.OK),
        (math.inf, Level.WARN),
    ],
)
def test_hard_limit_and_alarm_must_be_below_the_platforms_limit(limit_s, level):
    """Killed before the hand-over is a FAIL; killed before our own alarm, or never, a WARN."""
    found = compare(SETTINGS, check="c", limit_s=limit_s, said="TimeoutStopSec", knob="it")

    assert found.level is level
    assert found.level is Level.OK or "31" in found.remedy


def test_remedy_names_both_ways_out():
    """Raise theirs, or shorten ours to what fits."""
    found = compare(SETTINGS, check="c", limit_s=10.0, said="theirs = x", knob="TimeoutStopSec")

    assert "hard limit 29s must be below" in found.seen
    assert found.remedy == "raise TimeoutStopSec to at least 31, or set GRACEKIT_DRAIN_TIMEOUT=5s"


def test_one_number_keeps_both_the_hard_limit_and_the_promise_of_kill_after(tmp_path):
    """With the number of the remedy, or with its shorter times, nothing fails any more."""
    path = tmp_path / "compute.service"

    def failing(stop: str, *more: str) -> dict[str, str]:
        lines = "".join(f"Environment=GRACEKIT_{one}\n" for one in more)
        path.write_text(
            f"[Service]\nExecStart=gracekit run compute:svc\n{lines}TimeoutStopSec={stop}\n"
        )
        found = check_unit(SETTINGS, str(path))
        return {f.check: f.remedy for f in found if f.level is Level.FAIL and "Stop" in f.seen}

    first = failing("10", "KILL_AFTER=31")

    assert first == {
        "TimeoutStopSec": "raise TimeoutStopSec to at least 31, or set GRACEKIT_DRAIN_TIMEOUT=5s "
        "and GRACEKIT_KILL_AFTER=10"
    }
    assert failing("31", "KILL_AFTER=31") == {}
    assert failing("10", "KILL_AFTER=10", "DRAIN_TIMEOUT=5s") == {}


def test_a_pod_that_is_killed_too_early_gets_one_finding_with_one_number(tmp_path):
    """The grace period and GRACEKIT_KILL_AFTER are raised together."""
    path = tmp_path / "compute.json"
    path.write_text(json.dumps(deployment(10, env=env(KILL_AFTER="31"))))

    found = [one for one in check_manifest(SETTINGS, path) if one.level is Level.FAIL]

    (remedy,) = (one.remedy for one in found if "KILL_AFTER" in one.check + one.remedy)
    assert remedy == (
        "raise terminationGracePeriodSeconds, and GRACEKIT_KILL_AFTER with it, to at least 31, or "
        "set GRACEKIT_DRAIN_TIMEOUT=5s and GRACEKIT_KILL_AFTER=10"
    )


# -- systemd ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1min 30s", 90.0),
        ("1min30s", 90.0),
        ("500ms", 0.5),
        ("2h", 7200.0),
        ("infinity", math.inf),
        ("soon", None),
        ("5 parsecs", None),
        ("", None),
    ],
)
def test_time_spans_are_read_as_systemd_writes_them(text, seconds):
    """Numbers are seconds, units add up, and what is no time span is said to be none."""
    assert time_span(text) == seconds


@pytest.fixture
def unit(tmp_path):
    def write(*changes: tuple[str, str]) -> dict[str, Level]:
        text = UNIT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "compute.service"
        path.write_text(text)
        return levels(check_unit(SETTINGS, str(path)))

    return write


def test_a_good_unit_is_all_ok(unit):
    """The unit that the conventions ask for raises no finding."""
    assert set(unit().values()) == {Level.OK}


@pytest.mark.parametrize(
    ("old", "new", "check", "level"),
    [
        ("TimeoutStopSec=35", "TimeoutStopSec=10", "TimeoutStopSec", Level.FAIL),
        ("TimeoutStopSec=35", "TimeoutSec=20s", "TimeoutStopSec", Level.FAIL),
        ("TimeoutStopSec=35", "", "TimeoutStopSec", Level.OK),  # 90 s
        ("TimeoutStopSec=35", "TimeoutStopSec=infinity", "TimeoutStopSec", Level.WARN),
        ("TimeoutStopSec=35", "TimeoutStopSec=soon", "TimeoutStopSec", Level.FAIL),
        ("KillMode=mixed", "", "KillMode", Level.WARN),
        ("KillMode=mixed", "KillMode=none", "KillMode", Level.WARN),
        ("KillMode=mixed", "KillSignal=SIGKILL", "KillSignal", Level.FAIL),
        ("/usr/bin/gracekit", "/bin/sh -c 'cd /srv; gracekit", "ExecStart", Level.FAIL),
        ("/usr/bin/gracekit", "/bin/sh -c 'exec gracekit", "ExecStart", Level.OK),
        ("Restart=on-failure", "", "Restart", Level.WARN),
        ("RestartPreventExitStatus=78", "", "Restart", Level.WARN),
        ("SuccessExitStatus=75", "", "Restart", Level.WARN),
        ("Type=notify", "Type=simple", "Type", Level.WARN),
        ("Type=notify", "Type=notify\nTimeoutStartSec=30", "TimeoutStartSec", Level.WARN),
    ],
)
def test_what_a_unit_does_to_a_stop_is_found(unit, old, new, check, level):
    """Each directive that would spoil a drain, a restart or a start has its finding."""
    assert unit((old, new))[check] is level


ITS_CONFIG = "Environment=GRACEKIT_CONFIG=compute.toml"


@pytest.mark.parametrize(
    "more",
    [
        ("compute:svc", "compute:svc --drain-timeout 60s"),
        ("compute:svc", "--drain-timeout=60s compute:svc"),
        ("compute:svc", 'compute:svc "--drain-timeout" "60s"'),
        (
            "/usr/bin/gracekit run compute:svc",
            '"/opt/my app/bin/gracekit" run compute:svc --drain-timeout 60s',
        ),
        ("/usr/bin/gracekit", "/usr/bin/python3 -m gracekit"),
        ("Type=notify", "Environment=GRACEKIT_DRAIN_TIMEOUT=60s A=B\nType=notify"),
        (
            "Type=notify",
            'Environment=A=B\nEnvironment="GRACEKIT_DRAIN_TIMEOUT=60s" "C=d e"\nType=notify',
        ),
        ("Type=notify", "EnvironmentFile=-{here}/compute.env\nType=notify"),
        ("compute:svc", "compute:svc --config {here}/compute.toml"),
        ("Type=notify", f"WorkingDirectory={{here}}\n{ITS_CONFIG}\nType=notify"),
    ],
    ids=[
        "option", "with =", "quoted", "quoted program", "module", "variable", "more lines", "file",
        "config", "its variable",
    ],
)  # fmt: skip
def test_a_unit_is_judged_by_the_settings_that_it_gives(tmp_path, more):
    """Its options, variables and files are those of the run that systemd stops."""
    (tmp_path / "compute.env").write_text("# of compute\nGRACEKIT_DRAIN_TIMEOUT='60s'\n")
    (tmp_path / "compute.toml").write_text('drain_timeout = "60s"\n')
    text = UNIT.replace(*(word.replace("{here}", str(tmp_path)) for word in more))
    if "-m gracekit" in text:
        text = text.replace("compute:svc", "compute:svc --drain-timeout 60s")
    path = tmp_path / "compute.service"
    path.write_text(text)

    found = list(check_unit(SETTINGS, str(path)))

    assert one(found, "TimeoutStopSec").level is Level.FAIL
    assert "64s must be below TimeoutStopSec of compute.service = 35s" in (
        one(found, "TimeoutStopSec").seen
    )
    assert "is judged by that" in one(found, "settings").seen


def test_a_unit_is_judged_by_the_service_s_own_defaults(tmp_path):
    """What the unit sets itself goes before them, and the rest stands."""
    defaults = {"drain_timeout": "60s", "threads": 3}
    settings = load(env={"GRACEKIT_DRAIN_TIMEOUT": "5s"}, defaults=defaults)  # of doctor's shell
    path = tmp_path / "compute.service"
    path.write_text(UNIT.replace("compute:svc", "compute:svc --threads 4"))

    found = one(check_unit(settings, str(path)), "TimeoutStopSec")

    assert found.level is Level.FAIL
    assert "64s must be below TimeoutStopSec" in found.seen


@pytest.mark.parametrize(
    ("stop", "kill_after", "level"),
    [
        ("190", "200", Level.FAIL),
        ("200", "200", Level.OK),
        ("210", "200", Level.OK),
        ("infinity", "200", Level.OK),
        ("", "100", Level.FAIL),  # 90 s
        ("190", "", None),
        ("soon", "200", None),
    ],
)
def test_a_unit_must_give_the_time_that_its_kill_after_promises(unit, stop, kill_after, level):
    """A start compares its hard limit with GRACEKIT_KILL_AFTER, so systemd must not be faster."""
    variable = f"Environment=GRACEKIT_KILL_AFTER={kill_after}\n" if kill_after else ""
    lines = f"{variable}TimeoutStopSec={stop}" if stop else variable

    found = unit(("TimeoutStopSec=35", lines))

    assert found.get("GRACEKIT_KILL_AFTER") is level


def test_a_kill_after_of_the_operator_is_not_that_of_a_unit(tmp_path):
    """The variable of doctor's own shell says nothing about the unit."""
    path = tmp_path / "compute.service"
    path.write_text(UNIT)
    settings = load(env={"GRACEKIT_KILL_AFTER": "200"})

    assert "GRACEKIT_KILL_AFTER" not in levels(check_unit(settings, str(path)))


def test_an_empty_line_of_a_unit_takes_back_what_was_set(unit):
    """As systemd reads it; and what other programs are told is not ours."""
    reset = "Environment=GRACEKIT_DRAIN_TIMEOUT=60s\nEnvironment=\nType=notify"
    other = ("/usr/bin/gracekit run", "/usr/bin/other --drain-timeout 60s --host 0.0.0.0")

    assert unit(("Type=notify", reset))["TimeoutStopSec"] is Level.OK
    assert unit(other)["TimeoutStopSec"] is Level.OK


def test_what_a_unit_says_wrong_or_elsewhere_is_told(tmp_path):
    """A start would be refused; or a file is on another machine, and what it says is not known."""
    path = tmp_path / "compute.service"
    path.write_text(UNIT.replace("compute:svc", "compute:svc --drain-timeout soon"))
    wrong = one(check_unit(SETTINGS, str(path)), "settings")
    path.write_text(UNIT.replace("Type", "EnvironmentFile=/nowhere/compute\nType", 1))
    elsewhere = one(check_unit(SETTINGS, str(path)), "settings")

    assert (wrong.level, "'soon' is not a duration" in wrong.seen) == (Level.FAIL, True)
    assert (elsewhere.level, "/nowhere/compute" in elsewhere.seen) == (Level.SKIP, True)


def test_a_file_that_is_no_unit_fails(tmp_path):
    """A wrong file is not taken for a good unit."""
    path = tmp_path / "compute.socket"
    path.write_text("[Socket]\nListenStream=1\n")

    assert levels(check_unit(SETTINGS, str(path))) == {"unit": Level.FAIL}


SYSTEMCTL = """#!/bin/sh
cat <<'END'
LoadState=loaded
Type=notify
TimeoutStopUSec=20s
TimeoutStartUSec=1min 30s
KillMode=mixed
ExecStart={ path=/usr/bin/gracekit ; argv[]=/usr/bin/gracekit run compute:svc ; ignore_errors=no }
END
"""


@pytest.mark.process
def test_systemctl_is_asked_for_the_unit_of_a_process(tmp_path, monkeypatch):
    """What systemd itself says counts: drop-ins and defaults are in it."""
    script = tmp_path / "systemctl"
    script.write_text(SYSTEMCTL)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    process(tmp_path / "proc", 7, "gracekit", cgroup="/system.slice/compute.service")

    found = list(check_systemd(SETTINGS, 7, tmp_path / "proc"))

    assert one(found, "TimeoutStopSec").level is Level.FAIL
    assert "compute.service = 20s" in one(found, "TimeoutStopSec").seen
    assert one(found, "ExecStart").level is Level.OK


@pytest.mark.parametrize("cgroup", ["/", "/user.slice/user@1000.service/app.slice/shell.scope"])
def test_a_process_of_a_shell_runs_in_no_unit(tmp_path, cgroup):
    """The service manager of a user is not the unit of all that the user starts."""
    process(tmp_path, 7, "gracekit", cgroup=cgroup)

    assert levels(check_systemd(SETTINGS, 7, tmp_path)) == {"systemd": Level.SKIP}


def test_doctor_calls_its_own_process_so(tmp_path):
    """Without a living run it looks at itself, and a bare number would name nothing that lasts."""
    process(tmp_path, os.getpid(), "gracekit", cgroup="/")

    assert (
        "this process (gracekit doctor) runs in no unit"
        in one(check_systemd(SETTINGS, os.getpid(), tmp_path), "systemd").seen
    )


# -- Kubernetes ---------------------------------------------------------------------


def deployment(grace: object = None, **container: object) -> dict[str, object]:
    spec: dict[str, object] = {"containers": [{"name": "main", **container}]}
    if grace is not None:
        spec["terminationGracePeriodSeconds"] = grace
    return {
        "kind": "List",
        "items": [
            {
                "kind": "Deployment",
                "metadata": {"name": "compute"},
                "spec": {"template": {"spec": spec}},
            }
        ],
    }


def env(**variables: str) -> list[dict[str, str]]:
    return [{"name": f"GRACEKIT_{name}", "value": value} for name, value in variables.items()]


NAME = "Deployment compute, container main"
RUN = ["gracekit", "run", "compute:svc"]
SHELL_RUN = "gracekit run compute --drain-timeout=2m"
SLEEP_2 = {"preStop": {"sleep": {"seconds": 2}}}
EXEC_SLEEP_2 = {"preStop": {"exec": {"command": ["sleep", "2"]}}}
HTTP = {"preStop": {"httpGet": {"path": "/stop"}}}


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (deployment(), {NAME: Level.OK}),  # 30 s
        (deployment(20), {NAME: Level.FAIL}),
        (deployment("30s"), {NAME: Level.FAIL}),
        (deployment(31, lifecycle=SLEEP_2), {NAME: Level.FAIL}),
        (deployment(31, lifecycle=EXEC_SLEEP_2), {NAME: Level.FAIL}),
        (deployment(32, lifecycle=SLEEP_2), {NAME: Level.OK}),
        (deployment(20, env=env(DRAIN_TIMEOUT="10s")), {NAME: Level.OK}),
        (deployment(60, env=env(DRAIN_TIMEOUT="2m")), {NAME: Level.FAIL}),
        (deployment(60, env=env(DRAIN_TIMEOUT="long")), {NAME: Level.FAIL}),
        (deployment(60, command=RUN, args=["--drain-timeout", "2m"]), {NAME: Level.FAIL}),
        (deployment(60, command=["sh", "-c", f"exec {SHELL_RUN}"]), {NAME: Level.FAIL}),
        (deployment(60, command=["other"], args=["--drain-timeout", "2m"]), {NAME: Level.OK}),
        (deployment(60, command=RUN, args=["--drain-timeout", "long"]), {NAME: Level.FAIL}),
        (deployment(60, env=env(KILL_AFTER="60")), {f"{NAME}: GRACEKIT_KILL_AFTER": Level.OK}),
        (deployment(60, env=env(KILL_AFTER="90s")), {f"{NAME}: GRACEKIT_KILL_AFTER": Level.FAIL}),
        (deployment(60), {f"{NAME}: GRACEKIT_KILL_AFTER": Level.WARN}),
    ],
)
def test_a_pod_must_be_given_the_time_that_its_container_takes(tmp_path, manifest, expected):
    """preStop + hard limit + alarm against the grace period, by the container's own settings."""
    path = tmp_path / "compute.json"
    path.write_text(json.dumps(manifest))

    found = levels(check_manifest(SETTINGS, path))

    assert {check: found.get(check) for check in expected} == expected


CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "compute"}}
EMPTY = {"name": "data", "emptyDir": {}}
FILES = env(STORE_URL="sqlite:////data/store.db", TRANSPORT_URL="sqlite:////data/queue.db")
ON_BROKER = env(
    STORE_URL="sqlite:////data/store.db",
    TRANSPORT_URL="amqp://u:p@broker/v",
)
MOUNTED = [{"name": "data", "mountPath": "/data"}]
OTHERWISE = [{"name": "data", "mountPath": "/other"}]


def with_volume(
    *volumes: dict[str, object],
    variables: list[dict[str, str]] = FILES,
    mounts: list[dict[str, str]] = MOUNTED,
    replicas: int = 1,
    claims: tuple[str, ...] = (),
) -> dict[str, object]:
    spec = {
        "containers": [{"name": "main", "env": variables, "volumeMounts": mounts}],
        "volumes": list(volumes),
    }
    return {
        "kind": "Deployment",
        "metadata": {"name": "compute"},
        "spec": {
            "replicas": replicas,
            "template": {"spec": spec},
            "volumeClaimTemplates": [{"metadata": {"name": name}} for name in claims],
        },
    }


ON_SERVERS = env(STORE_URL="postgresql://localhost/d", TRANSPORT_URL="amqp://u:p@broker/v")
RUNS = env(RUN_DIRECTORY="/data/runs")


@pytest.mark.parametrize(
    ("manifest", "check", "level", "said"),
    [
        (with_volume(CLAIM), "journal", Level.OK, "is on the volume 'data'"),
        (with_volume(CLAIM), "queue", Level.OK, "is on the volume 'data'"),
        (with_volume(claims=("data",)), "journal", Level.OK, "is on the volume 'data'"),
        (with_volume(), "journal", Level.FAIL, "and no volume is called so"),
        (with_volume(EMPTY), "journal", Level.WARN, "in the emptyDir volume 'data'"),
        (with_volume(EMPTY), "queue", Level.WARN, "in the emptyDir volume 'data'"),
        (with_volume(CLAIM, mounts=OTHERWISE), "journal", Level.FAIL, "is on no volume"),
        (with_volume(variables=env(HOST="h")), "journal", Level.FAIL, "working directory, which"),
        (with_volume(EMPTY, variables=ON_BROKER), "queue", None, ""),
        (with_volume(CLAIM, variables=ON_SERVERS), "journal", None, ""),
        (with_volume(CLAIM, variables=ON_SERVERS, replicas=3), "replicas", None, ""),
        (with_volume(CLAIM), "run directory", None, ""),
        (with_volume(CLAIM, variables=ON_SERVERS), "run directory", Level.FAIL, "is on no volume"),
        (with_volume(CLAIM, variables=ON_SERVERS + RUNS), "run directory", Level.OK, "volume 'da"),
        (with_volume(CLAIM), "replicas", None, ""),
        (with_volume(CLAIM, replicas=3), "replicas", Level.WARN, "pods of one node can share"),
        (with_volume(CLAIM, replicas=2, variables=ON_BROKER), "replicas", Level.WARN, "only the"),
    ],
)
def test_where_a_pod_keeps_its_files_and_who_shares_them_is_told(
    tmp_path, manifest, check, level, said
):
    """A journal that goes with its container or pod keeps no promise, nor do two for one queue."""
    path = tmp_path / "compute.json"
    path.write_text(json.dumps(manifest))

    found = {one.check: one for one in check_manifest(SETTINGS, path)}.get(f"{NAME}: {check}")

    assert (found and found.level) == level
    assert found is None or said in found.seen
    assert found is None or level is Level.OK or found.remedy


def test_a_pre_stop_of_unknown_length_is_a_warning(tmp_path):
    """What it takes comes off the grace period, and nobody can tell how much."""
    path = tmp_path / "compute.json"
    path.write_text(json.dumps(deployment(60, lifecycle=HTTP)))

    found = list(check_manifest(SETTINGS, path))

    assert found[0].level is Level.WARN
    assert "preStop" in found[0].seen


def test_a_container_whose_command_is_a_shell_fails(tmp_path):
    """Kubernetes signals the shell, which keeps it to itself."""
    path = tmp_path / "compute.json"
    command = {"command": ["sh", "-c"], "args": ["sleep 1; gracekit run compute"]}
    path.write_text(json.dumps(deployment(60, **command)))

    found = list(check_manifest(SETTINGS, path))

    assert [f.remedy for f in found if "shell" in f.seen] == [
        'use the exec form: command: ["gracekit", "run", "MODULE:ATTR"]'
    ]


def test_sidecars_are_left_alone_where_one_container_is_ours(tmp_path):
    """A container that names a setting of ours is the service; others are not judged."""
    manifest = {
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {
            "containers": [
                {"name": "proxy", "command": ["sh", "-c", "proxy; true"]},
                {"name": "main", "env": env(KILL_AFTER="30")},
            ]
        },
    }
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(manifest))

    assert all(
        check.startswith("Pod x, container main")
        for check in levels(check_manifest(SETTINGS, path))
    )


def test_a_manifest_without_pods_fails(tmp_path):
    """A Service's manifest is not the service's."""
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"kind": "Service", "spec": {"ports": []}}))

    assert levels(check_manifest(SETTINGS, path)) == {"manifest": Level.FAIL}


YAML = """
kind: ConfigMap
---
kind: Pod
metadata: {name: compute}
spec:
  terminationGracePeriodSeconds: 20
  containers: [{name: main}]
"""


def test_yaml_is_read_where_a_library_is_there(tmp_path):
    """All documents of a file are looked through."""
    pytest.importorskip("yaml")
    path = tmp_path / "compute.yaml"
    path.write_text(YAML)

    assert levels(check_manifest(SETTINGS, path))["Pod compute, container main"] is Level.FAIL


def test_yaml_without_a_library_fails_with_a_remedy(tmp_path, monkeypatch):
    """What was asked about and not looked at is not in order; JSON from kubectl needs nothing."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "compute.yaml"
    path.write_text(YAML)

    (found,) = check_manifest(SETTINGS, path)

    assert (found.level, "-o json" in found.remedy) == (Level.FAIL, True)
    assert "nothing in it was judged" in found.seen
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (extra,) = re.findall(r"pip install 'gracekit\[(\w+)\]'", found.remedy)
    assert any(one.startswith("pyyaml") for one in extras[extra])


def test_broken_yaml_is_a_configuration_error(tmp_path):
    """A manifest that cannot be read is said to be so, with its place."""
    pytest.importorskip("yaml")
    path = tmp_path / "compute.yaml"
    path.write_text("a: [")

    with pytest.raises(ConfigError, match="is not YAML"):
        list(check_manifest(SETTINGS, path))


# -- containers and shells ----------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "settings", "level"),
    [
        ("/docker/abc", SETTINGS, Level.WARN),
        ("/docker/abc", Settings(kill_after_s=40), Level.OK),
        ("/docker/abc", Settings(drain_timeout_s=5), Level.OK),
        ("/kubepods/besteffort/pod1", SETTINGS, Level.OK),
        ("/kubepods/besteffort/pod1", Settings(drain_timeout_s=60), Level.WARN),
    ],
)
def test_a_containers_default_is_what_is_known(tmp_path, cgroup, settings, level):
    """Docker kills after 10 s and Kubernetes after 30 unless told; the truth is not visible
    inside.
    """
    process(tmp_path, 7, "gracekit", cgroup=cgroup)

    assert check_container(settings, 7, tmp_path).level is level


@pytest.mark.parametrize(
    ("words", "hidden", "interactive"),
    [
        (["gracekit", "run", "x"], False, False),
        (["sh", "-c", "gracekit run x; true"], True, False),
        (["/bin/bash", "-euo", "pipefail", "-c", "gracekit run x"], True, False),
        (["bash", "-lc", "cd /srv && exec gracekit run x"], False, False),
        (["sh", "-e", "start.sh", "-c", "x"], False, False),
        (["-bash"], False, True),
        (["bash", "-i"], False, True),
        ([], False, False),
    ],
)
def test_a_shell_that_keeps_signals_is_known_by_its_words(words, hidden, interactive):
    """Only a shell with a command that does not end in exec keeps SIGTERM for sure."""
    assert (hides_signals(words), is_interactive(words)) == (hidden, interactive)


def test_a_named_unit_that_nobody_knows_fails(tmp_path, monkeypatch):
    """What was asked about and not looked at is not in order; the remedy is the file."""
    monkeypatch.setenv("PATH", str(tmp_path))

    (found,) = check_unit(SETTINGS, "compute")

    assert (found.level, found.remedy) == (Level.FAIL, "give --unit the path of the unit's file")
    assert not Path("compute").exists()
