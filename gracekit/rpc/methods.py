"""RPC methods: the declaration of each one, with its options, hooks and resource.

A `Method` can be called like the function that it was made from, and passed to a
client, which then knows the types of arguments and result. Names, namespaces and
versions from the wire are only looked up in a `MethodTable`, and never used to
access an attribute.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from gracekit.callables import check, is_async, name_of, shown_name
from gracekit.config.choices import AllowCancel, InDrain, OnInterrupt, choices_of
from gracekit.errors import BadMessageError, DeclarationError, InvalidArgumentsError
from gracekit.rpc.argument_paths import RESOURCE_ID, check_path, resource_id_of, value_of
from gracekit.rpc.method_options import MethodOptions, major
from gracekit.rpc.plain import plain
from gracekit.rpc.typed import UNCHECKED, MisfitError, Types, typed, types_of

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)  # a method that returns a dict returns an object too
MethodHook = Callable[..., Any]


class MethodTarget(NamedTuple):
    """Namespace and version of a method, as in an oslo Target; None is the default namespace."""

    namespace: str | None
    version: str

    def __str__(self) -> str:
        return f"{named(self.namespace)} at {self.version}"


class Method(Generic[P, R_co]):
    """One RPC method of a service.

    Attributes:
        name: Its name in requests.
        handler: The function; its first argument is the Context.
        options: Its options.
        signature: The handler's, without `self` and the Context.
        is_async: Whether the handler is a coroutine function; others run in threads.
        probe_hook: Finds out what became of an interrupted task; None without one.
        errored_hook: Called when recovery marks a task ERRORED; None without one.
        reads_early: As `resource_of`, of (context, arguments), in a thread; None if not needed.
        takes_more: Whether it takes arguments of any name, by `**`.
    """

    def __init__(self, handler: Callable[..., Any], options: MethodOptions, *, skip: int) -> None:
        self.name = name_of(handler)
        self.handler = handler
        self.options = options
        self.is_async = is_async(handler)
        self.probe_hook: MethodHook | None = None
        self.errored_hook: MethodHook | None = None
        self.reads_early: Callable[..., tuple[str, str] | None] | None = None
        self._owner: object = None
        self._marked: Method[P, R_co] | None = None  # that of the class, for a copy
        self._learnt: list[
            tuple[Callable[[], object], MethodTarget]
        ] = []  # shared with bound copies
        self.signature = _signature(handler, skip)
        self._skip = skip  # parameters before the arguments of a request: Context, self
        self._context_name = "".join([*inspect.signature(handler).parameters][skip - 1 : skip])
        self._required, self._named = _names(self.signature)
        self.takes_more: Final = _takes_more(self.signature)
        _check(self)
        self.__doc__ = handler.__doc__

    @property
    def ops(self) -> bool:
        """Whether it runs in the ops lane."""
        return self.options.ops

    @cached_property
    def types(self) -> Types:
        """What its annotations say. Read at the first use, when all of its module is declared."""
        return self._marked.types if self._marked else types_of(self.handler, self.signature)

    def leave_types_unchecked(self) -> None:
        """From now on arguments and result stay plain data, whatever the annotations say."""
        self.types = UNCHECKED

    @property
    def namespace(self) -> str | None:
        """Interface namespace; None for the default one. Raises as `target`."""
        return self.target().namespace if self._learnt else self.options.namespace

    @property
    def version(self) -> str:
        """Interface version. Raises as `target`."""
        return self.target().version if self._learnt else self.options.version

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly, as a unit test does; no task is made."""
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Method {self.name} on_interrupt={self.options.on_interrupt}>"

    def probe(self, hook: MethodHook) -> MethodHook:
        """Register the probe, with the method's arguments; it returns Done, Retry, Fail or Wait.

        Arguments that the request has left out get the method's defaults.
        """
        _check_hook(self, hook, "probe", self._skip, extra=0)
        self.probe_hook = hook
        return hook

    def errored(self, hook: MethodHook) -> MethodHook:
        """Register the hook for ERRORED tasks, with the method's arguments and `reason` (text).

        Arguments that the request has left out get the method's defaults.
        """
        _check_hook(self, hook, "errored", self._skip, extra=1)
        self.errored_hook = hook
        return hook

    def bind(self, args: Mapping[str, Any]) -> None:
        """Check the names in *args* against the signature.

        Raises:
            InvalidArgumentsError: one is missing or unknown.
        """
        missing = self._required - args.keys()
        unknown = () if self.takes_more else args.keys() - self._named
        if missing or unknown:
            raise InvalidArgumentsError(self._explain(args, missing, unknown))

    def converted(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the handler gets for *args*, which `bind` accepts: they have its annotated types.

        Raises:
            InvalidArgumentsError: one does not fit its annotation; the message names the field.
        """
        if (into := self.types.arguments) is None:
            return args
        try:
            return typed(args, into, self.types.changing)
        except MisfitError as error:
            raise InvalidArgumentsError(self._refusal(str(error))) from None

    def converted_result(self, result: Any) -> Any:
        """What a caller that has passed the method gets for *result*, which is plain data.

        Raises:
            BadMessageError: it does not fit the annotation.
        """
        if (into := self.types.result) is None:
            return result
        try:
            return typed({"result": result}, into, ("result",))["result"]
        except MisfitError as error:
            raise BadMessageError(
                f"{self.name}() has succeeded, and its result does not fit its annotation: {error};"
                f" call it by its name, {self.name!r}, to get plain data"
            ) from None

    def hook_arguments(self, hook: MethodHook, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for *hook*, about a request with *args*.

        An argument that was left out gets the method's default, so that the hook sees what the
        handler has seen; unless the hook has a default of its own for it.
        """
        own = inspect.signature(hook).parameters
        defaults = {
            name: parameter.default
            for name, parameter in self.signature.parameters.items()
            if parameter.default is not parameter.empty
            and (name not in own or own[name].default is parameter.empty)
        }
        return {**defaults, **args}

    def resource_of(self, args: Mapping[str, Any]) -> tuple[str, str] | None:
        """(kind, id) of the resource that *args* name; None if the method acts on none.

        Each id has one spelling: an argument that is converted is read as its type writes it.

        Raises:
            InvalidArgumentsError: there is no id in them.
        """
        if self.options.resource is None:
            return None
        kind, source = self.options.resource
        name = source.partition(".")[0] if isinstance(source, str) else ""
        if name in self.types.changing and name in args:
            sent = {name: plain(args[name], name)}
            args = {**args, name: plain(self.converted(sent)[name], name)}
        value, needs, given = None, "a value", ""
        try:
            value = value_of(source, args)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a property ends the loop
            given = f", and reading it raised {type(error).__name__}"
        if (resource_id := resource_id_of(value)) is not None:
            return kind, resource_id
        if not (value is None or (isinstance(value, str) and not value)):
            needs, given = RESOURCE_ID, f", and not {_kind_of(value)}"
        where = repr(source) if isinstance(source, str) else "the result of its resource function"
        raise InvalidArgumentsError(
            f"{self.name}() needs {needs} for {where}{given}: it names the {kind} to act on"
        )

    # -- methods of classes -------------------------------------------------------------

    def target(self, *, namespace: str | None = None, version: str | None = None) -> MethodTarget:
        """The target of a request: *namespace* and *version* if given, otherwise the method's.

        Raises:
            DeclarationError: it is a method of a class whose objects are served at
                several targets, and more than one fits.
        """
        if namespace is None and version is None and not self._learnt:
            return MethodTarget(self.options.namespace, self.options.version)
        fitting = _fitting(self._places(), namespace, version)
        if len(fitting) > 1:
            raise DeclarationError(_ambiguous(self.name, fitting))
        (only,) = fitting
        return only

    def _places(self) -> set[MethodTarget]:
        """Where the method's object is served; or else, where any of its class is or was."""
        if not self._learnt:
            return {MethodTarget(self.options.namespace, self.options.version)}
        known = [(owner(), target) for owner, target in self._learnt]
        mine = {target for owner, target in known if owner is self._owner is not None}
        alive = {target for owner, target in known if owner is not None}
        return mine or alive or {target for _, target in known}

    def learn(self, owner: object, target: MethodTarget) -> None:
        """Record where an object's method is served, so that clients can be passed the method."""
        self._learnt[:] = [known for known in self._learnt if known[0]() is not None]
        self._learnt.append((_reference(owner), target))

    def served(self, owner: object, target: MethodTarget) -> Method[P, R_co]:
        """A copy bound to *owner*, at one target, as `Service.include` registers it."""
        _check_place(self.name, target.namespace, target.version)
        bound = self.attached(owner)
        bound.options = msgspec.structs.replace(
            self.options, namespace=target.namespace, version=target.version
        )
        bound._learnt = []  # noqa: SLF001 - also a Method
        bound._marked = None  # noqa: SLF001 - another service may have left its types unchecked
        vars(bound).pop("types", None)
        return bound

    def attached(self, owner: object) -> Method[P, R_co]:
        """A copy of the method, bound to *owner*."""
        bound = copy.copy(self)
        bound._owner, bound._marked = owner, self  # noqa: SLF001 - also a Method
        bound.handler = self.handler.__get__(owner)
        for hook in ("probe_hook", "errored_hook"):
            function = getattr(self, hook)
            setattr(bound, hook, function.__get__(owner) if function else None)
        return bound

    def __get__(self, owner: object, kind: type | None = None) -> Method[P, R_co]:
        """On the class the Method itself; on an object, a copy bound to it."""
        return self if owner is None else self.attached(owner)

    # -- errors -------------------------------------------------------------------------

    def _explain(
        self, args: Mapping[str, Any], missing: Collection[str], unknown: Collection[str]
    ) -> str:
        wrong = []
        if missing:
            names = [name for name in self.signature.parameters if name in missing]
            wrong.append(f"missing a required argument: {_listed(names)}")
        if unknown:
            names = [name for name in args if name in unknown]
            known = list(self.signature.parameters)
            hints = [
                f"; did you mean {near!r} instead of {cut(name)}?"
                for name in names[:_MOST_NAMED]
                if (near := nearest(name, known))
            ]
            if (taken := self._context_name) in unknown:
                hints.append(
                    f"; the service gives {taken!r} to its handler: leave it out"
                    if taken in _CONTEXTS
                    # Without annotations: it was forgotten.
                    else f"; {taken!r} gets the Context: write def {self.name}(ctx, {taken}, ...)"
                )
            wrong.append(f"got an unexpected keyword argument {_listed(names)}{''.join(hints)}")
        return self._refusal("; ".join(wrong))

    def _refusal(self, why: str) -> str:
        return f"{self.name}{str(self.signature)[:_LONGEST_SIGNATURE]}: {why}"


# Bounds on refusals, which must be short and quick to make: any client can send requests with
# thousands of unknown names, many times a second.
_MOST_NAMED: Final = 3
_LONGEST_NAME: Final = 100
_LONGEST_SIGNATURE: Final = 500
_MOST_COMPARED: Final = 50
_ALIKE: Final = 3
_CONTEXTS: Final = frozenset({"ctx", "context"})


def _kind_of(value: object) -> str:
    """What an argument is, without its value, which is its caller's secret."""
    return f"a text of {len(value)}" if isinstance(value, str) else f"a {type(value).__name__}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(cut, names[:_MOST_NAMED]))
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most like *name*; of many, only those with the same beginning are compared."""
    if len(name) > _LONGEST_NAME:
        return None
    if len(known) > _MOST_COMPARED:
        known = [other for other in known if other[:_ALIKE] == name[:_ALIKE]][:_MOST_COMPARED]
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def _fitting(
    targets: set[MethodTarget], namespace: str | None, version: str | None
) -> set[MethodTarget]:
    """The matching *targets*, or all if none matches, with the values asked for put in."""
    if namespace is not None:
        near = {target for target in targets if target.namespace == namespace} or targets
        targets = {target._replace(namespace=namespace) for target in near}
    if version is not None:
        near = {target for target in targets if major(target.version) == major(version)} or targets
        targets = {target._replace(version=version) for target in near}
    return targets


def _ambiguous(name: str, targets: set[MethodTarget]) -> str:
    listed = sorted(targets, key=lambda target: (target.namespace or "", target.version))
    option = "namespace" if len({target.namespace for target in targets}) > 1 else "version"
    return (
        f"{name}() is served in {' and in '.join(map(str, listed))}, and it is not said which is "
        f"meant: pass the method of one object, as manager.{name}, or prepare({option}=…)"
    )


def _reference(owner: object) -> Callable[[], object]:
    """A weak reference if the class permits one: a Method must not keep its objects alive."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _signature(handler: Callable[..., Any], skip: int) -> inspect.Signature:
    check(handler, "method")
    parameters = list(inspect.signature(handler).parameters.values())
    if len(parameters) < skip:
        target = "second" if skip > 1 else "first"
        raise DeclarationError(
            f"{shown_name(handler)}() must take the Context as its {target} argument: "
            f"def {name_of(handler)}(ctx: Context, ...)"
        )
    rest = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for parameter in parameters[skip:]
    ]
    for parameter in rest:
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL}:
            raise DeclarationError(
                f"{shown_name(handler)}(): argument {parameter} is passed by position, "
                "but requests carry their arguments by name; make it a plain argument"
            )
    return inspect.Signature(rest)


def _names(signature: inspect.Signature) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the required arguments, and of all arguments."""
    parameters = signature.parameters.values()
    by_name = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    required = (p.name for p in parameters if p.kind in by_name and p.default is p.empty)
    return frozenset(required), frozenset(p.name for p in parameters if p.kind in by_name)


def _takes_more(signature: inspect.Signature) -> bool:
    """Whether it takes arguments of any name, by `**`."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _check(method: Method[Any, Any]) -> None:
    options, name = method.options, method.name
    _check_place(name, options.namespace, options.version)
    if name.startswith("_"):
        raise DeclarationError(f"{name}: a name that begins with '_' is private and never served")
    for option, given, words in (
        ("on_interrupt", options.on_interrupt, choices_of(OnInterrupt)),
        ("in_drain", options.in_drain, choices_of(InDrain)),
        ("allow_cancel", options.allow_cancel, choices_of(AllowCancel)),
    ):
        if given not in words:
            raise DeclarationError(f"{name}: {option}={given!r} is none of {', '.join(words)}")
    for option, is_given, missing in (
        ("retry_on", options.retry_on != (), "wait for its next try"),
        ("pending_timeout", options.pending_timeout_s is not None, "wait for capacity"),
    ):
        if is_given and options.on_interrupt == "requeue":
            raise DeclarationError(
                f"{name}: on_interrupt='requeue' keeps no journal row that could {missing}: leave "
                f"{option} out, or use on_interrupt='retry'"
            )
    if options.in_drain == "refuse" and not options.ops:
        raise DeclarationError(f"{name}: in_drain='refuse' is for @ops methods; others are refused")
    if options.resource is None:
        return
    argument = check_resource(name, options.resource)
    if options.on_interrupt == "requeue":
        raise DeclarationError(
            f"{name}: on_interrupt='requeue' keeps no journal row and so cannot hold the lease of "
            f"a resource; use 'retry' with resource={options.resource[0]!r}"
        )
    if argument not in {None, *method.signature.parameters}:
        raise DeclarationError(
            f"{name}: resource argument {argument!r} is not in {method.signature}; "
            "use resource=('kind', 'argument')"
        )
    check_path(name, options.resource[1], method.handler)


def _check_place(name: str, namespace: object, version: object) -> None:
    """Refuse a place at which no request could find a method.

    Raises:
        DeclarationError: it is none.
    """
    if not isinstance(version, str) or major(version) < 0:
        raise DeclarationError(
            f"{name}: version={version!r} is no version: write X.Y, such as version='1.0'"
        )
    if namespace is not None and not (isinstance(namespace, str) and namespace):
        raise DeclarationError(f"{name}: namespace={namespace!r} must be text, or left out")


def check_resource(name: str, resource: object) -> str | None:
    """The argument that a *resource* reads; None if a function may read any.

    Raises:
        DeclarationError: it has no kind, as a ResourceKind object, or no path or plain function.
    """
    match resource if isinstance(resource, tuple) else ():
        case (str(kind), str(source)) if kind != source or "." not in kind:
            return source.partition(".")[0]
        case (str(), source) if callable(source):
            check(source, f"{name}: the resource function", awaited=False)
            return None
    known = getattr(resource, "name", None)
    kind = known if isinstance(known, str) else "kind"
    raise DeclarationError(
        f"{name}: resource={resource!r} is no name: write resource={kind!r} if the argument has "
        f"the name of the kind, else resource=({kind!r}, 'argument') or ({kind!r}, 'argument.part')"
    )


def _check_hook(
    method: Method[Any, Any], hook: MethodHook, what: str, skip: int, *, extra: int
) -> None:
    check(hook, f"the {what} hook of {method.name},")
    expected = set(method.signature.parameters) | ({"reason"} if extra else set())
    parameters = inspect.signature(hook).parameters
    required, _ = _names(inspect.Signature([*parameters.values()][skip:]))
    if not method.takes_more and (unknown := required - expected):
        raise DeclarationError(
            f"the {what} hook of {method.name} needs {', '.join(map(repr, sorted(unknown)))}, and "
            f"{method.name}{method.signature} has no such argument: leave it out, or give it a "
            "default"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = expected - set(parameters)
    if missing:
        raise DeclarationError(
            f"the {what} hook of {method.name} must take the same arguments"
            f"{', plus reason' if extra else ''}; missing: {', '.join(sorted(missing))}"
        )


def cut(text: str | None) -> str:
    """A name from the wire, quoted and shortened for messages."""
    return repr(text and text[:_LONGEST_NAME])[:120]


def named(namespace: str | None) -> str:
    """A namespace, worded for messages."""
    return "the default namespace" if namespace is None else f"namespace {cut(namespace)}"
