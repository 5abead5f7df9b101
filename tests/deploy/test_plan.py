"""What a plan takes over from the settings, and the text that units and manifests are made of."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gracekit.admin.access import Access, Asking, Need, RefusedError
from gracekit.config.loading import load
from gracekit.config.values import words_in
from gracekit.deploy.docker import dockerfile
from gracekit.deploy.kubernetes import check_socket, manifests
from gracekit.deploy.plan import Plan, name_for
from gracekit.deploy.systemd import UnitOptions, unit
from gracekit.doctor.units import _environment, parse_unit
from gracekit.errors import ConfigError


def plan(config: Path | None = None, /, **env: str) -> Plan:
    variables = {f"GRACEKIT_{name.upper()}": value for name, value in env.items()}
    return Plan(
        name="shop",
        topic="shop",
        target="shop:svc",
        factory=False,
        app_dir=Path("/srv/app"),
        settings=load({}, variables, config),
        start_hooks=0,
        config=config,
    )


def unit_of(
    one: Plan,
    *,
    instances: int | None = None,
    user: str = "shop",
    app: str = "/usr/bin/gracekit",
    interpreter: str = "/usr/bin/python3",
) -> str:
    options = UnitOptions(
        instances=instances,
        version=252,
        user=user,
        program=(app,),
        interpreter=Path(interpreter),
    )
    return unit(one, options)


def pod_of(one: Plan, image: str = "i") -> dict[str, Any]:
    found = {one["kind"]: one for one in yaml.safe_load_all(manifests(one, image))}
    workload = found.get("StatefulSet") or found["Deployment"]
    return workload["spec"]["template"]["spec"]


def env_of(one: Plan) -> dict[str, Any]:
    (container,) = pod_of(one)["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# -- names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "name"),
    [("compute", "compute"), ("Nova.Compute_1", "nova-compute-1"), ("a@b", "a-b")],
)
def test_a_name_is_made_from_the_topic(topic, name):
    """Letters become lower-case, and all but letters and digits becomes a dash."""
    assert name_for(topic, None) == name


@pytest.mark.parametrize("given_name", ["", "1a", "a-", "Ab", "a.b", "a" * 32, "ä"])
def test_a_name_that_users_or_kubernetes_do_not_take_is_refused(given_name):
    """One name is for a user, a unit and the objects of Kubernetes."""
    with pytest.raises(ConfigError, match="give another one by --name"):
        name_for("shop", given_name)


# -- settings ---------------------------------------------------------------------------


def test_a_longer_kill_after_is_kept(tmp_path):
    """An operator may know that the platform waits longer than a run needs."""
    assert (plan().stop_s, plan(kill_after="2m").stop_s) == (31, 120)


def test_only_what_was_set_is_repeated(tmp_path):
    """Defaults are left out, as a new version may change them; values of a settings file are
    repeated for a pod, which does not have the file, and not for a unit, which does.
    """
    file = tmp_path / "shop.toml"
    file.write_text("threads = 7\n")
    one = plan(file, max_running="9")

    words = unit_of(one)

    assert "GRACEKIT_MAX_RUNNING=9" in words
    assert f"GRACEKIT_CONFIG={file}" in words
    assert "THREADS" not in words
    assert {"GRACEKIT_MAX_RUNNING": "9", "GRACEKIT_THREADS": "7"}.items() <= env_of(one).items()


def test_files_go_where_the_platform_keeps_them():
    """A relative path is put into the state directory; an absolute one stays and becomes
    writable.
    """
    one = plan(store_url="sqlite:///own.db", transport_url="sqlite:////mnt/big/queue.db")

    words = unit_of(one)

    assert "GRACEKIT_STORE_URL=sqlite:////var/lib/shop/own.db" in words
    assert "GRACEKIT_TRANSPORT_URL=sqlite:////mnt/big/queue.db" in words
    assert parse_unit(words)["ReadWritePaths"] == "/mnt/big"


SECRETS: Final = {"admin_token_file": "tokens", "admin_tls": "tls/cert.pem, /etc/key.pem"}


def test_a_unit_names_the_files_that_were_given(tmp_path, monkeypatch):
    """It starts the service in another directory than the one in which it was printed."""
    monkeypatch.chdir(tmp_path)

    variables, _ = _environment(parse_unit(unit_of(plan(**SECRETS))))

    assert variables["GRACEKIT_ADMIN_TOKEN_FILE"] == f"{tmp_path}/tokens"
    assert variables["GRACEKIT_ADMIN_TLS"] == f"{tmp_path}/tls/cert.pem,/etc/key.pem"


def test_an_image_names_no_file_of_this_machine():
    """The container does not have it: variables name its own places, and comments how to mount
    there.
    """
    text = dockerfile(plan(admin="0.0.0.0:9701", loop="uvloop", **SECRETS))

    assert 'ENV GRACEKIT_ADMIN_TOKEN_FILE="/etc/gracekit/admin/token"' in text
    assert 'ENV GRACEKIT_ADMIN_TLS="/etc/gracekit/tls/tls.crt,/etc/gracekit/tls/tls.key"' in text
    assert "docker run -v FILE:/etc/gracekit/admin/token:ro ..." in text
    assert "--stop-timeout 31 -p 9701:9701" in text
    assert "requirements.txt names gracekit[web,prometheus,uvloop]." in text


def test_a_container_keeps_its_files_in_its_volume():
    """The directories of an absolute path are this machine's: a pod may not write there, and what a
    container writes there does not outlive it.
    """
    one = plan(store_url="sqlite:////home/api/own.db", transport_url="sqlite:////data/q/queue.db")
    files = {
        "GRACEKIT_STORE_URL": "sqlite:////data/own.db",
        "GRACEKIT_TRANSPORT_URL": "sqlite:////data/q/queue.db",
    }

    assert files.items() <= env_of(one).items()
    for name, value in files.items():
        assert f'ENV {name}="{value}"' in dockerfile(one).splitlines()


def test_two_files_of_one_name_do_not_become_one():
    """Store and queue in one file would be refused by each start, so no such image is printed."""
    one = plan(store_url="sqlite:////a/own.db", transport_url="sqlite:////b/own.db")

    for printed in (lambda: manifests(one, "i"), lambda: dockerfile(one)):
        with pytest.raises(ConfigError, match="would both be"):
            printed()


@pytest.mark.parametrize(
    ("place", "store", "is_right"),
    [
        ("/tmp/admin.sock", "memory://", True),
        ("/data/admin.sock", "sqlite:///own.db", True),
        ("/data/admin.sock", "memory://", False),
        ("/run/admin.sock", "sqlite:///own.db", False),
    ],
)
def test_a_socket_is_where_a_container_may_write(place, store, is_right):
    """Elsewhere each start would end with 78."""
    more = {"transport_url": "memory://"} if store == "memory://" else {}
    one = plan(admin=f"unix:{place}", store_url=store, **more)

    with contextlib.nullcontext() if is_right else pytest.raises(ConfigError, match="unix:/tmp"):
        check_socket(one)


@pytest.mark.parametrize(
    ("settings", "home", "temporary"),
    [
        ({"store_url": "sqlite:////home/api/own.db"}, "read-only", "yes"),
        ({"transport_url": "sqlite:////root/queue.db"}, "read-only", "yes"),
        ({"admin": "unix:/run/user/1/a.sock"}, "read-only", "yes"),
        ({"admin_token_file": "/home/api/tokens"}, "read-only", "yes"),
        ({"admin_tls": "/etc/ssl/cert,/root/key"}, "read-only", "yes"),
        ({"store_url": "sqlite:////var/tmp/own.db"}, "yes", None),
        ({"admin": "unix:/tmp/a.sock"}, "yes", None),
    ],
)
def test_a_unit_does_not_hide_the_files_of_its_settings(settings, home, temporary):
    """Store, queue and socket can be written wherever they are, and secrets can be read."""
    found = parse_unit(unit_of(plan(**settings)))

    assert (found["ProtectHome"], found.get("PrivateTmp")) == (home, temporary)


def test_a_unit_does_not_hide_a_settings_file_or_an_interpreter(tmp_path):
    """The script of a virtual environment names an interpreter that may be in a home."""
    file = tmp_path / "shop.toml"  # below /tmp
    file.write_text("threads = 7\n")

    hidden = parse_unit(unit_of(plan(file), interpreter="/root/.pyenv/versions/3.12/bin/python3"))

    assert hidden["ProtectHome"] == "read-only"
    assert ("PrivateTmp" in hidden) is not str(tmp_path.resolve()).startswith("/tmp/")


@pytest.mark.parametrize(
    ("app", "home", "temporary"),
    [
        ("/usr/bin/gracekit", "yes", "yes"),
        ("/home/me/bin/gracekit", "read-only", "yes"),
        ("/tmp/venv/bin/gracekit", "yes", None),
    ],
)
def test_a_unit_does_not_hide_what_it_starts(app, home, temporary):
    """An application in a home stays readable, and one in /tmp is not hidden by a private /tmp."""
    found = parse_unit(unit_of(plan(), app=app))

    assert (found["ProtectHome"], found.get("PrivateTmp")) == (home, temporary)


def test_each_instance_has_a_name_and_a_socket_of_its_own():
    """systemd puts the number of the instance into both."""
    words = unit_of(plan(admin="unix:/run/shop/admin.sock"), instances=2)

    assert "GRACEKIT_INSTANCE=%H-%i" in words
    assert "GRACEKIT_ADMIN=unix:/run/shop/%i/admin.sock" in words
    assert "systemctl enable --now shop@{0..1}" in words


# -- probes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admin", "how"),
    [
        ({}, "exec"),
        ({"admin": "127.0.0.1:9701"}, "exec"),  # of the pod itself, where no kubelet comes from
        ({"admin": "0.0.0.0:9701", "admin_token_file": "t"}, "httpGet"),
        ({"admin": "0.0.0.0:9701", "admin_token_file": "t", "admin_open": "nothing"}, "exec"),
    ],
)
def test_probes_go_by_http_where_the_kubelet_can_ask(admin, how):
    """The kubelet connects from outside of the pod, and has no token."""
    (container,) = pod_of(plan(**admin))["containers"]

    assert [how in container[f"{one}Probe"] for one in ("startup", "readiness", "liveness")] == [
        True
    ] * 3


@pytest.mark.parametrize(
    "name",
    [
        "shop",
        "shop-0.shop",
        "shop-0.shop.web",
        "shop-0.shop.web.svc",
        "shop-0.shop.web.svc.cluster.local",
        "shop.web.svc.cluster.local",
        "shop.example.org",
    ],
)
def test_the_endpoint_of_a_pod_admits_its_names_in_the_cluster(name):
    """Operators ask by the names that the headless Service gives, or by those that they set."""
    one = plan(admin="0.0.0.0:9701", admin_token_file="t", admin_hosts="shop.example.org")
    access = Access(hosts=words_in(expanded(one, "shop-0", "web")["GRACEKIT_ADMIN_HOSTS"]))

    assert access.admit(Asking(host=f"{name}:9701"), Need.PROBE) == ""
    with pytest.raises(RefusedError):
        access.admit(Asking(host="shop-1.shop:9701"), Need.PROBE)


def test_a_pod_without_files_has_no_name_of_its_own():
    """The headless Service names the pods of a StatefulSet alone; those of a Deployment share
    its.
    """
    admin = {"admin": "0.0.0.0:9701", "admin_token_file": "t"}
    one = plan(store_url="memory://", transport_url="amqp://broker/v", **admin)

    assert expanded(one, "shop-x", "web")["GRACEKIT_ADMIN_HOSTS"] == (
        "shop,shop.web,shop.web.svc,shop.web.svc.cluster.local"
    )


@pytest.mark.parametrize("admin", [{}, {"admin": "unix:/tmp/admin.sock"}])
def test_a_pod_without_a_port_names_no_hosts(admin):
    """Nobody can ask it by a name."""
    assert not {"GRACEKIT_ADMIN_HOSTS", "POD_NAME", "POD_NAMESPACE"} & env_of(plan(**admin)).keys()


def expanded(one: Plan, pod: str, namespace: str) -> dict[str, str]:
    """The environment of a pod, as Kubernetes makes it: `$(NAME)` is a variable from above."""
    fields, found = {"metadata.name": pod, "metadata.namespace": namespace}, dict[str, str]()
    for entry in pod_of(one)["containers"][0]["env"]:
        value = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[entry["name"]] = value
    return found


def test_a_service_without_files_is_a_deployment():
    """Its pods get new names, so the host, for which queues are named, is fixed."""
    admin = {"admin": "0.0.0.0:9701", "admin_token_file": "t"}
    one = plan(store_url="memory://", transport_url="amqp://broker/v", **admin)

    found = list(yaml.safe_load_all(manifests(one, "i")))
    for each in found:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)

    assert [each["kind"] for each in found] == ["Service", "Deployment", "PodDisruptionBudget"]
    assert env_of(one)["GRACEKIT_HOST"] == "shop"
    assert "volumeClaimTemplates" not in manifests(one, "i")


SERVERS: Final = {"store_url": "postgresql://shop@localhost/d", "transport_url": "amqp://broker/v"}


@pytest.mark.parametrize(
    ("named", "unit_s", "pod_s"),
    [
        ({}, "/var/lib/shop/gracekit-runs", "/data/gracekit-runs"),
        ({"run_directory": "runs"}, "/var/lib/shop/runs", "/data/runs"),
        ({"run_directory": "/mnt/x/runs"}, "/mnt/x/runs", "/data/runs"),
    ],
)
def test_the_locks_of_a_store_on_a_server_are_where_the_service_may_write(named, unit_s, pod_s):
    """They stay when the process ends: by them the next one knows that it is dead."""
    one = plan(**SERVERS, **named)
    words = unit_of(one)

    assert f"Environment=GRACEKIT_STORE_URL={SERVERS['store_url']}" in words.splitlines()
    assert f"Environment=GRACEKIT_RUN_DIRECTORY={unit_s}" in words.splitlines()
    assert ("ReadWritePaths=/mnt/x" in words) == unit_s.startswith("/mnt")
    assert env_of(one)["GRACEKIT_RUN_DIRECTORY"] == pod_s
    assert f'ENV GRACEKIT_RUN_DIRECTORY="{pod_s}"' in dockerfile(one).splitlines()


def test_a_pod_with_its_store_on_a_server_needs_a_small_volume():
    """It is for the run directory; replicas share the store, so there may be more."""
    text = manifests(plan(**SERVERS), "i")
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for each in found.values():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    (claim,) = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]

    assert claim["spec"]["resources"]["requests"]["storage"] == "16Mi"
    assert "because the locks of runs are files" in text
    assert "Each is a run of its own." in text
    assert container["livenessProbe"]["exec"]["command"] == ["gracekit", "health", "--live"]


def test_an_image_for_a_store_on_a_server_names_its_driver():
    """The application chooses how psycopg finds libpq, and an image mostly has none."""
    text = dockerfile(plan(**SERVERS))

    assert "requirements.txt names gracekit[postgres] and psycopg[binary]." in text
    assert "HEALTHCHECK" in text


@pytest.mark.parametrize("printed", [unit_of, lambda one: manifests(one, "i"), dockerfile])
def test_the_password_of_a_store_is_not_printed(printed):
    """It says where to write the URL instead."""
    text = printed(plan(store_url="postgresql://shop:canary@localhost/d"))

    assert "canary" not in text
    assert "GRACEKIT_STORE_URL (postgresql://***@localhost/d) holds a password" in text


# -- text -------------------------------------------------------------------------------

printable = st.text().filter(str.isprintable)


@given(printable, printable, printable)
def test_yaml_reads_back_what_was_written(target, image, host):
    """Any text in a name or a setting arrives unchanged in the manifest."""
    one = msgspec.structs.replace(plan(admin_hosts=host), target=target)

    (container,) = pod_of(one, image)["containers"]

    assert container["image"] == image
    assert container["command"] == ["gracekit", "run", target]
    assert env_of(one).get("GRACEKIT_ADMIN_HOSTS", "") == one.settings.admin_hosts


@pytest.mark.parametrize("name", ["null", "y", "true", "off"])
def test_a_name_is_a_text(name):
    """YAML reads some words as other types if they are not in quotes."""
    found = list(yaml.safe_load_all(manifests(msgspec.structs.replace(plan(), name=name), "i")))
    for each in found:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)

    assert {each["metadata"]["name"] for each in found} == {name}


@pytest.mark.parametrize("value", ["a\nb", "\x1b[31m"])
def test_what_is_not_printable_is_refused(value):
    """A line break in a value could add a directive, or a key."""
    with pytest.raises(ConfigError, match="cannot stand in"):
        unit_of(plan(reply_queues=value))
    with pytest.raises(ConfigError, match="cannot stand in"):
        manifests(plan(reply_queues=value), "i")


@pytest.mark.parametrize("user", ["shop", "_shop", "svc.shop-1", "1001"])
def test_a_unit_names_a_user(user):
    """By name, or by number."""
    assert parse_unit(unit_of(plan(), user=user))["User"] == user


@pytest.mark.parametrize(
    "user", ["", "api\nExecStartPre=+/bin/x", "a b", "%i", "-a", "a" * 32, "a\\", "a;b"]
)
def test_what_is_no_user_is_refused(user):
    """A line of its own in the unit would be run by root."""
    with pytest.raises(ConfigError, match="--user"):
        unit_of(plan(), user=user)


LINE: Final = "x\nExecStartPre=+/bin/x"


@pytest.mark.parametrize(
    "changed",
    [
        {"target": LINE},
        {"app_dir": Path("/srv") / LINE},
        {"app_dir": Path("/srv/x\\")},  # goes on in the next line
        {"settings": load({}, {"GRACEKIT_ADMIN": f"unix:/run/{LINE}"})},
        {"settings": load({}, {"GRACEKIT_STORE_URL": f"sqlite:////srv/{LINE}/own.db"})},
    ],
)
def test_no_word_of_a_unit_becomes_a_directive(changed):
    """Whatever is given, each directive is one that gracekit writes."""
    with pytest.raises(ConfigError, match="cannot stand in a unit"):
        unit_of(msgspec.structs.replace(plan(), **changed))


def test_a_socket_of_instances_may_have_a_blank_in_its_name():
    """A variable of the unit is one word."""
    words = unit_of(plan(admin="unix:/run/shop/the admin.sock"), instances=2)

    assert 'Environment="GRACEKIT_ADMIN=unix:/run/shop/%i/the admin.sock"' in words.splitlines()


def test_no_word_of_a_container_becomes_a_line():
    """Neither in a manifest nor in a Dockerfile."""
    one = msgspec.structs.replace(plan(), target="x\nUSER root")

    with pytest.raises(ConfigError, match="cannot stand in"):
        manifests(one, "i")
    with pytest.raises(ConfigError, match="cannot stand in"):
        manifests(plan(), "i\nx: y")
    assert "USER root" not in dockerfile(one).splitlines()


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
@example("unset")
def test_doctor_reads_back_what_a_unit_says(value):
    """Blanks, quotes, backslashes, dollars and percent signs arrive unchanged."""
    variables, _ = _environment(parse_unit(unit_of(plan(reply_queues=value))))

    assert variables["GRACEKIT_REPLY_QUEUES"] == value
