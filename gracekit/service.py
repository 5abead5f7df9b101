"""What users declare: a service, its methods, its jobs and its hooks.

Declaring does nothing: no connection, no thread, no file. The Runtime never changes a Service.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    get_origin,
    overload,
)

from gracekit.callables import check, check_call, is_async, name_of, shown_name
from gracekit.config.choices import ServiceQueues, TaskApi, choices_of
from gracekit.config.loading import check_defaults
from gracekit.config.settings import BY_OPTION, Settings
from gracekit.config.values import check_topic, did_you_mean, parse_duration
from gracekit.errors import ConfigError, DeclarationError
from gracekit.hooks import ServiceHook
from gracekit.periodic import PeriodicJob
from gracekit.recovery.resources.kind_table import KindTable, undeclared_kind
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.request.context import Context
from gracekit.request.task_api import task_methods
from gracekit.rpc.client import RpcClient
from gracekit.rpc.failures import check_exceptions
from gracekit.rpc.method_options import (
    OPTIONS,
    MarkOptions,
    OpsMarkOptions,
    OpsOptions,
    RpcOptions,
    options_from,
)
from gracekit.rpc.method_table import MethodTable
from gracekit.rpc.methods import (
    Method,
    MethodTarget,
)
from gracekit.telemetry.logs import checked_context_keys

if TYPE_CHECKING:
    from gracekit.rpc.callers.sync_client import ClientOptions, SyncClient

P = ParamSpec("P")
R = TypeVar("R")
HookT = TypeVar("HookT", bound=Callable[..., Any])


class _Declares(Protocol):
    """A decorator that keeps arguments and result of an async or plain handler."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> Method[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Context, P], R], /) -> Method[P, R]: ...


class _Marks(Protocol):
    """The same for a method of a class."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Any, Context, P], Awaitable[R]], /
    ) -> Method[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Any, Context, P], R], /) -> Method[P, R]: ...


class Service:
    """A service by its topic.

    Args:
        topic: Name of the new-request topic; the ops topic is `{topic}-ops`
            unless GRACEKIT_OPS_TOPIC says otherwise.
        version: Interface version at which its functions are served.
        exceptions: Exception classes that clients made by `client()` rebuild.
        defaults: Settings of this service, by name, as a file spells them:
            `{"drain_timeout": "180s"}`. A file, an environment variable or a flag overrides them.
        task_api: Whom the ops topic answers about tasks: `"callers"` for those that have sent them
            (`client.state`, `result`, `cancel`), or True for resolvers: every sender to that topic
            may then move tasks that wait for capacity.
        queues: `"directed"` for a service that reads only new requests to its host, and fanouts:
            its hosts may have a store each. A request without a host is `Undeliverable`.
        validate: Whether arguments are checked against the annotations of their method, and
            converted; results for its clients, too. If false, both stay plain data.
        context_keys: Keys of the callers' contexts, such as `("request_id", "user_id")`, whose
            values are no secrets: events, log lines, listings and spans of a task show them.

    Raises:
        DeclarationError: an argument, or one of *defaults*, is wrong or unknown.
    """

    def __init__(
        self,
        topic: str,
        *,
        version: str = "1.0",
        exceptions: Mapping[str, type[Exception]] | None = None,
        defaults: Mapping[str, object] = MappingProxyType({}),
        task_api: bool | TaskApi = False,
        queues: ServiceQueues = "all",
        validate: bool = True,
        context_keys: Sequence[str] = (),
        scope: Callable[[], str] | None = None,
        **unknown: Never,
    ) -> None:
        _check_arguments(unknown, defaults)
        if not isinstance(task_api, bool) and task_api not in choices_of(TaskApi):
            raise DeclarationError(f"task_api={task_api!r} must be 'callers', True or False")
        if not isinstance(validate, bool):  # a text such as "no" would count as true
            raise DeclarationError(f"validate={validate!r} must be True or False")
        if queues not in choices_of(ServiceQueues):
            raise DeclarationError(f"queues={queues!r} must be 'all' or 'directed'")
        try:
            self.topic = check_topic(topic, "give the service another")
            check_defaults(defaults)
            check_exceptions(exceptions or {})
        except ConfigError as error:
            raise DeclarationError(str(error)) from None
        named: object = scope
        if named is not None and (not callable(named) or is_async(named)):
            raise DeclarationError(
                f"scope={scope!r} is a plain function that returns a name: scope=lambda: 'rack-1'"
            )
        self.queues = queues
        self.answers_callers = task_api == "callers"
        self.scope = scope
        self.validate = validate
        self.context_keys = checked_context_keys(context_keys)
        self.defaults = MappingProxyType(dict(defaults))
        self.version = version
        self.exceptions = dict(exceptions or {})
        self.methods = MethodTable()
        self.kinds = KindTable()
        self.jobs: list[PeriodicJob] = []
        self.start_hooks: list[ServiceHook] = []
        self.stop_hooks: list[ServiceHook] = []
        for method in task_methods() if task_api is True else ():
            method.leave_types_unchecked()  # it checks its arguments itself
            self.methods.add(method)

    def __repr__(self) -> str:
        return f"<Service {self.topic}>"

    # -- methods ------------------------------------------------------------------------

    @overload
    def rpc(self, handler: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Method[P, R]: ...
    @overload
    def rpc(self, handler: Callable[Concatenate[Context, P], R], /) -> Method[P, R]: ...
    @overload
    def rpc(self, **options: Unpack[RpcOptions]) -> _Declares: ...
    def rpc(self, handler: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # Unpack
        """Serve a function on the lane of new requests, whose intake a drain closes.

        Use bare or with options: `@svc.rpc(resource="vm", on_interrupt="probe")`.

        Raises:
            DeclarationError: the declaration cannot work; the message says why.
        """
        return self._declare(handler, options, ops=False)

    @overload
    def ops(self, handler: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Method[P, R]: ...
    @overload
    def ops(self, handler: Callable[Concatenate[Context, P], R], /) -> Method[P, R]: ...
    @overload
    def ops(self, **options: Unpack[OpsOptions]) -> _Declares: ...
    def ops(self, handler: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # Unpack
        """Serve a function on the ops lane, which a drain keeps open until the last task ends."""
        return self._declare(handler, options, ops=True)

    def _declare(self, handler: Any, options: dict[str, Any], *, ops: bool) -> Any:
        def register(function: Callable[..., Any]) -> Method[Any, Any]:
            given = {"version": self.version, **options}
            method = _method(function, given, ops=ops, skip=1)
            self._add(method)
            return method

        return register if handler is None else register(handler)

    def _add(self, method: Method[Any, Any]) -> None:
        if not self.validate:
            method.leave_types_unchecked()
        self.methods.add(method)

    def include(
        self, manager: object, *, namespace: str | None = None, version: str | None = None
    ) -> None:
        """Serve the marked methods of an object (`rpc_method`, `ops_method`, marks of kinds).

        Clients name a method by the object (`manager.resize`). The class
        (`Manager.resize`) works too while all its objects are served in one
        namespace and version.

        Args:
            manager: An object whose class marks the methods.
            namespace: As an oslo Target's; None for the default one.
            version: As an oslo Target's; None for the service's.

        Raises:
            DeclarationError: *manager* is a class, its class marks no method, or a name is taken.
        """
        if isinstance(manager, type):
            raise DeclarationError(
                f"svc.include({manager.__name__}) names the class, and an object serves its "
                f"methods: write svc.include({manager.__name__}())"
            )
        settles = [kind for kind in self.kinds if kind.bind(manager)]
        marked = [
            method
            for name in dir(type(manager))
            if isinstance(method := inspect.getattr_static(type(manager), name), Method)
        ]
        if not marked and not settles:
            raise DeclarationError(
                f"{type(manager).__name__} marks no method: decorate some with @rpc_method "
                "or @ops_method"
            )
        target = MethodTarget(namespace, version or self.version)
        for method in marked:
            self._add(method.served(manager, target))
        for method in marked:
            method.learn(manager, target)
            if not self.validate:  # clients may be passed this one
                method.leave_types_unchecked()

    # -- resources ----------------------------------------------------------------------

    def kind(
        self,
        name: str,
        *,
        after: ResourceKind | str | Iterable[ResourceKind | str] = (),
        statuses: Iterable[str] | None = None,
        stuck_after: str | float = "10m",
        max_wait: str | float = "10m",
        every: str | float | None = None,
    ) -> ResourceKind:
        """Declare a kind of resources; those stuck in a transient status are found and settled.

        Args:
            name: As methods name it: `@svc.rpc(resource="share")`.
            after: Kinds that are settled before it.
            statuses: All of its transient statuses; each of them must then have a rule.
            stuck_after: A pass settles a resource that has had its status for this duration. The
                first pass after a start uses `startup_reconciliation_wait_seconds` instead.
            max_wait: Duration after which a probe is no longer asked again. Also the timeout of a
                delete or act.
            every: Duration between two passes over this kind, for what must be noticed sooner than
                once in `reconciliation_interval`.

        Raises:
            DeclarationError: the declaration cannot work; the message says why.
        """
        kind = ResourceKind(
            name,
            after=after,
            statuses=statuses,
            stuck_after=stuck_after,
            max_wait=max_wait,
            every=every,
        )
        self.kinds.add(kind)
        return kind

    def check(self) -> None:
        """Check what can be checked only after all is declared; each start and doctor call it.

        Raises:
            DeclarationError: a kind cannot work; the message says why.
        """
        self.kinds.check()

    # -- jobs and hooks -----------------------------------------------------------------

    def periodic(
        self, *bare: Never, every: str | float = "", singleton: bool = False
    ) -> Callable[[HookT], HookT]:
        """Run a function repeatedly; each pause begins when a run ends.

        Args:
            bare: Must be empty; it catches a decorator without parentheses.
            every: Duration between the end of one run and the start of the next; required.
            singleton: At most one process of the store runs it at a time.

        Raises:
            DeclarationError: the declaration cannot work; the message says why.
        """
        if bare or every == "":
            raise DeclarationError(
                "a periodic job needs its pause: write @svc.periodic(every='60s'), parentheses "
                "included"
            )
        try:
            every_s = parse_duration(every)
        except ConfigError as error:
            raise DeclarationError(f"every={error}") from None

        def register(handler: HookT) -> HookT:
            check_call(handler, "job", "ctx: Context")
            job = PeriodicJob(
                name=name_of(handler), handler=handler, every_s=every_s, singleton=singleton
            )
            self.jobs.append(job)
            return handler

        return register

    def on_start(self, hook: HookT) -> HookT:
        """Call *hook* at each start, before requests are taken; a stop signal cancels it.

        Raises:
            DeclarationError: it cannot be called without arguments.
        """
        check_call(hook, "on_start hook", "")
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: HookT) -> HookT:
        """Call *hook* at each stop, after the last task has ended; it has a timeout.

        Raises:
            DeclarationError: it cannot be called without arguments.
        """
        check_call(hook, "on_stop hook", "")
        self.stop_hooks.append(hook)
        return hook

    # -- use ----------------------------------------------------------------------------

    def doubts(self) -> Iterator[tuple[str, str]]:
        """Declarations that will not do what was meant, and the remedy; a start logs them."""
        for method in self.methods:
            if method.options.on_interrupt == "probe" and method.probe_hook is None:
                name = method.name
                seen = f"{name}() has on_interrupt='probe' and no probe: interrupted, it is ERRORED"
                remedy = f"write @{name}.probe with the same arguments, or say on_interrupt='error'"
                yield seen, remedy
        for kind in self.kinds:
            if not kind.rules:
                name = kind.name
                seen = f"kind {name} has no rule, so no pass settles any of its resources"
                remedy = f"@{name}.probe, @{name}.delete, {name}.mark() or {name}.leave()"
                yield seen, f"declare some: {remedy}"
        users: dict[str, list[str]] = {}
        for method in self.methods if len(self.kinds) else ():
            if method.options.resource is not None and method.options.resource[0] not in self.kinds:
                users.setdefault(method.options.resource[0], []).append(f"{method.name}()")
        for name in sorted(users):
            yield undeclared_kind(name, sorted(users[name]), self.kinds)

    def client(self, url: str, settings: Settings | None = None) -> RpcClient:
        """A client of this service; use as `async with svc.client(url) as client`.

        Args:
            url: Of the transport.
            settings: None for the defaults. The client uses the ops topic, exchange, declare
                profile and largest body, which must be the same as the service's.
        """
        return RpcClient(url, self.topic, **self._client_options(settings or Settings()))

    def sync_client(self, url: str, settings: Settings | None = None) -> SyncClient:
        """A client of this service for code that is not async; see `client` for the arguments."""
        from gracekit.rpc.callers.sync_client import SyncClient  # noqa: PLC0415 - few programs have one

        return SyncClient(url, self.topic, **self._client_options(settings or Settings()))

    def _client_options(self, settings: Settings) -> ClientOptions:
        return {
            "ops_topic": settings.ops_topic_of(self.topic),
            "exceptions": self.exceptions,
            "exchange": settings.exchange,
            "declare_profile": settings.declare_profile,
            "max_body_bytes": settings.max_body_bytes,
        }

    def run(self, settings: Settings | None = None) -> None:
        """Run until a signal ends the service, then exit with the exit code of its drain."""
        from gracekit.runtime.process_life import run_service  # noqa: PLC0415 - the Runtime reads Services

        raise SystemExit(run_service(self, settings))


def _check_arguments(unknown: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse a setting among the arguments of Service, an argument among its settings.

    Raises:
        DeclarationError: there is one, or an unknown one; the message says where it belongs.
    """
    known = inspect.signature(Service).parameters.keys() - {"unknown"}
    for name, value in unknown.items():
        if name in BY_OPTION:
            shown = _shown_value(value)
            remedy = f"it is a setting: write defaults={{{name!r}: {shown}}}"
        else:
            near = did_you_mean(name, known) or did_you_mean(name, BY_OPTION)
            remedy = f"it takes {', '.join(sorted(known))}{near}"
        raise DeclarationError(f"Service() has no argument {name!r}: {remedy}")
    for name in known & defaults.keys():
        raise DeclarationError(
            f"{name} in the service's defaults is an argument of Service: write "
            f"{name}={_shown_value(defaults[name])}"
        )


def _shown_value(value: object) -> str:
    """A number as it is written, `...` for anything else: it may hold a password."""
    return repr(value) if isinstance(value, int | float) else "..."


@overload
def rpc_method(
    handler: Callable[Concatenate[Any, Context, P], Awaitable[R]], /
) -> Method[P, R]: ...
@overload
def rpc_method(handler: Callable[Concatenate[Any, Context, P], R], /) -> Method[P, R]: ...
@overload
def rpc_method(**options: Unpack[MarkOptions]) -> _Marks: ...
def rpc_method(handler: Any = None, /, **options: Any) -> Any:
    """Mark a method of a class for the new-request lane; `Service.include` serves it."""
    return _mark(handler, options, ops=False)


@overload
def ops_method(
    handler: Callable[Concatenate[Any, Context, P], Awaitable[R]], /
) -> Method[P, R]: ...
@overload
def ops_method(handler: Callable[Concatenate[Any, Context, P], R], /) -> Method[P, R]: ...
@overload
def ops_method(**options: Unpack[OpsMarkOptions]) -> _Marks: ...
def ops_method(handler: Any = None, /, **options: Any) -> Any:
    """Mark a method of a class for the ops lane; `Service.include` serves it."""
    return _mark(handler, options, ops=True)


def _mark(handler: Any, options: dict[str, Any], *, ops: bool) -> Any:
    def mark(function: Callable[..., Any]) -> Method[Any, Any]:
        for option in ("version", "namespace"):
            if option in options:
                raise DeclarationError(
                    f"{name_of(function)}: {option} is said where the object is served: "
                    f"svc.include(..., {option}={options[option]!r})"
                )
        return _method(function, options, ops=ops, skip=2)

    return mark if handler is None else mark(handler)


def _method(
    function: Callable[..., Any], options: dict[str, Any], *, ops: bool, skip: int
) -> Method[Any, Any]:
    check(function, "method")
    known = OPTIONS.keys() - {"ops"}
    unknown = set(options) - known
    if "ops" in unknown:
        raise DeclarationError(
            f"{name_of(function)}: ops is no option: write @svc.ops, or @ops_method in a class"
        )
    if unknown:
        name = min(unknown)
        raise DeclarationError(
            f"{name_of(function)}: unknown option {name!r}{did_you_mean(name, known)}"
        )
    _check_context(function, skip)
    try:
        return Method(function, options_from(**options, ops=ops), skip=skip)
    except ConfigError as error:
        raise DeclarationError(f"{name_of(function)}: {error}") from None


def _check_context(function: Callable[..., Any], skip: int) -> None:
    """Refuse a handler whose first argument (the second of a method) is plainly no Context.

    Raises:
        DeclarationError: it has another type, or a default.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip - 1 : skip]
    if skip == 1 and [one.name for one in parameters] == ["self"]:
        raise DeclarationError(
            f"{shown_name(function)}() has self, so it is a method of a class: mark it with "
            "@rpc_method or @ops_method, and serve an object of the class by svc.include()"
        )
    for first in parameters:
        kind = _type_of(first.annotation, function)
        is_context = kind is None or issubclass(Context, kind) or issubclass(kind, Context)
        if is_context and first.default is first.empty and first.kind is not first.KEYWORD_ONLY:
            continue
        written = "self, ctx: Context" if skip > 1 else "ctx: Context"
        raise DeclarationError(
            f"{shown_name(function)}() gets the Context in {first.name!r}, which is declared as "
            f"{first}: write def {name_of(function)}({written}, {first}, ...)"
        )


def _type_of(annotation: Any, function: Callable[..., Any]) -> type | None:
    """The plain class that *annotation* names; None where that is not certain."""
    kind, is_plain = get_origin(annotation) or annotation, get_origin(annotation) is None
    if isinstance(annotation, str):
        name, parts, _ = annotation.partition("[")
        kind = {**vars(builtins), **getattr(function, "__globals__", {})}.get(name)
        is_plain = not parts
    if not is_plain and getattr(kind, "__module__", "") != builtins.__name__:
        return None  # a union, or annotated otherwise; but `list[int]` is a list
    is_special = kind in {Any, inspect.Parameter.empty} or getattr(kind, "_is_protocol", False)
    return kind if isinstance(kind, type) and not is_special else None
