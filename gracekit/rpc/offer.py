"""The methods of a run, written as text into its row.

During a rolling upgrade siblings read it, and leave a request to the run that serves its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from inspect import Parameter
from typing import Any

import msgspec

from gracekit.rpc.argument_paths import resource_id_of, value_of
from gracekit.rpc.method_options import serves
from gracekit.rpc.method_table import MethodTable
from gracekit.rpc.methods import Method


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One method of a run.

    Attributes:
        required: Names of the required arguments.
        optional: Names of the optional arguments.
        more: Whether it takes arguments of any other name.
        resource: Path of its resource's id, which must not be empty; None if only a run knows it.
        types: Digest of the types of its arguments; empty if none is checked.
    """

    namespace: str | None = None
    name: str
    version: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    more: bool = False
    resource: str | None = None
    types: str = ""

    def takes(self, args: Mapping[str, Any]) -> bool:
        """Whether it can be called with *args*."""
        known = {*self.required, *self.optional}
        if not args.keys() >= set(self.required) or not (self.more or args.keys() <= known):
            return False
        return self.resource is None or resource_id_of(value_of(self.resource, args)) is not None


def written(methods: MethodTable) -> str:
    """The methods of a service as text."""
    return msgspec.json.encode([_offer(method) for method in methods]).decode()


def can_serve(
    text: str,
    namespace: str | None,
    name: str,
    version: str,
    args: Mapping[str, Any],
    *,
    unlike: str = "[]",
) -> bool:
    """Whether the run that wrote *text* may serve such a request.

    It does not if it offers the same as the run that wrote *unlike*, which has refused the request:
    the text does not say which values fit a type.
    """
    refused = _offers(unlike).get((namespace, name), ())
    return any(
        serves(offer.version, version) and offer.takes(args) and offer not in refused
        for offer in _offers(text).get((namespace, name), ())
    )


@lru_cache(maxsize=64)
def _offers(text: str) -> Mapping[tuple[str | None, str], list[Offer]]:
    """Parse *text*; cached, because each refused request checks the methods of all runs."""
    offers: dict[tuple[str | None, str], list[Offer]] = {}
    for offer in msgspec.json.decode(text, type=list[Offer]):
        offers.setdefault((offer.namespace, offer.name), []).append(offer)
    return offers


def _offer(method: Method[Any, Any]) -> Offer:
    named = [p for p in method.signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    _, source = method.options.resource or ("", None)
    return Offer(
        namespace=method.namespace,
        name=method.name,
        version=method.version,
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        more=len(named) < len(method.signature.parameters),
        resource=source if isinstance(source, str) and method.reads_early is None else None,
        types=method.types.digest,
    )
