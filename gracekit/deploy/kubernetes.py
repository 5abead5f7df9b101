"""The manifests that run a service on Kubernetes: `gracekit init k8s`.

If files outlive the process, the pod is in a StatefulSet: it gets the same volume at each start,
and its successor begins only after it has ended. They are the store, the queue, or the locks of
runs whose store is on a server. Otherwise, so if the store is in memory, it is in a Deployment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from gracekit.config.settings import variable_name
from gracekit.config.urls import UrlKind, kind_of
from gracekit.config.values import words_in
from gracekit.deploy.plan import NUMBERS, WATCHDOG_S, Plan, commented
from gracekit.deploy.yaml_text import Noted, comment, yaml_text
from gracekit.errors import ConfigError

DATA: Final = "/data"
TEMPORARY: Final = "/tmp"  # noqa: S108 - in the container
TOKENS: Final = "/etc/gracekit/admin"
TLS: Final = "/etc/gracekit/tls"
SECRETS: Final = {
    variable_name("admin_token_file"): f"{TOKENS}/token",
    variable_name("admin_tls"): f"{TLS}/tls.crt,{TLS}/tls.key",
}
"""Variables for the files of the HTTP endpoint, and their paths in a container."""
SECRET_MODE: Final = 0o400
USER_ID: Final = 10_001
LIVE_EVERY_S: Final = 10
READY_EVERY_S: Final = 5
PROBE_TIMEOUT_S: Final = 6
"""Above the 5 s that `gracekit health` waits for an answer."""
PROBES: Final = {"started": "startupz", "ready": "readyz", "live": "livez"}


def manifests(plan: Plan, image: str) -> str:
    """All documents, as one file of YAML.

    Raises:
        ConfigError: the service has neither a door nor an HTTP endpoint for its probes, or a file
            is at a path that the pod cannot write to.
    """
    _check_probes(plan)
    check_socket(plan)
    documents = (_service(plan), _workload(plan, image), _budget(plan))
    text = "---\n".join(map(yaml_text, documents))
    return "\n".join([*_head(plan), text, *commented(NUMBERS, _reasons(plan)), ""])


def _head(plan: Plan) -> Iterator[str]:
    yield f"# {plan.name}.yaml: printed by gracekit init k8s.  kubectl apply -f {plan.name}.yaml"
    for variable, shown in plan.secret().items():
        yield "#"
        yield from comment(
            f"{variable} ({shown}) holds a password, so it is not in this file.\n"
            f"Write the line {variable}=... into a file of mode 0600, and:\n"
            f"  kubectl create secret generic {plan.name} --from-env-file=FILE"
        )
    if plan.settings.admin_token_file:
        yield "#"
        yield "# The tokens of the HTTP endpoint, lines name:token:scope:"
        yield f"#   kubectl create secret generic {plan.name}-admin --from-file=token=FILE"
    if plan.settings.admin_tls:
        yield "#"
        yield f"#   kubectl create secret tls {plan.name}-tls --cert=FILE --key=FILE"


def _check_probes(plan: Plan) -> None:
    if not plan.has_door and not _has_http(plan):
        raise ConfigError(
            f"store_url = {plan.settings.store_url} has no door that `gracekit health` could ask, "
            "so the pod needs an HTTP endpoint for its probes: set GRACEKIT_ADMIN=0.0.0.0:9701 "
            "and GRACEKIT_ADMIN_TOKEN_FILE"
        )


def check_socket(plan: Plan) -> None:
    """Check that a container can create the endpoint's unix socket.

    Raises:
        ConfigError: its directory is not writable there.
    """
    places = [TEMPORARY, DATA] if plan.keeps_files else [TEMPORARY]
    if plan.admin is None or plan.admin.path is None or str(plan.admin.path.parent) in places:
        return
    raise ConfigError(
        f"admin = {plan.admin} is a socket in {plan.admin.path.parent}, where a container may not "
        f"write: give --admin unix:{TEMPORARY}/admin.sock, or an address as 0.0.0.0:9701"
    )


# -- the pod ----------------------------------------------------------------------------


def _workload(plan: Plan, image: str) -> dict[str, object]:
    kind = "StatefulSet" if plan.keeps_files else "Deployment"
    spec: dict[str, object] = {
        "replicas": Noted(1, _REPLICAS if plan.has_files else "Each is a run of its own."),
        "selector": {"matchLabels": _labels(plan)},
        "template": {"metadata": {"labels": _labels(plan)}, "spec": _pod(plan, image)},
    }
    if plan.keeps_files:
        spec = {"serviceName": plan.name} | spec | {"volumeClaimTemplates": [_claim(plan)]}
    files = "store or queue" if plan.has_files else "the locks of runs"
    note = _WHY_STATEFUL.format(files) if plan.keeps_files else _WHY_DEPLOYMENT
    head = {"apiVersion": Noted("apps/v1", note), "kind": kind, "metadata": _metadata(plan)}
    return head | {"spec": spec}


_WHY_STATEFUL: Final = (
    "A StatefulSet, because {} are files: the pod gets the same volume at each\n"
    "start, and its successor begins only after it has ended."
)
_WHY_DEPLOYMENT: Final = "A Deployment, because neither store nor queue is a file."
_REPLICAS: Final = (
    "Not more: each pod would have files of its own, so dedupe, resources and recovery would not\n"
    "work across pods."
)


def _pod(plan: Plan, image: str) -> dict[str, object]:
    volumes = [{"name": "tmp", "emptyDir": {}}, *_secret_volumes(plan)]
    return {
        "terminationGracePeriodSeconds": Noted(plan.stop_s, "As GRACEKIT_KILL_AFTER; see the end."),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "containers": [_container(plan, image)],
        "volumes": volumes,
    }


def _container(plan: Plan, image: str) -> dict[str, object]:
    words = ["gracekit", "run", plan.target, *["--factory"] * plan.factory]
    container: dict[str, object] = {
        "name": plan.name,
        "image": image,
        "command": Noted(
            words,
            "No shell, because it would not pass SIGTERM on. No preStop, because\n"
            "a drain closes the intake by itself.",
        ),
        "env": _environment(plan),
    }
    if _has_http(plan):
        assert plan.admin is not None
        container["ports"] = [{"name": "admin", "containerPort": plan.admin.port}]
    return (
        container
        | _probes(plan)
        | {
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": _mounts(plan),
        }
    )


def _environment(plan: Plan) -> list[object]:
    variables = plan.files_inside(DATA) | plan.other_urls() | plan.runs_inside(DATA)
    variables |= plan.given(with_file=True)
    if plan.admin is not None:
        variables[variable_name("admin")] = str(plan.admin)
    variables |= {name: SECRETS[name] for name in plan.host_files(with_file=True)}
    variables[variable_name("kill_after_s")] = str(plan.stop_s)
    hosts = variables.pop(_HOSTS, "") if _has_names(plan) else ""
    entries: list[object] = [{"name": name, "value": value} for name, value in variables.items()]
    if kind_of(plan.settings.transport_url) is UrlKind.FILE:
        entries[0] = Noted(entries[0], _OWN_QUEUE)
    for name in plan.secret():
        source = {"secretKeyRef": {"name": plan.name, "key": name}}
        entries.append({"name": name, "valueFrom": source})
    if not plan.keeps_files:
        entries += _names_of_pods(plan, variables)
    if _has_names(plan):
        entries += _hosts(plan, hosts)
    return entries


_OWN_QUEUE: Final = (
    "A file, which callers outside of this pod cannot reach: if there are any, print this again\n"
    "with the URL of a broker."
)


def _names_of_pods(plan: Plan, variables: dict[str, str]) -> Iterator[object]:
    """Set host and instance: pods get new names at each start, but queues are named for a host."""
    host, instance = variable_name("host"), variable_name("instance")
    if host not in variables:
        yield Noted({"name": host, "value": plan.name}, "Queues are named for the host: one name.")
    if instance not in variables:
        yield {"name": instance, "valueFrom": _field("metadata.name")}


_HOSTS: Final = variable_name("admin_hosts")
_CLUSTER: Final = ("svc", "cluster.local")
_WHY_HOSTS: Final = (
    "The names that the headless Service gives. Without them the HTTP endpoint answers requests\n"
    "by name with 403. If your cluster's domain is not cluster.local, change it here."
)


def _has_names(plan: Plan) -> bool:
    """Whether the HTTP endpoint can be reached by a DNS name of the cluster."""
    return plan.admin is not None and not plan.admin.is_local


def _hosts(plan: Plan, given: str) -> Iterator[object]:
    """The names of the endpoint: *given*, the Service's, and the pod's own in a StatefulSet.

    Kubernetes replaces `$(NAME)` by variables that are defined earlier in the list.
    """
    names = [plan.name]
    if plan.keeps_files:
        names.append(f"$(POD_NAME).{plan.name}")
        yield {"name": "POD_NAME", "valueFrom": _field("metadata.name")}
    yield {"name": "POD_NAMESPACE", "valueFrom": _field("metadata.namespace")}
    parts = ("$(POD_NAMESPACE)", *_CLUSTER)
    ends = ["".join(f".{part}" for part in parts[:count]) for count in range(len(parts) + 1)]
    found = [*words_in(given), *(name + end for name in names for end in ends)]
    yield Noted({"name": _HOSTS, "value": ",".join(found)}, _WHY_HOSTS)


def _field(path: str) -> dict[str, object]:
    return {"fieldRef": {"fieldPath": path}}


# -- probes -----------------------------------------------------------------------------


def _has_http(plan: Plan) -> bool:
    """Whether the kubelet can probe by HTTP: from outside of the pod, and without a token."""
    admin = plan.admin
    return (
        admin is not None
        and not admin.is_local
        and admin.port > 0
        and plan.settings.admin_open == "probes"
    )


def _probes(plan: Plan) -> dict[str, object]:
    start_tries = math.ceil(plan.start_s / READY_EVERY_S)
    live_tries = math.ceil(WATCHDOG_S / LIVE_EVERY_S)
    return {
        "startupProbe": _probe(plan, "started", every_s=READY_EVERY_S, tries=start_tries),
        "readinessProbe": _probe(plan, "ready", every_s=READY_EVERY_S, tries=1),
        "livenessProbe": _probe(plan, "live", every_s=LIVE_EVERY_S, tries=live_tries),
    }


def _probe(plan: Plan, what: str, *, every_s: int, tries: int) -> dict[str, object]:
    ask: dict[str, object] = {"exec": {"command": ["gracekit", "health", f"--{what}"]}}
    if _has_http(plan):
        get: dict[str, object] = {"path": f"/{PROBES[what]}", "port": "admin"}
        if plan.settings.admin_tls:
            get["scheme"] = "HTTPS"
        ask = {"httpGet": get}
    times = {"timeoutSeconds": PROBE_TIMEOUT_S, "failureThreshold": tries}
    return ask | {"periodSeconds": every_s} | times


# -- volumes ----------------------------------------------------------------------------


def _claim(plan: Plan) -> dict[str, object]:
    size = Noted("1Gi", "Journal and queue: some kilobytes for each task, kept for `retention`.")
    if not plan.has_files:
        size = Noted("16Mi", "The locks, doors and pipes of runs: some kilobytes.")
    return {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


def _mounts(plan: Plan) -> list[object]:
    mounts: list[object] = [{"name": "tmp", "mountPath": TEMPORARY}]
    if plan.keeps_files:
        mounts.append({"name": "data", "mountPath": DATA})
    for name, place in _secrets(plan):
        mounts.append({"name": name, "mountPath": place, "readOnly": True})
    return mounts


def _secrets(plan: Plan) -> list[tuple[str, str]]:
    """The volumes with the HTTP endpoint's secrets, and where each is mounted."""
    settings, found = plan.settings, []
    if settings.admin_token_file:
        found.append(("admin", TOKENS))
    if settings.admin_tls:
        found.append(("tls", TLS))
    return found


def _secret_volumes(plan: Plan) -> list[dict[str, object]]:
    return [
        {"name": name, "secret": {"secretName": f"{plan.name}-{name}", "defaultMode": SECRET_MODE}}
        for name, _ in _secrets(plan)
    ]


# -- around the pod ---------------------------------------------------------------------


def _service(plan: Plan) -> dict[str, object]:
    note = "A DNS name for the pods; operators find them by it also while they start and drain."
    spec: dict[str, object] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(plan),
    }
    if _has_http(plan):
        assert plan.admin is not None
        spec["ports"] = [{"name": "admin", "port": plan.admin.port, "targetPort": "admin"}]
    head = {"apiVersion": Noted("v1", note), "kind": "Service", "metadata": _metadata(plan)}
    return head | {"spec": spec}


def _budget(plan: Plan) -> dict[str, object]:
    note = "One pod at a time. `minAvailable: 1` with one replica would block a drain of its node."
    head = {"apiVersion": Noted("policy/v1", note), "kind": "PodDisruptionBudget"}
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(plan)}}
    return head | {"metadata": _metadata(plan), "spec": spec}


def _labels(plan: Plan) -> dict[str, object]:
    return {"app.kubernetes.io/name": plan.name}


def _metadata(plan: Plan) -> dict[str, object]:
    return {"name": plan.name, "labels": _labels(plan)}


def _reasons(plan: Plan) -> Iterator[str]:
    yield from plan.reasons("terminationGracePeriodSeconds", "startupProbe, in all,")
    yield "Kubernetes cannot extend a pod's grace period while it ends: a drain has these seconds."
    yield (
        f"livenessProbe: fails after {WATCHDOG_S} s in which the event loop did not answer. It "
        "passes during a drain; readinessProbe fails from the first moment of a drain."
    )
