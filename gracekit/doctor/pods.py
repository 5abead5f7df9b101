"""Checks of Kubernetes manifests: grace periods, start commands, volumes.

YAML needs PyYAML to be installed; JSON needs no package.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from gracekit.config.settings import Settings, variable_name
from gracekit.config.urls import UrlKind, file_of, file_url, kind_of
from gracekit.config.values import PREFIX, format_duration, parse_duration
from gracekit.doctor.finding import Finding, Level, fail, ok, skip, told, warn
from gracekit.doctor.grace import compare, doubted, not_known, refused
from gracekit.doctor.start_command import (
    check_wait,
    given_by,
    hides_signals,
    waits_s,
)
from gracekit.errors import ConfigError
from gracekit.store.place import RUN_DIRECTORY

DEFAULT_GRACE_S: Final = 30.0  # terminationGracePeriodSeconds
KILL_AFTER: Final = f"{PREFIX}KILL_AFTER"
DEEPEST: Final = 12


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod template of a manifest.

    Attributes:
        name: `Deployment compute`.
        spec: Its PodSpec.
        replicas: The number of replicas.
        claims: Names of the volume claim templates: each pod gets its own, lasting volume.
    """

    name: str
    spec: Mapping[str, Any]
    replicas: int = 1
    claims: frozenset[str] = frozenset()


def check_manifest(settings: Settings, path: Path) -> Iterator[Finding]:
    """Check every container in a manifest that runs, or may run, gracekit."""
    documents = read_documents(path)
    if documents is None:
        yield fail(
            "manifest",
            f"{path} is YAML, and PyYAML is not installed here: nothing in it was judged",
            "pip install 'gracekit[kubernetes]', or give JSON: kubectl get sts NAME -o json",
        )
        return
    pods = [pod for document in documents for pod in find_pods(document)]
    if not pods:
        yield fail(
            "manifest",
            f"{path} describes no pod: no `containers` in it",
            "name the manifest of the service's Deployment, StatefulSet or Pod",
        )
    for pod in pods:
        for container in _ours(pod):
            yield from _check_container(settings, pod, container)


def read_documents(path: Path) -> list[Any] | None:
    """The documents of a JSON or YAML file; None for YAML if PyYAML is missing.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        return None
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


_NOT_NAMED: Final = Pod(name="pod", spec={})


def find_pods(value: Any, around: Pod = _NOT_NAMED, depth: int = 0) -> Iterator[Pod]:
    """Yield the pod templates in a manifest, whatever its kind."""
    if depth > DEEPEST:
        return
    if isinstance(value, list):
        for item in value:
            yield from find_pods(item, around, depth + 1)
    if not isinstance(value, dict):
        return
    if "kind" in value:
        metadata = value.get("metadata")
        label = metadata.get("name", "") if isinstance(metadata, dict) else ""
        around = msgspec.structs.replace(around, name=f"{value['kind']} {label}".strip())
    if isinstance(value.get("replicas"), int):
        around = msgspec.structs.replace(around, replicas=value["replicas"])
    if isinstance(claims := value.get("volumeClaimTemplates"), list):
        around = msgspec.structs.replace(around, claims=frozenset(map(_name_of_claim, claims)))
    if isinstance(value.get("containers"), list):
        yield msgspec.structs.replace(around, spec=value)
        return
    for key in ("items", "spec", "template", "jobTemplate"):
        yield from find_pods(value.get(key), around, depth + 1)


def _name_of_claim(claim: Any) -> str:
    metadata = claim.get("metadata") if isinstance(claim, dict) else None
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def _ours(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """The containers with settings or commands of gracekit; all containers if there are none."""
    containers = [one for one in pod.spec["containers"] if isinstance(one, dict)]
    ours = [
        one
        for one in containers
        if any(name.startswith(PREFIX) for name in (*_environment(one), *_hidden(one)))
        or "gracekit" in _words(one)
    ]
    return ours or containers


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables with literal values; for others see `_hidden`."""
    return {
        str(entry["name"]): str(entry["value"])
        for entry in container.get("env") or ()
        if isinstance(entry, dict) and "name" in entry and "value" in entry
    }


def _hidden(container: Mapping[str, Any]) -> frozenset[str]:
    """The variables whose values are not in the manifest, but in a Secret or a ConfigMap."""
    return frozenset(
        str(entry["name"])
        for entry in container.get("env") or ()
        if isinstance(entry, dict) and "name" in entry and "valueFrom" in entry
    )


def _words(container: Mapping[str, Any]) -> list[str]:
    parts = [container.get(key) for key in ("command", "args")]
    return [str(word) for part in parts if isinstance(part, list) for word in part]


def _check_container(
    settings: Settings, pod: Pod, container: Mapping[str, Any]
) -> Iterator[Finding]:
    name = f"{pod.name}, container {container.get('name', '?')}"
    environment = _environment(container)
    kill_after = environment.pop(KILL_AFTER, None)  # has a separate check
    given = given_by(
        _words(container),
        environment,
        str(container.get("workingDir", "")),
        hidden_variables=_hidden(container),
        open_sources=["envFrom"] if container.get("envFrom") else [],
    )
    if given.has_hidden_file:
        seen = f"it names the settings file {given.file}, which is not here"
        yield skip(f"{name}: settings", seen, "run doctor with its options")
    if given.says:
        try:
            settings = given.load(settings)
        except ConfigError as error:
            yield from refused(name, given, error)
            return
    grace = pod.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if not isinstance(grace, int | float):
        yield fail(
            name, f"terminationGracePeriodSeconds = {grace!r} is no number", "write a whole number"
        )
        return
    unknown = given.unknown(settings)
    yield from _check_pre_stop(container, name)
    yield from check_wait(
        _words(container), _environment(container), name, check=f"{name}: uvicorn"
    )
    in_time = _check_grace(settings, pod, container, name, float(grace), kill_after)
    yield doubted(in_time, given, unknown)
    if kill_after is None or in_time.level is not Level.FAIL:  # its remedy is for both
        yield _check_kill_after(name, kill_after, float(grace), is_hidden="kill_after_s" in unknown)
    yield from check_files(settings, pod, container, name, unknown)
    if hides_signals(_words(container)):
        yield fail(
            name,
            "its command is a shell that starts the service: SIGTERM goes to the shell, and the "
            "service is killed at the end of the grace period",
            'use the exec form: command: ["gracekit", "run", "MODULE:ATTR"]',
        )


def _check_pre_stop(container: Mapping[str, Any], name: str) -> Iterator[Finding]:
    if math.isnan(_pre_stop_s(container)):
        yield warn(
            name,
            "its preStop hook takes an unknown time of the grace period, before SIGTERM comes",
            "use preStop.sleep.seconds, or leave it out: a drain closes the intake by itself",
        )


def _check_grace(
    settings: Settings,
    pod: Pod,
    container: Mapping[str, Any],
    name: str,
    grace_s: float,
    kill_after: str | None,
) -> Finding:
    field, before = "terminationGracePeriodSeconds", _pre_stop_s(container)
    return compare(
        settings,
        check=name,
        limit_s=grace_s,
        said=field if field in pod.spec else f"{field} (its default)",
        knob=field if kill_after is None else f"{field}, and {KILL_AFTER} with it,",
        spent={
            "preStop": 0.0 if math.isnan(before) else before,
            "uvicorn": waits_s(_words(container), _environment(container)),
        },
        promised_s=None if kill_after is None else _number(kill_after),
    )


def _pre_stop_s(container: Mapping[str, Any]) -> float:
    """Seconds that the preStop hook takes; NaN if that is not known."""
    lifecycle = container.get("lifecycle")
    hook = lifecycle.get("preStop") if isinstance(lifecycle, dict) else None
    match hook:
        case None:
            return 0.0
        case {"sleep": {"seconds": int() | float() as seconds}}:
            return float(seconds)
        case {"exec": {"command": [*words]}} if "sleep" in words[-2:-1]:
            return _number(words[-1])
        case {"exec": {"command": [*_, str(last)]}} if last.startswith("sleep "):
            return _number(last.split()[1])
        case _:
            return math.nan


def _number(word: object) -> float:
    """Seconds; NaN if *word* is no duration."""
    try:
        return parse_duration(str(word))
    except ConfigError:
        return math.nan


def _check_kill_after(name: str, value: str | None, grace_s: float, *, is_hidden: bool) -> Finding:
    check = f"{name}: {KILL_AFTER}"
    if value is None and is_hidden:
        what = f"whether it is the pod's grace period, {grace_s:g} s"
        return not_known(check, "kill_after_s", what)
    if value is None:
        return warn(
            check,
            "the pod cannot read its own grace period, so a start cannot check it",
            f'set {KILL_AFTER} to "{grace_s:g}" in the container\'s env',
        )
    try:
        said = parse_duration(value)
    except ConfigError as error:
        return told(check, error)[0]
    if said != grace_s:
        return fail(
            check,
            f"{format_duration(said)} must be the pod's terminationGracePeriodSeconds = "
            f"{grace_s:g}, or the check at start judges by a wrong number",
            f'set {KILL_AFTER} to "{grace_s:g}"',
        )
    return ok(check, f"{format_duration(said)} is the pod's grace period")


# -- where its files are --------------------------------------------------------------

_WITH_THE_POD: Final = ("emptyDir", "ephemeral")
_ABSENT: Final = "(absent)"  # marks a mount that names no volume of its pod


def check_files(
    settings: Settings,
    pod: Pod,
    container: Mapping[str, Any],
    name: str,
    unknown: frozenset[str],
) -> Iterator[Finding]:
    """Check that files outlive container and pod, and whether replicas share journal and queue."""
    for what, field in (("journal", "store_url"), ("queue", "transport_url")):
        url = getattr(settings, field)
        if field in unknown:
            yield not_known(f"{name}: {what}", field, f"where the {what} is")
            continue
        if kind_of(url) is not UrlKind.FILE:
            continue
        path = PurePosixPath(str(container.get("workingDir", ""))) / file_of(url)
        volume = _volume_of(pod, container, path)
        moved = f"{variable_name(field)}={file_url(f'/data/{path.name}')}"
        yield _check_volume(f"{name}: {what}", what, path, volume, moved)
    yield from _check_runs(settings, pod, container, name, unknown)
    is_known = not unknown & {"store_url", "transport_url"}
    if is_known and pod.replicas > 1 and UrlKind.FILE in _kinds(settings):
        yield _check_replicas(pod, name)


def _check_runs(
    settings: Settings,
    pod: Pod,
    container: Mapping[str, Any],
    name: str,
    unknown: frozenset[str],
) -> Iterator[Finding]:
    """Check that the locks of runs outlive the container, if they are not beside a file."""
    what, field, named = "run directory", "run_directory", settings.run_directory
    if field in unknown:
        yield not_known(f"{name}: {what}", field, f"where the {what} is")
    elif named or ("store_url" not in unknown and UrlKind.DATABASE in _kinds(settings)):
        place = PurePosixPath(str(container.get("workingDir", "")))
        path = place / (named or RUN_DIRECTORY)
        moved = f"{variable_name(field)}=/data/{path.name}"
        yield _check_volume(f"{name}: {what}", what, path, _volume_of(pod, container, path), moved)


def _kinds(settings: Settings) -> set[UrlKind | None]:
    return {kind_of(settings.store_url), kind_of(settings.transport_url)}


def _volume_of(
    pod: Pod, container: Mapping[str, Any], path: PurePosixPath
) -> Mapping[str, Any] | None:
    """The volume that contains *path*; None if there is none."""
    mounts = [
        (PurePosixPath(str(mount["mountPath"])), str(mount["name"]))
        for mount in container.get("volumeMounts") or ()
        if isinstance(mount, dict) and "mountPath" in mount and "name" in mount
    ]
    around = [(place, name) for place, name in mounts if place in path.parents]
    if not around:
        return None
    name = max(around, key=lambda one: len(one[0].parts))[1]
    if name in pod.claims:
        return {"name": name, "volumeClaimTemplate": {}}
    volumes = [one for one in pod.spec.get("volumes") or () if isinstance(one, dict)]
    return next((one for one in volumes if one.get("name") == name), {"name": name, _ABSENT: {}})


def _check_volume(
    check: str, what: str, path: PurePosixPath, volume: Mapping[str, Any] | None, moved: str
) -> Finding:
    remedy = (
        f"mount a volume that stays, by a persistentVolumeClaim, and name a path in it by {moved}"
    )
    if volume is None:
        seen = f"the {what} {path} is on no volume: it is lost when the container ends"
        if not path.is_absolute():
            seen += ", unless a mount is around the image's working directory, which is not said"
        return fail(check, seen, remedy)
    if _ABSENT in volume:
        seen = f"the {what} {path} is in a mount of {volume['name']!r}, and no volume is called so"
        return fail(check, seen, remedy)
    kind = next((kind for kind in _WITH_THE_POD if kind in volume), None)
    if kind is not None:
        return warn(
            check,
            f"the {what} {path} is in the {kind} volume {volume['name']!r}: it outlives a restart "
            "of the container, and not the pod: a rollout or a drained node loses what is in it",
            remedy,
        )
    return ok(check, f"the {what} {path} is on the volume {volume['name']!r}")


def _check_replicas(pod: Pod, name: str) -> Finding:
    return warn(
        f"{name}: replicas",
        f"{pod.replicas} replicas with SQLite files: pods of one node can share a volume; "
        "otherwise each has a journal or a queue of its own, and while a method is 'error' or "
        "'probe' or names a resource, only the first one starts",
        "set replicas: 1, or have all pods on one node with one volume for their files",
    )
