"""Kubernetes manifests: the grace period of each pod against the settings of its containers.

JSON needs nothing; YAML is read with PyYAML where that is installed.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gracekit.config import PREFIX, Settings, format_duration, load, parse_duration
from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.doctor.grace import compare
from gracekit.doctor.shells import hides_signals
from gracekit.errors import ConfigError

DEFAULT_GRACE_S: Final = 30.0  # terminationGracePeriodSeconds
KILL_AFTER: Final = f"{PREFIX}KILL_AFTER"
DEEPEST: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod template of a manifest.

    Attributes:
        name: `Deployment compute`.
        spec: Its PodSpec.
    """

    name: str
    spec: Mapping[str, Any]


def check_manifest(settings: Settings, path: Path) -> Iterator[Finding]:
    """Every container of every pod in a manifest that runs gracekit, or may."""
    documents = read_documents(path)
    if documents is None:
        yield skip(
            "manifest",
            f"{path} is YAML, and PyYAML is not installed here",
            "pip install pyyaml, or give JSON: kubectl get deployment NAME -o json",
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
    """The documents of a JSON or YAML file; None if it is YAML and no library is there.

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


def find_pods(value: Any, name: str = "pod", depth: int = 0) -> Iterator[Pod]:
    """The pod templates inside a manifest, at whatever depth its kind keeps them."""
    if depth > DEEPEST:
        return
    if isinstance(value, list):
        for item in value:
            yield from find_pods(item, name, depth + 1)
    if not isinstance(value, dict):
        return
    if "kind" in value:
        metadata = value.get("metadata")
        label = metadata.get("name", "") if isinstance(metadata, dict) else ""
        name = f"{value['kind']} {label}".strip()
    if isinstance(value.get("containers"), list):
        yield Pod(name=name, spec=value)
        return
    for key in ("items", "spec", "template", "jobTemplate"):
        yield from find_pods(value.get(key), name, depth + 1)


def _ours(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """The containers that say a setting of ours, or speak of gracekit; all if none does."""
    containers = [one for one in pod.spec["containers"] if isinstance(one, dict)]
    ours = [
        one
        for one in containers
        if any(name.startswith(PREFIX) for name in _environment(one)) or "gracekit" in _words(one)
    ]
    return ours or containers


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables with a literal value; others are not known before the pod runs."""
    return {
        str(entry["name"]): str(entry["value"])
        for entry in container.get("env") or ()
        if isinstance(entry, dict) and "name" in entry and "value" in entry
    }


def _words(container: Mapping[str, Any]) -> list[str]:
    parts = [container.get(key) for key in ("command", "args")]
    return [str(word) for part in parts if isinstance(part, list) for word in part]


def _check_container(
    settings: Settings, pod: Pod, container: Mapping[str, Any]
) -> Iterator[Finding]:
    name = f"{pod.name}, container {container.get('name', '?')}"
    ours = {key: text for key, text in _environment(container).items() if key.startswith(PREFIX)}
    kill_after = ours.pop(KILL_AFTER, None)  # compared here, with a sentence of its own
    if ours:
        try:
            settings = load({}, ours)
        except ConfigError as error:
            yield from told(name, error)
            return
    grace = pod.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if not isinstance(grace, int | float):
        yield fail(
            name, f"terminationGracePeriodSeconds = {grace!r} is no number", "write a whole number"
        )
        return
    before = _pre_stop_s(container)
    if math.isnan(before):
        yield warn(
            name,
            "its preStop hook takes an unknown time of the grace period, before SIGTERM comes",
            "use preStop.sleep.seconds, or leave it out: a drain closes the intake by itself",
        )
    yield compare(
        settings,
        check=name,
        limit_s=float(grace),
        said="terminationGracePeriodSeconds"
        + ("" if "terminationGracePeriodSeconds" in pod.spec else " (its default)"),
        knob="terminationGracePeriodSeconds",
        spent_s=0.0 if math.isnan(before) else before,
    )
    yield _check_kill_after(name, kill_after, float(grace))
    if hides_signals(_words(container)):
        yield fail(
            name,
            "its command is a shell that starts the service: SIGTERM goes to the shell, and the "
            "service is killed at the end of the grace period",
            'use the exec form: command: ["gracekit", "run", "compute:svc"]',
        )


def _pre_stop_s(container: Mapping[str, Any]) -> float:
    """Seconds that preStop takes; NaN if it cannot be told."""
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
    try:
        return parse_duration(str(word))
    except ConfigError:
        return math.nan


def _check_kill_after(name: str, value: str | None, grace_s: float) -> Finding:
    check = f"{name}: {KILL_AFTER}"
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
