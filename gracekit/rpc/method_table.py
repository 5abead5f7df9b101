"""Finding the method of a request, by namespace, name and version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gracekit.errors import (
    DeclarationError,
    NoSuchMethodError,
    UnsupportedVersionError,
)
from gracekit.rpc.message import TASKS_NAMESPACE
from gracekit.rpc.method_options import major, serves
from gracekit.rpc.methods import Method, cut, named, nearest


class MethodTable(msgspec.Struct):
    """The methods of one service by (namespace, name), and the versions each is served at."""

    _methods: dict[tuple[str | None, str], list[Method[Any, Any]]] = msgspec.field(
        default_factory=dict
    )

    def add(self, method: Method[Any, Any], *, beside: bool = False) -> None:
        """Register *method*.

        Args:
            method: The method to serve.
            beside: Allow several methods of one name and major version: the first one
                that serves a request is called, as with oslo's endpoints.

        Raises:
            DeclarationError: the name is taken at that major version, without *beside*.
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
        """The method for a request: same major version, and at least the minor version asked for.

        Raises:
            NoSuchMethodError: the namespace is served at that version, but has no
                method of that name.
            UnsupportedVersionError: the namespace is unknown, or not served at that
                version.
        """
        served = self._methods.get((namespace, name), ())
        for method in served:
            if serves(method.version, version):
                return method
        # Which error is raised matters: after one of them an oslo client tries an older version.
        places = {method.version for method in self if method.namespace == namespace}
        if any(serves(place, version) for place in places):
            at = f" at {cut(version)}, only at {_listed(served)}" if served else self._hint(name)
            raise NoSuchMethodError(f"method {cut(name)} is not served{at}")
        if not places:
            raise UnsupportedVersionError(
                f"{named(namespace)} is not served{self._other_namespace(namespace, name)}"
            )
        if not served:
            raise UnsupportedVersionError(
                f"method {cut(name)} is not served in {named(namespace)}{self._hint(name)}"
            )
        raise UnsupportedVersionError(
            f"{cut(name)} in {named(namespace)} is served at "
            f"{_listed(served)}, not at {cut(version)}: the major version must match, the minor "
            "not be above"
        )

    def __iter__(self) -> Iterator[Method[Any, Any]]:
        return (method for served in self._methods.values() for method in served)

    def _hint(self, name: str) -> str:
        """Where a method of that name is served, or which one may have been meant."""
        place = next((method.target() for method in self if method.name == name), None)
        if place is not None:
            return f"; it is in {place}"
        near = nearest(name, list(dict.fromkeys(known for _, known in self._methods)))
        return f"; did you mean {near!r}?" if near else ""

    def _other_namespace(self, namespace: str | None, name: str) -> str:
        """Which namespace may have been meant, or how a service gets the one of the task API."""
        if namespace is None:
            return self._hint(name)
        if namespace == TASKS_NAMESPACE:
            return ": the service was made without it, which is Service(..., task_api=True)"
        near = nearest(namespace, [*{other for other, _ in self._methods if other is not None}])
        return f"; did you mean {near!r}?" if near else ""


def _listed(served: Sequence[Method[Any, Any]]) -> str:
    return ", ".join(method.version for method in served)
