"""How a request finds its method: by namespace and name, at a version that is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gracekit.errors import (
    DeclarationError,
    NoSuchMethodError,
    UnsupportedVersionError,
)
from gracekit.rpc.message import TASKS_NAMESPACE
from gracekit.rpc.methods import Method, cut, named, nearest
from gracekit.rpc.versions import major, serves


@dataclass(slots=True)
class MethodTable:
    """The methods of one service by (namespace, name), and the versions each is served at."""

    _methods: dict[tuple[str | None, str], list[Method[Any, Any]]] = field(default_factory=dict)

    def add(self, method: Method[Any, Any], *, beside: bool = False) -> None:
        """Register *method*.

        Args:
            method: What to serve.
            beside: Its name may be taken at the same major version: of those that
                serve a request the first is asked, as of oslo's endpoints.

        Raises:
            DeclarationError: the name is taken at the same major version.
        """
        served = self._methods.setdefault((method.namespace, method.name), [])
        if not beside and any(major(other.version) == major(method.version) for other in served):
            raise DeclarationError(
                f"method {method.name!r} is registered twice"
                f"{f' in namespace {method.namespace!r}' if method.namespace else ''} "
                f"for version {major(method.version)}.x"
            )
        served.append(method)

    def resolve(self, namespace: str | None, name: str, version: str) -> Method[Any, Any]:
        """The method that serves a request: same major version, asked minor not above.

        Raises:
            NoSuchMethodError: the namespace is served at that version, and
                nothing of that name in it.
            UnsupportedVersionError: nothing is served in the namespace at that
                version; or the namespace is unknown.
        """
        served = self._methods.get((namespace, name), ())
        for method in served:
            if serves(method.version, version):
                return method
        # Which of the two it is decides whether an oslo client tries an older version.
        places = {method.version for method in self if method.namespace == namespace}
        if any(serves(place, version) for place in places):
            hint = _elsewhere(version, served) if served else self._hint(name)
            raise NoSuchMethodError(f"method {cut(name)} is not served{hint}")
        if not places:
            raise UnsupportedVersionError(
                f"{named(namespace)} is not served; nor is {cut(name)} in it{_opt_in(namespace)}"
            )
        raise UnsupportedVersionError(
            f"{cut(name)} in {named(namespace)} is served at "
            f"{', '.join(m.version for m in served) or 'no version'}, not at {cut(version)}: "
            "the major version must match, the minor not be above"
        )

    def __iter__(self) -> Iterator[Method[Any, Any]]:
        return (method for served in self._methods.values() for method in served)

    def _hint(self, name: str) -> str:
        near = nearest(name, [known for _, known in self._methods])
        return f"; did you mean {near!r}?" if near else ""


def _opt_in(namespace: str | None) -> str:
    """How a service gets a namespace of gracekit's own."""
    if namespace != TASKS_NAMESPACE:
        return ""
    return ": its service has it with Service(..., task_api=True), by its ops topic"


def _elsewhere(version: str, served: Sequence[Method[Any, Any]]) -> str:
    return f" at {cut(version)}, where others are, only at {', '.join(m.version for m in served)}"
