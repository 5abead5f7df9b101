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
            hint = _elsewhere(version, served) if served else self._hint(namespace, name)
            raise NoSuchMethodError(f"method {cut(name)} is not served{hint}")
        if not places:
            raise UnsupportedVersionError(
                f"{named(namespace)} is not served{self._other_namespace(namespace, name)}"
            )
        if not served:
            hint = self._hint(namespace, name)
            raise UnsupportedVersionError(
                f"method {cut(name)} is not served in {named(namespace)}{hint}"
            )
        raise UnsupportedVersionError(
            f"{cut(name)} in {named(namespace)} is served at "
            f"{', '.join(m.version for m in served)}, not at {cut(version)}: "
            f"{_rule_of(version, served[0].version)}"
        )

    def __iter__(self) -> Iterator[Method[Any, Any]]:
        return (method for served in self._methods.values() for method in served)

    def _hint(self, namespace: str | None, name: str) -> str:
        """Where a method of that name is served, or which one may have been meant."""
        before, _, last = name.rpartition(".")
        for other, known in self._methods:
            if known == name or (other == before and known == last):
                apart = "" if known == name else "the namespace is given apart: "
                return f"; {apart}ask for {known!r} with {_options_of(self._methods[other, known])}"
        near = nearest(name, [known for other, known in self._methods if other == namespace])
        near = near or nearest(name, [known for _, known in self._methods])
        return f"; did you mean {near!r}?" if near else ""

    def _other_namespace(self, namespace: str | None, name: str) -> str:
        """Which namespace may have been meant, or how a service gets one of gracekit's own."""
        known = list(dict.fromkeys(other for other, _ in self._methods if other is not None))
        if namespace == TASKS_NAMESPACE:
            return ": the service was made without it, which is Service(..., task_api=True)"
        if namespace is None:
            return self._hint(namespace, name)
        if near := nearest(namespace, known):
            return f"; did you mean {near!r}?"
        return "; leave it out, as this service has none" if self._methods and not known else ""


def _options_of(served: Sequence[Method[Any, Any]]) -> str:
    """How a client, and the command line, ask for a method."""
    method = served[-1]
    given = {"namespace": method.namespace, "version": method.version, "ops": method.ops or None}
    options = {name: value for name, value in given.items() if value is not None}
    keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
    flags = " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items()
    )
    return f"prepare({keywords}), on the command line {flags}"


def _rule_of(version: str, served: str) -> str:
    if major(version) < 0:
        return f"a version is written as X.Y, such as {served}"
    return "the major version must match, the minor not be above"


def _elsewhere(version: str, served: Sequence[Method[Any, Any]]) -> str:
    return f" at {cut(version)}, where others are, only at {', '.join(m.version for m in served)}"
