"""The requests of a client: what it asks for is checked, and becomes a value to send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracekit.errors import InvalidArgumentsError, VersionCapError
from gracekit.rpc.message import LEASE_KEY, Request, carried_lease
from gracekit.rpc.methods import Method
from gracekit.rpc.options import AnyMethod, CallOptions, PrepareOptions


def request_of(
    options: CallOptions,
    method: AnyMethod,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    request_id: str,
) -> Request:
    """The request for *method*, as a program asked for it.

    Raises:
        InvalidArgumentsError: *method* is none, or does not take these arguments.
        VersionCapError: it needs a newer interface than the prepared `version_cap`.
    """
    name = name_of(method)
    if args:
        raise InvalidArgumentsError(
            f"{name}() takes its arguments by name; {len(args)} came by position: "
            f"write {name}, argument=value"
        )
    if not isinstance(method, str):
        _bind(method, kwargs)
    target = options.target(method)
    if not options.can_send(target.version):
        raise VersionCapError(
            f"{name}() is asked for at {target.version} and version_cap="
            f"{options.version_cap!r} says that the receiver is older: send what the cap "
            "allows, or raise it once all receivers are upgraded"
        )
    return Request(
        request_id=request_id,
        method=name,
        args=kwargs,
        namespace=target.namespace,
        version=target.version,
        context=_with_lease(options.context),
    )


def name_of(method: object) -> str:
    """The name of a method, which is given as a Method or as text.

    Raises:
        InvalidArgumentsError: it is neither.
    """
    match method:
        case str():
            return str.__str__(method)  # which turns a StrEnum member into a str
        case Method():
            return method.name
    name = getattr(method, "__name__", None)
    if name is None:
        raise InvalidArgumentsError(f"{method!r} is no method: pass a service's, or its name")
    raise InvalidArgumentsError(
        f"{name}() is a plain function and no method of a service: decorate it with @svc.rpc or "
        f"@svc.ops, or pass its name, {name!r}"
    )


def _bind(method: Method[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments. If options are among them, the error says where options belong."""
    try:
        method.bind(kwargs)
        if method.options.resource and method.options.resource[1] in method.signature.parameters:
            method.resource_of(kwargs)  # what is inside of one may look otherwise once it is sent
    except InvalidArgumentsError as error:
        options = PrepareOptions.__annotations__.keys() - method.signature.parameters
        given = ", ".join(f"{name}=..." for name in kwargs if name in options)
        if not given:
            raise
        raise InvalidArgumentsError(
            f"{error}; options of a call are given by client.prepare({given}).call(...)"
        ) from None


def _with_lease(context: Mapping[str, Any]) -> Mapping[str, Any]:
    """*context*, plus the lease of the task whose handler sends the request, if any."""
    lease = carried_lease.get()
    return context if lease is None else {**context, LEASE_KEY: lease}
