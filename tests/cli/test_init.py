"""`gracekit init`: what it prints is right for systemd, for Kubernetes and for doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from gracekit.cli.main import cli

SERVICES: Final = {
    "short": '"drain_timeout": "500ms", "progress_every": "200ms", "ops_quiet_timeout": "100ms", '
    '"cancel_ok_timeout": "200ms", "handover_grace": "0.4s"',
    "usual": "",
    "long": '"drain_timeout": "2h", "start_timeout": "5m"',
}
STOP_S: Final = {"short": 5, "usual": 31, "long": 7206}
STOP_AFTER_100_S: Final = {"short": 104, "usual": 106, "long": 106}
"""The same with a drain of 100 seconds."""
START_S: Final = {"short": 90, "usual": 90, "long": 330}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory, from which the application is imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in (*SERVICES, "shop"):
        sys.modules.pop(name, None)


@pytest.fixture(params=SERVICES)
def service(request, tmp_path) -> str:
    """Three services with different times; the name of the module of one, which is its topic."""
    name = request.param
    (tmp_path / f"{name}.py").write_text(
        "from gracekit import Context, Service\n"
        f"svc = Service({name!r}, defaults={{{SERVICES[name]}}})\n"
        '@svc.rpc(on_interrupt="retry")\n'
        "async def work(ctx: Context) -> None: ...\n"
    )
    return name


def gracekit(*words: str, **env: str) -> Result:
    return CliRunner().invoke(cli, words, env=env)


def printed(*words: str) -> str:
    result = gracekit("init", *words)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def values(unit: str) -> dict[str, str]:
    lines = (line for line in unit.splitlines() if "=" in line and line[0] != "#")
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def findings(*words: str, **env: str) -> list[dict[str, Any]]:
    """What doctor finds wrong in a deployment."""
    shown = json.loads(gracekit("doctor", *words, "--json", **env).stdout)["findings"]
    found = [one for one in shown if one["area"] == "platform"]
    assert any(one["level"] == "ok" for one in found), shown
    return [one for one in found if one["level"] in {"warn", "fail"}]


# -- systemd --------------------------------------------------------------------------


def verified(unit: Path) -> str:
    """What `systemd-analyze verify` says, without its complaint about a missing user."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"{done.returncode}")


@pytest.mark.process
@pytest.mark.parametrize("more", [(), ("--instances", "3"), ("--drain-timeout", "100")])
def test_a_printed_unit_is_right_for_doctor_and_systemd(tmp_path, service, more):
    """Neither doctor nor `systemd-analyze verify` finds a fault in it."""
    name = f"{service}@.service" if "--instances" in more else f"{service}.service"
    unit = tmp_path / name
    unit.write_text(printed("systemd", f"{service}:svc", *more))

    assert findings(f"{service}:svc", "--unit", name) == []
    assert verified(unit) == ""


def test_the_times_of_a_unit_follow_from_the_service(tmp_path, service):
    """They follow from its own defaults, and a flag wins over these."""
    words = ("systemd", f"{service}:svc", "--systemd-version", "252")
    unit = values(printed(*words))
    changed = values(printed(*words, "--drain-timeout", "100"))

    assert unit["TimeoutStopSec"] == str(STOP_S[service])
    assert unit["TimeoutStartSec"] == str(START_S[service])
    assert unit["Type"] == "notify"
    assert changed["TimeoutStopSec"] == str(STOP_AFTER_100_S[service])


def test_a_unit_reloads_by_notification_where_systemd_can(tmp_path, service):
    """From 253 on systemd waits for the end of a reload; older ones only send the signal."""
    words = ("systemd", f"{service}:svc", "--systemd-version")
    new, old = (values(printed(*words, version)) for version in ("253", "252"))

    assert (new["Type"], "ExecReload" in new) == ("notify-reload", False)
    assert (old["Type"], "ExecReload" in old) == ("notify", True)


# -- Kubernetes -------------------------------------------------------------------------

VERSION: Final = kubernetes_validate.latest_version()
ADMIN: Final = ("--admin", "0.0.0.0:9701", "--admin-token-file", "tokens")


def documents(text: str) -> dict[str, Any]:
    """The objects of a manifest by kind; each fits the schema of Kubernetes."""
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for one in found.values():
        kubernetes_validate.validate(one, VERSION, strict=True)
    return found


@pytest.mark.parametrize("more", [(), (*ADMIN, "--admin-tls", "a,b"), ("--drain-timeout", "100")])
def test_a_printed_manifest_is_right_for_doctor_and_kubernetes(tmp_path, service, more):
    """Doctor finds no fault in it, and each object fits its schema."""
    words = ("k8s", f"{service}:svc", "--image", "registry.example/shop:1.2@sha256:0", *more)
    text = printed(*words)
    (tmp_path / "all.yaml").write_text(text)

    found = documents(text)

    assert list(found) == ["Service", "StatefulSet", "PodDisruptionBudget"]
    assert findings(f"{service}:svc", "--manifest", "all.yaml") == []


def test_the_times_of_a_manifest_follow_from_the_service(tmp_path, service):
    """The pod's grace period and the run's GRACEKIT_KILL_AFTER are the same number."""
    words = ("k8s", f"{service}:svc", "--image", "i")
    texts = printed(*words), printed(*words, "--drain-timeout", "100")
    pods = [documents(text)["StatefulSet"]["spec"]["template"]["spec"] for text in texts]
    grace = [pod["terminationGracePeriodSeconds"] for pod in pods]
    told = [env_of(pod)["GRACEKIT_KILL_AFTER"] for pod in pods]
    startup = pods[0]["containers"][0]["startupProbe"]

    assert grace[0] == STOP_S[service]
    assert grace[1] == STOP_AFTER_100_S[service]
    assert told == [str(number) for number in grace]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= START_S[service]


def test_help_says_which_store_makes_a_deployment():
    """A store is a file or memory today, and a reader should not expect a Deployment for a
    journal.
    """
    said = " ".join(gracekit("init", "k8s", "--help").stdout.split())

    assert "a Deployment only if the store is memory and the queue is on a broker" in said


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# -- Docker -----------------------------------------------------------------------------


def test_a_printed_dockerfile_starts_the_service_itself(service):
    """It uses neither a shell nor root, its files are on a volume, and comments have the times."""
    text = printed("docker", f"{service}:svc", "--reply-queues", 'a "$b"')
    lines = text.splitlines()

    assert f'CMD ["gracekit", "run", "{service}:svc"]' in lines
    assert "USER 10001:10001" in lines
    assert 'ENV GRACEKIT_REPLY_QUEUES="a \\"\\$b\\""' in lines
    assert 'VOLUME ["/data"]' in lines
    assert f"--stop-timeout {STOP_S[service]} " in text
    assert f"--start-period={START_S[service]}s" in text
    assert not [line for line in lines if line.startswith("ENV") and "KILL_AFTER" in line]


# -- what is refused, and what is kept back ----------------------------------------------


OF_SYSTEMD: Final = ("systemd", "--systemd-version", "252")  # so that no systemd is asked
MEMORY: Final = ("--store", "memory://", "--transport", "memory://")


@pytest.fixture
def shop(tmp_path) -> None:
    """A service whose topic is no name."""
    (tmp_path / "shop.py").write_text("from gracekit import Service\nsvc = Service('1 shop')\n")


@pytest.mark.parametrize("words", [OF_SYSTEMD, ("k8s", "--image", "i"), ("docker",)])
def test_a_password_is_not_printed(shop, words):
    """The text goes into files that many can read; it says where to write the password instead."""
    url = "amqp://rider:canary@broker/vhost"
    words = ("init", *words, "shop:svc", "--name", "shop")
    result = gracekit(*words, GRACEKIT_TRANSPORT_URL=url)

    assert result.exit_code == 0, result.stderr
    assert "canary" not in result.stdout + result.stderr
    assert "amqp://***@broker/vhost" in result.stdout


@pytest.mark.parametrize("words", [OF_SYSTEMD, ("k8s", "--image", "i")])
def test_a_deployment_with_a_password_elsewhere_is_right_for_doctor(tmp_path, shop, words):
    """Doctor finds no fault in it, and does not say that its queue is the default's file."""
    url = "amqp://rider:canary@127.0.0.1:1/vhost"
    named = ("shop:svc", "--name", "shop")
    file, option = ("u.service", "--unit") if words == OF_SYSTEMD else ("m.yaml", "--manifest")
    printed = gracekit("init", *words, *named, GRACEKIT_TRANSPORT_URL=url).stdout
    (tmp_path / file).write_text(printed)

    assert findings("shop:svc", option, file) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (OF_SYSTEMD, "give another one by --name"),
        (("docker", "--name", "Shop"), "--name 'Shop' is no name"),
        (("k8s", "--image", "i", "--name", "s" * 32), "1 to 31 of"),
        (
            (*OF_SYSTEMD, "--name", "s", "--instances", "2", "--instance", "x"),
            "leave GRACEKIT_",
        ),
        ((*OF_SYSTEMD, "--name", "s", "--instances", "2", "--admin", "[::1]:1"), "one port"),
        (("k8s", "--name", "s", "--image", "i", *MEMORY), "GRACEKIT_ADMIN=0.0.0.0"),
        (
            ("systemd", "--name", "s", "--drain-timeout", "30", "--kill-after", "31"),
            "must be below",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused(shop, words, said):
    """The command exits with 78, prints nothing on standard output, and names a remedy."""
    result = gracekit("init", *words, "shop:svc")

    assert (result.exit_code, result.stdout) == (78, "")
    assert said in result.stderr
