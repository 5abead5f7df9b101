"""Serve unchanged endpoints of oslo.messaging: `include_endpoints(svc, [Manager()])`.

Only this module needs oslo.messaging (`pip install gracekit[oslo]`); no other module of gracekit
imports it. Requests are dispatched as by oslo's own dispatcher: to the same endpoint, with the same
arguments, and with the same reply. The one difference: private names are never served.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial, partialmethod, update_wrapper
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final, Protocol

import oslo_messaging
from oslo_context.context import _request_store

from gracekit.callables import is_async
from gracekit.errors import DeclarationError, InvalidArgumentsError
from gracekit.process import refuse_patched_threads
from gracekit.rpc.argument_paths import Source
from gracekit.rpc.endpoint_options import HOOKS, Options, check_names, check_shape, read_options
from gracekit.rpc.failures import expect, words_of
from gracekit.rpc.method_table import MethodTable
from gracekit.rpc.methods import Method, MethodHook, check_resource
from gracekit.telemetry.safe_text import masked

_NO_METHODS: Final = (
    property,  # reading it may be expensive
    cached_property,
    MemberDescriptorType,  # of an object, by `__slots__`
    MethodType,  # of another object
)
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LOST: Final = frozenset({"msg_id", "reply_q"})  # context keys that oslo removes


class EndpointError(DeclarationError, TypeError):
    """A wrong target or access policy; also a TypeError, which oslo.messaging raises then."""


class Declared(Protocol):
    """An object with methods: a Service."""

    methods: MethodTable


def include_endpoints(
    service: Declared,
    endpoints: Sequence[object],
    *,
    serializer: Any = None,
    access_policy: Any = None,
    options: Options | None = None,
) -> None:
    """Serve endpoint objects, as `oslo_messaging.get_rpc_server` does.

    Their methods run in worker threads, as `endpoint.method(ctxt, **args)`, where
    `gracekit.current()` is gracekit's context. Several endpoints may serve one
    name: the first whose namespace and version fit is called. The set of methods
    is fixed by this call, but each request looks up the attribute again, so a
    patched method is called.

    Args:
        service: Serves the endpoints beside its own methods.
        endpoints: The objects, in order of precedence.
        serializer: An oslo Serializer; None for none. For a method whose `resource` is inside of
            arguments it also reads these before acceptance; its error refuses the request.
        access_policy: A subclass of oslo's RPCAccessPolicyBase, asked once for
            each method; None for DefaultRPCAccessPolicy.
        options: Options of `@svc.rpc` by method name (`on_interrupt`,
            `resource`, …); also `ops=True`, and the hooks `probe` and `errored`.

    Raises:
        DeclarationError: an endpoint or option cannot work; the message says
            why. It is also a TypeError if oslo.messaging would raise one.
    """
    refuse_patched_threads()
    options = {} if options is None else options
    check_shape(options)
    if not isinstance(endpoints, list | tuple):
        kind = endpoints if isinstance(endpoints, type) else type(endpoints)
        raise DeclarationError(f"endpoints must be a list: write [{kind.__name__}()]")
    policy = _policy(access_policy)
    named: set[str] = set()
    for endpoint in endpoints:
        for name, function in _served(endpoint, policy, options):
            named.add(name)
            said = serializer or oslo_messaging.NoOpSerializer()
            handler = _handler(name, endpoint, function, said)
            for method in _methods(handler, endpoint, function, options.get(name, {})):
                method.leave_types_unchecked()
                source = method.options.resource and method.options.resource[1]
                if serializer and source and source not in method.signature.parameters:
                    method.reads_early = partial(_read_early, method, serializer)
                service.methods.add(method, beside=True)
    check_names(options, named)


def _policy(kind: Any) -> Any:
    kind = kind or oslo_messaging.DefaultRPCAccessPolicy
    if not isinstance(kind, type):
        raise EndpointError(
            f"access_policy={kind!r} is no class: give a subclass of RPCAccessPolicyBase, such as "
            "oslo_messaging.ExplicitRPCAccessPolicy, and no object of it"
        )
    if not issubclass(kind, oslo_messaging.RPCAccessPolicyBase):
        raise EndpointError(f"access_policy={kind.__name__} is no subclass of RPCAccessPolicyBase")
    return kind()


# -- what an endpoint serves ------------------------------------------------------------


def _served(endpoint: object, policy: Any, options: Options) -> Iterator[tuple[str, MethodHook]]:
    """Yield name and function of each method to serve.

    These are the public methods of the endpoint's class, and functions named in *options*.
    """
    for name in sorted({*dir(endpoint), *options}):
        if name.startswith("_"):
            continue
        function = _function(endpoint, name, named=name in options)
        if function is None or not policy.is_allowed(endpoint, name):
            continue
        if is_async(function):
            raise DeclarationError(
                f"{type(endpoint).__name__}.{name} is a coroutine function, which oslo.messaging "
                "would not await: declare it with @rpc_method, or give it a private name"
            )
        if isinstance(endpoint, type) and [p.name for p in _parameters(function)][:1] == ["self"]:
            raise DeclarationError(
                f"{endpoint.__name__} is a class, and its methods need an object: include "
                f"{endpoint.__name__}()"
            )
        if _takes_a_context(function):
            yield name, function


def _function(endpoint: object, name: str, *, named: bool) -> MethodHook | None:
    """The function under *name*, if it is a method of the class or *named* in the options.

    A callable attribute is not served otherwise: through `conf = cfg.CONF` callers
    could read settings.
    """
    kind = endpoint if isinstance(endpoint, type) else type(endpoint)
    declared = inspect.getattr_static(kind, name, None)
    if isinstance(declared, _NO_METHODS) or (declared is None and not named):
        return None
    found: MethodHook | None = getattr(endpoint, name, None)
    is_function = isinstance(found, FunctionType | MethodType)
    return found if is_function or isinstance(declared, partialmethod) else None


def _takes_a_context(function: MethodHook) -> bool:
    """Whether it takes a positional argument; `start(self)` is no RPC method."""
    first = next(iter(_parameters(function)), None)
    return first is not None and first.kind in {
        first.POSITIONAL_ONLY,
        first.POSITIONAL_OR_KEYWORD,
        first.VAR_POSITIONAL,
    }


def _parameters(function: MethodHook) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature, not meant for RPC
        return []


# -- one method -------------------------------------------------------------------------


def _methods(
    handler: MethodHook, endpoint: object, function: MethodHook, options: Mapping[str, Any]
) -> Iterator[Method[Any, Any]]:
    """The method in each namespace that the endpoint's target accepts."""
    target = _target(endpoint)
    for namespace in target.accepted_namespaces:
        place = {"namespace": namespace, "version": target.version or "1.0"}
        chosen = read_options(handler.__name__, options, place)
        handler.__signature__ = _signature(handler.__name__, function, chosen.resource)  # type: ignore[attr-defined]
        method: Method[Any, Any] = Method(handler, chosen, skip=1)
        for hook in HOOKS:
            if hook in options:
                getattr(method, hook)(options[hook])
        yield method


def _target(endpoint: object) -> Any:
    target = getattr(endpoint, "target", None) or oslo_messaging.Target()
    if not isinstance(target, oslo_messaging.Target):
        raise EndpointError(
            f"{type(endpoint).__name__}.target is a {type(target).__name__}; that name is for an "
            "oslo_messaging.Target, which says namespace and version"
        )
    return target


def _signature(
    name: str, function: MethodHook, resource: tuple[str, Source] | None
) -> inspect.Signature:
    """The signature for requests: a context, then keyword arguments.

    Decorators such as `expected_exceptions` hide the names behind `*args, **kwargs`.
    The resource's argument is added again, so that a request without it is refused.

    Raises:
        DeclarationError: *resource* names no argument.
    """
    context = inspect.Parameter("ctxt", inspect.Parameter.POSITIONAL_ONLY)
    first, *others = _parameters(function)
    rest = [p for p in (first, *others) if p.kind is p.VAR_KEYWORD]
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in others if p.kind in _BY_NAME]
    argument = None if resource is None else check_resource(name, resource)
    if rest and argument is not None and argument not in {p.name for p in named}:
        named.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature([context, *named, *rest])


def _handler(
    name: str, endpoint: object, function: MethodHook, serializer: Any
) -> Callable[..., Any]:
    def handler(ctx: Mapping[str, Any], /, **args: Any) -> Any:
        # oslo's key for the monitor timeout of a call, read only by its own dispatcher.
        monitor_s = getattr(ctx, "monitor_timeout", None)
        if isinstance(monitor_s, float) and monitor_s.is_integer():
            monitor_s = int(monitor_s)  # as callers of oslo write it
        with _own_context():
            ctxt, read = _deserialized(serializer, {**ctx, "client_timeout": monitor_s}, args)
            return serializer.serialize_entity(ctxt, _call(getattr(endpoint, name), ctxt, read))

    update_wrapper(handler, function, updated=())  # also the types of its arguments
    handler.__name__ = name
    return handler


@contextlib.contextmanager
def _own_context() -> Iterator[None]:
    """Remove the RequestContext of this request from its thread, which serves others after it.

    It keeps itself there, and oslo.log would show it on their lines. The library's fixture does so.
    """
    try:
        yield
    finally:
        vars(_request_store).pop("context", None)


def _deserialized(serializer: Any, ctx: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    ctxt = serializer.deserialize_context({k: ctx[k] for k in ctx if k not in _LOST})
    return ctxt, {key: serializer.deserialize_entity(ctxt, arg) for key, arg in args.items()}


def _read_early(
    method: Method[Any, Any], serializer: Any, ctx: Mapping[str, Any], args: Mapping[str, Any]
) -> tuple[str, str] | None:
    """As `resource_of`; an error of the serializer is one of the arguments."""
    try:  # with a copy, as the serializer of oslo.versionedobjects changes what it reads
        with _own_context():
            _, read = _deserialized(serializer, {**ctx, "client_timeout": None}, deepcopy(args))
    except BaseException as error:  # SystemExit would end the event loop
        why = masked(words_of(error), ctx, args)
        raise InvalidArgumentsError(f"{method.name}(): the serializer raised {why}") from error
    return method.resource_of(read)


def _call(function: MethodHook, ctxt: Any, args: Mapping[str, Any]) -> Any:
    """Call it; mark a declared exception as expected, so that it is not logged as a warning."""
    try:
        return function(ctxt, **args)
    except oslo_messaging.ExpectedException as wrapped:
        expected = wrapped.exc_info[1]
    expect(expected)
    try:
        raise expected
    finally:
        del expected  # its traceback refers to this frame
