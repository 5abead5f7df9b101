"""The manifests that run a service on Kubernetes: `gracekit init k8s`.

If files outlive the process, the pod is in a StatefulSet: it gets the same volume at each start,
and its successor begins only after it has ended. They are the store, the queue, or the locks of
runs whose store is on a server. Otherwise, so if the store is in memory, it is in a Deployment.

Each text in the manifests that is not written here is in the quotes of `_quoted`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from string import Template
from typing import Final

from gracekit.config.settings import variable_name
from gracekit.config.urls import UrlKind, kind_of
from gracekit.config.values import words_in
from gracekit.deploy.plan import NUMBERS, WATCHDOG_S, Plan, commented, printable
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
USER_ID: Final = 10_001
LIVE_EVERY_S: Final = 10
READY_EVERY_S: Final = 5
PROBE_TIMEOUT_S: Final = 6
"""Above the 5 s that `gracekit health` waits for an answer."""

_SERVICE: Final = Template("""\
# A DNS name for the pods; operators find them by it also while they start and drain.
apiVersion: v1
kind: Service
metadata:
  name: $name
  labels: $labels
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: $labels
  ports: [$service_port]
""")
_WORKLOAD: Final = Template("""\
---
$why
apiVersion: apps/v1
kind: $kind
metadata:
  name: $name
  labels: $labels
spec:
  $replicas
  replicas: 1
  selector:
    matchLabels: $labels
  template:
    metadata:
      labels: $labels
    spec:
      # As GRACEKIT_KILL_AFTER; see the end.
      terminationGracePeriodSeconds: $stop_s
      securityContext:
        runAsNonRoot: true
        runAsUser: $user
        runAsGroup: $user
        fsGroup: $user
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {type: RuntimeDefault}
      automountServiceAccountToken: false
      containers:
        - name: $name
          image: $image
          # No shell, because it would not pass SIGTERM on. No preStop, because
          # a drain closes the intake by itself.
          command: [$command]
          env:
            $environment
          ports: [$container_port]
          $probes
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            $mounts
      volumes:
        $volumes
""")
_STATEFUL: Final = Template("""\
  serviceName: $name
  volumeClaimTemplates:
    - metadata: {name: data}
      spec:
        accessModes: [ReadWriteOnce]
        resources:
          requests:
            # $size_reason
            storage: $size
""")
_BUDGET: Final = Template("""\
---
# One pod at a time. `minAvailable: 1` with one replica would block a drain of its node.
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: $name
  labels: $labels
spec:
  maxUnavailable: 1
  selector:
    matchLabels: $labels
""")

_MEMORY: Final = {
    "kind": "Deployment",
    "why": "# A Deployment, because neither store nor queue is a file.",
    "replicas": "# Each is a run of its own.",
}
_FILES: Final = {
    "kind": "StatefulSet",
    "why": (
        "# A StatefulSet, because store or queue are files: the pod gets the same volume at each\n"
        "# start, and its successor begins only after it has ended."
    ),
    "replicas": (
        "# Not more: each pod would have files of its own, so dedupe, resources and recovery\n"
        "  # would not work across pods."
    ),
    "size_reason": "Journal and queue: some kilobytes for each task, kept for `retention`.",
    "size": "1Gi",
}
_LOCKS: Final = {
    "kind": "StatefulSet",
    "why": _FILES["why"].replace("store or queue", "the locks of runs"),
    "replicas": _MEMORY["replicas"],
    "size_reason": "The locks, doors and pipes of runs: some kilobytes.",
    "size": "16Mi",
}


def manifests(plan: Plan, image: str) -> str:
    """All documents, as one file of YAML.

    Raises:
        ConfigError: the service has neither a door nor an HTTP endpoint for its probes, a file
            is at a path that the pod cannot write to, or a text is not printable.
    """
    _check_probes(plan)
    check_socket(plan)
    kind = _FILES if plan.has_files else _LOCKS if plan.has_server else _MEMORY
    words = kind | _pod(plan, image)
    documents = [_SERVICE, _WORKLOAD, *[_STATEFUL] * plan.keeps_files, _BUDGET]
    text = "".join(one.substitute(words) for one in documents)
    return "\n".join([*_head(plan), text, *commented(NUMBERS, _reasons(plan)), ""])


def _head(plan: Plan) -> Iterator[str]:
    yield f"# {plan.name}.yaml: printed by gracekit init k8s.  kubectl apply -f {plan.name}.yaml"
    for variable, shown in plan.secret().items():
        yield "#"
        yield f"# {variable} ({shown}) holds a password, so it is not in this file."
        yield f"# Write the line {variable}=... into a file of mode 0600, and:"
        yield f"#   kubectl create secret generic {plan.name} --from-env-file=FILE"
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


def _pod(plan: Plan, image: str) -> dict[str, object]:
    port = plan.admin.port if plan.admin is not None and _has_http(plan) else None
    return {
        "name": _quoted(plan.name),
        "labels": f"{{app.kubernetes.io/name: {_quoted(plan.name)}}}",
        "service_port": f"{{name: admin, port: {port}, targetPort: admin}}" if port else "",
        "container_port": f"{{name: admin, containerPort: {port}}}" if port else "",
        "stop_s": plan.stop_s,
        "user": USER_ID,
        "image": _quoted(image),
        "command": f"gracekit, run, {_quoted(plan.target)}" + ", --factory" * plan.factory,
        "environment": _lines(12, _environment(plan)),
        "probes": _lines(10, _probes(plan)),
        "mounts": _lines(12, _mounts(plan)),
        "volumes": _lines(8, _volumes(plan)),
    }


def _environment(plan: Plan) -> Iterator[str]:
    variables = plan.files_inside(DATA) | plan.other_urls() | plan.runs_inside(DATA)
    variables |= plan.given(with_file=True)
    if plan.admin is not None:
        variables[variable_name("admin")] = str(plan.admin)
    variables |= {name: SECRETS[name] for name in plan.host_files(with_file=True)}
    variables[variable_name("kill_after_s")] = str(plan.stop_s)
    variables[variable_name("on_user_stop")] = "restart"  # the wish is in the number of replicas
    hosts = variables.pop(_HOSTS, "") if _has_names(plan) else ""
    if kind_of(plan.settings.transport_url) is UrlKind.FILE:
        yield "# A file, which callers outside of this pod cannot reach: if there are any, print"
        yield "# this again with the URL of a broker."
    for name, value in variables.items():
        yield from _variable(name, value)
    for name in plan.secret():
        yield f"- name: {name}"
        yield f"  valueFrom: {{secretKeyRef: {{name: {_quoted(plan.name)}, key: {name}}}}}"
    if not plan.keeps_files:
        yield from _names_of_pods(plan, variables)
    if _has_names(plan):
        yield from _hosts(plan, hosts)


def _names_of_pods(plan: Plan, variables: Mapping[str, str]) -> Iterator[str]:
    """Set host and instance: pods get new names at each start, but queues are named for a host."""
    host, instance = variable_name("host"), variable_name("instance")
    if host not in variables:
        yield "# Queues are named for the host: one name."
        yield from _variable(host, plan.name)
    if instance not in variables:
        yield from _field(instance, "metadata.name")


_HOSTS: Final = variable_name("admin_hosts")
_DOMAINS: Final = ("", *(".$(POD_NAMESPACE)" + end for end in ("", ".svc", ".svc.cluster.local")))


def _has_names(plan: Plan) -> bool:
    """Whether the HTTP endpoint can be reached by a DNS name of the cluster."""
    return plan.admin is not None and not plan.admin.is_local


def _hosts(plan: Plan, given: str) -> Iterator[str]:
    """The names of the endpoint: *given*, the Service's, and the pod's own in a StatefulSet.

    Kubernetes replaces `$(NAME)` by variables that are defined earlier in the list.
    """
    names = [plan.name]
    if plan.keeps_files:
        names.append(f"$(POD_NAME).{plan.name}")
        yield from _field("POD_NAME", "metadata.name")
    yield from _field("POD_NAMESPACE", "metadata.namespace")
    found = [*words_in(given), *(name + domain for name in names for domain in _DOMAINS)]
    yield "# The names that the headless Service gives. Without them the HTTP endpoint answers"
    yield "# requests by name with 403. If your cluster's domain is not cluster.local, change it"
    yield "# here."
    yield from _variable(_HOSTS, ",".join(found))


def _variable(name: str, value: str) -> tuple[str, str]:
    return f"- name: {name}", f"  value: {_quoted(value)}"


def _field(name: str, path: str) -> tuple[str, str]:
    return f"- name: {name}", f"  valueFrom: {{fieldRef: {{fieldPath: {path}}}}}"


def _probes(plan: Plan) -> Iterator[str]:
    scheme = "HTTPS" if plan.settings.admin_tls else "HTTP"
    for probe, option, path, every_s, fails_after_s in (
        ("startup", "--started", "/startupz", READY_EVERY_S, plan.start_s),
        ("readiness", "--ready", "/readyz", READY_EVERY_S, READY_EVERY_S),
        ("liveness", "--live", "/livez", LIVE_EVERY_S, WATCHDOG_S),
    ):
        yield f"{probe}Probe:"
        if _has_http(plan):
            yield f"  httpGet: {{path: {path}, port: admin, scheme: {scheme}}}"
        else:
            yield f"  exec: {{command: [gracekit, health, {option}]}}"
        yield f"  periodSeconds: {every_s}"
        yield f"  timeoutSeconds: {PROBE_TIMEOUT_S}"
        yield f"  failureThreshold: {math.ceil(fails_after_s / every_s)}"


def _has_http(plan: Plan) -> bool:
    """Whether the kubelet can probe by HTTP: from outside of the pod, and without a token."""
    admin = plan.admin
    return (
        admin is not None
        and not admin.is_local
        and admin.port > 0
        and plan.settings.admin_open == "probes"
    )


def _mounts(plan: Plan) -> Iterator[str]:
    yield f"- {{name: tmp, mountPath: {TEMPORARY}}}"
    if plan.keeps_files:
        yield f"- {{name: data, mountPath: {DATA}}}"
    if plan.settings.admin_token_file:
        yield f"- {{name: admin, mountPath: {TOKENS}, readOnly: true}}"
    if plan.settings.admin_tls:
        yield f"- {{name: tls, mountPath: {TLS}, readOnly: true}}"


def _volumes(plan: Plan) -> Iterator[str]:
    yield "- {name: tmp, emptyDir: {}}"
    for name, file in ("admin", plan.settings.admin_token_file), ("tls", plan.settings.admin_tls):
        if file:
            secret = f"{{secretName: {plan.name}-{name}, defaultMode: {0o400}}}"
            yield f"- {{name: {name}, secret: {secret}}}"


# -- text -------------------------------------------------------------------------------


def _lines(indent: int, lines: Iterable[str]) -> str:
    """*lines* for a place in a template that is *indent* columns from the left."""
    return f"\n{' ' * indent}".join(lines)


def _quoted(text: str) -> str:
    """*text* as YAML, which reads each string of JSON as that string."""
    return json.dumps(printable(text, "a manifest"), ensure_ascii=False)


def _reasons(plan: Plan) -> Iterator[str]:
    yield from plan.reasons("terminationGracePeriodSeconds", "startupProbe, in all,")
    yield "Kubernetes cannot extend a pod's grace period while it ends: a drain has these seconds."
    yield (
        f"livenessProbe: fails after {WATCHDOG_S} s in which the event loop did not answer. It "
        "passes during a drain; readinessProbe fails from the first moment of a drain."
    )
