"""Endpoints of oslo.messaging under gracekit: their callers see what oslo's server would show them.

Runs where the library is installed; `test_environment.py` sees to that.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import gc
import io
import json
import logging
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from unittest import mock

import oslo_messaging
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oslo_config import cfg
from oslo_context.context import RequestContext, get_current
from oslo_log import log
from oslo_log.formatters import ContextFormatter
from oslo_messaging import opts
from oslo_messaging._drivers import common
from oslo_service import _options

from gracekit import (
    ConfigError,
    Context,
    Done,
    GracekitError,
    NoSuchMethodError,
    Service,
    Settings,
    TaskInterruptedError,
    UnsupportedVersionError,
    current,
)
from gracekit.doctor import configuration
from gracekit.doctor.finding import Level
from gracekit.errors import DeclarationError
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.oslo_adapter import include_endpoints
from gracekit.telemetry import RequestFilter
from gracekit.testing import InMemoryService, TaskState
from tests.docs.pages import Page
from tests.oslo import faults
from tests.oslo.reference import Answer, a_request, ask_gracekit, ask_oslo
from tests.scale import scale
from tests.service.kit import World
from tests.testing.virtual import virtual

DISPATCHER = "oslo_messaging.rpc.dispatcher"
Target = oslo_messaging.Target
app = logging.getLogger("app")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.check_accounts()
    made.check_faults()
    await made.close()


class Stock:
    """An endpoint as projects write them: plain methods, and much else in the class."""

    target = Target(version="1.2")
    opened = 0
    Error = ValueError
    kind = "an attribute"
    clock = time.time
    getter = iter

    def echo(self, ctxt: Any, **args: Any) -> Any:
        return args

    def shape(self, ctxt: Any, first: Any, second: Any = "two") -> Any:
        return [first, second]

    @oslo_messaging.expose
    def context(self, ctxt: Any) -> Any:
        return ctxt

    def fail(self, ctxt: Any, fault: str) -> None:
        raise faults.fault(fault)

    @oslo_messaging.expected_exceptions(faults.NotFound)
    def fail_as_expected(self, ctxt: Any, fault: str) -> None:
        raise faults.fault(fault)

    def pass_on(self, ctxt: Any, told: str) -> None:
        """As an oslo client in an endpoint would raise it, here from what came over the wire."""
        raise common.deserialize_remote_exception(told, [faults.__name__])

    def odd(self, ctxt: Any) -> object:
        return object()

    def start(self) -> None:
        """Of the service, not for callers: it takes no context."""

    @property
    def costly(self) -> Any:
        raise AssertionError("read")

    @cached_property
    def later(self) -> Any:
        raise AssertionError("read")

    def _private(self, ctxt: Any) -> str:
        return "private"


async def both(world: World, body: bytes, **options: Any) -> tuple[Answer | None, Answer]:
    """What oslo's server and what gracekit answers."""
    return ask_oslo([Stock()], body, **options), await ask_gracekit(
        world, [Stock()], body, **options
    )


# -- answers ----------------------------------------------------------------------------


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("method", "args", "fields"),
    [
        ("echo", {}, {}),
        ("echo", {"a": None, "b": [1, {"c": 2.5}], "ctx": "x", "handler": "y"}, {}),
        ("shape", {"first": 1}, {}),
        ("shape", {"first": 1, "second": 2}, {"version": "1.2"}),
        ("context", {}, {}),
        ("context", {}, {"context": {"user": "ann", "roles": ["admin"], "client_timeout": 9}}),
        ("context", {}, {"context": {"msg_id": "m", "reply_q": "q", "more": None}}),
    ],
)
async def test_results_are_the_same(world: World, method: str, args: Any, fields: Any):
    """Arguments, defaults and the context reach the method as they do under oslo."""
    oslo, ours = await both(world, a_request(method, args, **fields))

    assert oslo is not None
    assert oslo.failure is None
    assert ours == oslo


ANSWERED_BY_OSLO = [name for name in faults.FAULTS if name not in {"args_not_json", "system_exit"}]


@pytest.mark.looptime
@pytest.mark.parametrize("method", ["fail", "fail_as_expected"])
@pytest.mark.parametrize("fault", ANSWERED_BY_OSLO)
async def test_failures_are_the_same(world: World, method: str, fault: str):
    """Class, module, text, args and kwargs; what was declared as expected is not wrapped."""
    oslo, ours = await both(world, a_request(method, {"fault": fault}))

    assert oslo is not None
    assert oslo.failure is not None
    assert ours == oslo


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("TooMany", faults.__name__),  # rebuilt, as TooMany_Remote
        ("ValueError", "builtins"),
        ("Unknown", "elsewhere"),  # a RemoteError
    ],
)
async def test_failures_that_are_passed_on_are_the_same(world: World, name: str, module: str):
    """What a method lets through of what another service raised."""
    told = {"class": name, "module": module, "message": "m", "tb": ["a\n", "b\n"], "args": ["x", 7]}

    oslo, ours = await both(world, a_request("pass_on", {"told": json.dumps(told)}))

    assert oslo is not None
    assert oslo.failure is not None
    assert ours == oslo


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("method", "args", "kind"),
    [
        ("fail", {"fault": "args_not_json"}, ("ValueError", "builtins")),
        ("fail", {"fault": "system_exit"}, ("SystemExit", "builtins")),
        ("odd", {}, ("UnserialisableError", "gracekit.errors")),
    ],
)
async def test_what_oslo_leaves_unanswered_is_answered(
    world: World, method: str, args: Any, kind: tuple[str, str]
):
    """Its caller would wait for the whole timeout; ours hears at once."""
    oslo, ours = await both(world, a_request(method, args))

    assert oslo is None
    assert ours.kind == kind


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("method", "args", "fields", "kind"),
    [
        ("shape", {}, {}, ("TypeError", "builtins")),
        ("shape", {"first": 1, "third": 3}, {}, ("TypeError", "builtins")),
        ("shape", {"first": 1, "ctxt": 3}, {}, ("TypeError", "builtins")),
        ("nothing", {}, {}, ("NoSuchMethod", DISPATCHER)),
        ("_private", {}, {}, ("NoSuchMethod", DISPATCHER)),
        ("__init__", {}, {}, ("NoSuchMethod", DISPATCHER)),
        ("echo", {}, {"version": "1.3"}, ("UnsupportedVersion", DISPATCHER)),
        ("echo", {}, {"version": "2.0"}, ("UnsupportedVersion", DISPATCHER)),
        ("nothing", {}, {"version": "2.0"}, ("UnsupportedVersion", DISPATCHER)),
        ("echo", {}, {"namespace": "shop"}, ("UnsupportedVersion", DISPATCHER)),
    ],
)
async def test_refusals_are_the_same(
    world: World, method: str, args: Any, fields: Any, kind: tuple[str, str]
):
    """Class and module, by which callers go; our texts say more."""
    oslo, ours = await both(world, a_request(method, args, **fields))

    assert oslo is not None
    assert ours.kind == oslo.kind == kind


@pytest.mark.looptime
@pytest.mark.parametrize(
    "method", ["start", "kind", "opened", "target", "Error", "clock", "getter", "costly"]
)
async def test_what_is_no_method_is_not_served(world: World, method: str):
    """Oslo calls whatever has the name, and answers what comes of it; a class it would even
    make.
    """
    answer = await ask_gracekit(world, [Stock()], a_request(method))

    assert answer.kind == ("NoSuchMethod", DISPATCHER)


class Callable:
    """As oslo.config's CONF is one."""

    def __call__(self, ctxt: Any = None) -> str:
        return "called"


def wrapped(function: Any) -> Any:
    """A decorator as projects write them."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Attributes:
    """What can be called in a class and on its objects; only the second part are its methods."""

    conf = Callable()
    wait = Callable().__call__
    part = functools.partial(Callable())
    built = staticmethod(iter)

    def __init__(self) -> None:
        self.own = Callable()
        self.made = lambda ctxt: "made"

    def plain(self, ctxt: Any) -> str:
        return "plain"

    @staticmethod
    def static(ctxt: Any) -> str:
        return "static"

    @classmethod
    def of_class(cls, ctxt: Any) -> str:
        return "of_class"

    @wrapped
    def decorated(self, ctxt: Any) -> str:
        return "decorated"

    @functools.lru_cache  # noqa: B019 - as they write it
    def cached(self, ctxt: Any) -> str:
        return "cached"

    def _given(self, ctxt: Any, word: str) -> str:
        return word

    given = functools.partialmethod(_given, word="given")


class Inherits(Attributes):
    """The same by inheritance."""


@pytest.mark.parametrize("kind", [Attributes, Inherits])
def test_only_functions_of_the_class_are_served(kind: type[Any]):
    """`conf = cfg.CONF` in an endpoint is no method of it: a caller must not read options
    through it.
    """
    svc = Service("shop")

    include_endpoints(svc, [kind()])

    served = {method.name for method in svc.methods}
    assert served == {"plain", "static", "of_class", "decorated", "cached", "given"}


@pytest.mark.looptime
async def test_a_callable_attribute_answers_no_such_method(world: World):
    """As a name that there is not."""
    for name in ("conf", "wait", "part", "built", "own", "made"):
        answer = await ask_gracekit(world, [Attributes()], a_request(name))
        assert answer.kind == ("NoSuchMethod", DISPATCHER)


def test_functions_of_an_object_are_served_where_options_name_them():
    """Beside those of `__getattr__`; a callable object is not even then."""
    svc = Service("shop")
    include_endpoints(svc, [Attributes()], options={"made": {}})
    assert svc.methods.resolve(None, "made", "1.0")({}) == "made"

    with pytest.raises(DeclarationError, match=r"options\['conf'\]: no endpoint serves it"):
        include_endpoints(Service("shop"), [Attributes()], options={"conf": {}})


def test_a_mock_is_not_served():
    """Neither as an endpoint nor as a method of one: only functions are."""
    svc, stock = Service("shop"), Stock()
    stock.shape = mock.MagicMock()  # type: ignore[method-assign]

    include_endpoints(svc, [mock.create_autospec(Stock, instance=True), stock])

    assert svc.methods.resolve(None, "echo", "1.0")
    with pytest.raises(NoSuchMethodError):
        svc.methods.resolve(None, "shape", "1.0")


def test_a_later_patch_is_called(monkeypatch: pytest.MonkeyPatch):
    """As under oslo: a request finds what the name means when it comes."""
    stock, svc = Stock(), Service("shop")
    include_endpoints(svc, [stock])

    monkeypatch.setattr(Stock, "shape", lambda self, ctxt, **args: "of the class")
    assert svc.methods.resolve(None, "shape", "1.2")({}, first=1) == "of the class"
    monkeypatch.setattr(stock, "shape", mock.Mock(return_value="of the object"))
    assert svc.methods.resolve(None, "shape", "1.2")({}, first=1) == "of the object"


# -- which endpoint ---------------------------------------------------------------------

NAMESPACES = st.sampled_from([None, "ops", "base"])
VERSIONS = st.sampled_from(["1.0", "1.2", "1.2.0", "1.2.5", "1.3", "1.10", "2.0", "2.1"])
NAMES = st.sampled_from(["make", "sell", "count"])


@st.composite
def an_endpoint(draw: st.DrawFn) -> Any:
    """Some of three methods, each of which says whose it is; with or without a Target."""
    kind = type("Endpoint", (), {})
    for name in draw(st.sets(NAMES)):
        setattr(kind, name, lambda self, ctxt, _name=name: [id(self), _name])
    if draw(st.booleans()):
        kind.target = Target(
            namespace=draw(NAMESPACES),
            version=draw(VERSIONS | st.none()),
            legacy_namespaces=draw(st.none() | st.lists(NAMESPACES, max_size=2, unique=True)),
        )
    return kind()


@given(
    endpoints=st.lists(an_endpoint(), max_size=4),
    requests=st.lists(st.tuples(NAMESPACES, NAMES, VERSIONS), min_size=5, max_size=20),
)
@settings(max_examples=scale(150, 20_000))
def test_of_several_endpoints_the_same_is_asked(
    endpoints: list[Any], requests: list[tuple[str | None, str, str]]
):
    """The first whose namespace and version fit and that has the method; or the same refusal."""
    svc = Service("shop")
    include_endpoints(svc, endpoints)
    # An endpoint without methods has a place for oslo, and none for gracekit.
    known = [endpoint for endpoint in endpoints if any(hasattr(endpoint, n) for n in METHODS)]

    for namespace, name, version in requests:
        assert ours_asked(svc, namespace, name, version) == oslo_asked(
            known, namespace, name, version
        )


METHODS = ("make", "sell", "count")


def ours_asked(svc: Service, namespace: str | None, name: str, version: str) -> Any:
    try:
        return svc.methods.resolve(namespace, name, version)({})
    except NoSuchMethodError:
        return oslo_messaging.NoSuchMethod
    except UnsupportedVersionError:
        return oslo_messaging.UnsupportedVersion


def oslo_asked(endpoints: list[Any], namespace: str | None, name: str, version: str) -> Any:
    message = {"method": name, "namespace": namespace, "version": version, "args": {}}
    incoming = types.SimpleNamespace(message=message, ctxt={}, client_timeout=None)
    try:
        return oslo_messaging.RPCDispatcher(endpoints, None).dispatch(incoming)
    except oslo_messaging.RPCDispatcherError as error:
        return type(error)


# -- serializers and policies -----------------------------------------------------------


class Labels(oslo_messaging.Serializer):
    """Shows each of its steps in the data."""

    def serialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return {"for": ctxt["user"], "entity": entity}

    def deserialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return {"from": ctxt["user"], "entity": entity}

    def serialize_context(self, ctxt: Any) -> Any:
        raise AssertionError("a server writes no context")

    def deserialize_context(self, ctxt: Any) -> Any:
        return {**ctxt, "user": ctxt["user"].upper()}


@pytest.mark.looptime
@pytest.mark.parametrize(("method", "args"), [("echo", {"a": 1, "b": [2]}), ("context", {})])
async def test_a_serializer_has_its_say(world: World, method: str, args: Any):
    """It makes the context, each argument, and the result."""
    body = a_request(method, args, context={"user": "ann"})

    oslo, ours = await both(world, body, serializer=Labels())

    assert oslo is not None
    assert oslo.failure is None
    assert ours == oslo


@pytest.mark.looptime
@pytest.mark.parametrize("method", ["echo", "context"])
@pytest.mark.parametrize(
    "policy",
    [
        None,
        oslo_messaging.LegacyRPCAccessPolicy,
        oslo_messaging.DefaultRPCAccessPolicy,
        oslo_messaging.ExplicitRPCAccessPolicy,
    ],
)
async def test_a_policy_says_what_is_served(world: World, method: str, policy: Any):
    """`ExplicitRPCAccessPolicy` lets through only what is marked with `expose`."""
    oslo, ours = await both(world, a_request(method), access_policy=policy)

    assert oslo is not None
    assert ours == oslo or ours.kind == oslo.kind == ("NoSuchMethod", DISPATCHER)
    refused = policy is oslo_messaging.ExplicitRPCAccessPolicy and method == "echo"
    assert (ours.kind is not None) == refused


@pytest.mark.looptime
async def test_private_methods_stay_private_under_the_legacy_policy(world: World):
    """The one thing in which gracekit is stricter, and on purpose."""
    policy = oslo_messaging.LegacyRPCAccessPolicy

    oslo, ours = await both(world, a_request("_private"), access_policy=policy)

    assert oslo == Answer(result="private")
    assert ours.kind == ("NoSuchMethod", DISPATCHER)


# -- the log ----------------------------------------------------------------------------


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("method", "fault", "level"),
    [
        ("fail", "app_with_kwargs", logging.WARNING),
        ("fail_as_expected", "app_with_kwargs", logging.DEBUG),
        ("fail_as_expected", "builtin", logging.WARNING),
    ],
)
async def test_what_is_expected_is_no_warning_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture, method: str, fault: str, level: int
):
    """That is all that `expected_exceptions` changes."""
    caplog.set_level(logging.DEBUG)

    await ask_gracekit(world, [Stock()], a_request(method, {"fault": fault}))

    (said,) = [r for r in caplog.records if getattr(r, "event", "") == "task.failed"]
    assert (said.levelno, said.__dict__["method"]) == (level, method)
    assert said.__dict__["error"].startswith(f"{type(faults.fault(fault)).__name__}: ")


@pytest.mark.looptime
async def test_an_expected_failure_keeps_none_of_its_variables(world: World):
    """The exception is unwrapped, and raised again by the adapter."""

    class Kept:
        """Something large."""

    kept: list[weakref.ref[Kept]] = []

    class Endpoint:
        @oslo_messaging.expected_exceptions(faults.NotFound)
        def fail(self, ctxt: Any) -> None:
            large = Kept()
            kept.append(weakref.ref(large))
            raise faults.NotFound(item="lamp")

    gc.collect()
    gc.disable()
    try:
        await ask_gracekit(world, [Endpoint()], a_request("fail"))

        assert [one() for one in kept] == [None]
    finally:
        gc.enable()


class Contexts(oslo_messaging.Serializer):
    """As the projects have one: the context is an object, which keeps itself for its thread."""

    def serialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return entity

    def deserialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return entity

    def serialize_context(self, ctxt: Any) -> Any:
        raise AssertionError("a server writes no context")

    def deserialize_context(self, ctxt: Any) -> Any:
        return RequestContext.from_dict(ctxt)


@pytest.fixture
def oslo_log() -> Iterator[io.StringIO]:
    """The log as oslo.log formats it, with the filter of gracekit for lines of other handlers."""
    conf, stream, root = cfg.ConfigOpts(), io.StringIO(), logging.getLogger()
    log.register_options(conf)
    conf([])
    form = "%(name)s [%(request_id)s] %(message)s"
    conf.set_default("logging_context_format_string", form)
    conf.set_default("logging_default_format_string", "%(name)s [-] %(message)s")
    handler, level = logging.StreamHandler(stream), root.level
    handler.addFilter(RequestFilter())
    handler.setFormatter(ContextFormatter(config=conf))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.parametrize("fails", [False, True])
@virtual
async def test_the_context_of_a_request_is_on_its_lines_and_not_on_those_of_the_next(
    fails: bool, oslo_log: io.StringIO
):
    """A serializer's context keeps itself in the store of oslo.context for the thread, from which
    oslo.log takes it. The thread serves others afterwards, and they must not find it there.
    """
    threads = []

    class Endpoint:
        def look(self, ctxt: Any) -> None:
            app.info("inside")
            threads.append(threading.get_ident())
            if fails:
                raise LookupError("no disk")

    svc = Service("shop")
    include_endpoints(svc, [Endpoint()], serializer=Contexts())

    @svc.rpc
    def plain(ctx: Context) -> bool:
        app.info("beside")
        threads.append(threading.get_ident())
        return get_current() is None

    async with InMemoryService(svc, threads=1) as one:
        with contextlib.suppress(LookupError, GracekitError):
            await one.prepare(context={"request_id": "req-1", "user_id": "ann"}).call("look")
        assert await one.call("plain") is True

    assert len(set(threads)) == 1
    lines = oslo_log.getvalue().splitlines()
    assert "app [req-1] inside" in lines
    assert "app [-] beside" in lines


@virtual
async def test_context_keys_are_on_lines_under_oslo_log(oslo_log: io.StringIO):
    """On those of events, which no thread of the request logs; and, by the filter, on those of a
    handler whose context is a dictionary.
    """

    class Endpoint:
        def look(self, ctxt: Any) -> None:
            app.info("inside")

    svc = Service("shop", context_keys=("request_id", "user_id"))
    include_endpoints(svc, [Endpoint()])

    async with InMemoryService(svc) as one:
        await one.prepare(context={"request_id": "req-1", "user_id": "ann"}).call("look")

    lines = oslo_log.getvalue().splitlines()
    assert "app [req-1] inside" in lines
    (started,) = [line for line in lines if " task.started " in line]
    assert started.startswith("gracekit [req-1] task.started task_id=")


# -- under gracekit ---------------------------------------------------------------------


@virtual
async def test_methods_run_in_threads_at_the_same_time():
    """Two that wait for each other both go on, and the loop with them."""
    meeting = threading.Barrier(2, timeout=20)

    class Endpoint:
        def meet(self, ctxt: Any) -> bool:
            meeting.wait()
            return threading.current_thread() is threading.main_thread()

    svc = Service("shop")
    include_endpoints(svc, [Endpoint()])
    async with InMemoryService(svc) as one:
        first, second = one.start_call("meet"), one.start_call("meet")
        assert [await first, await second] == [False, False]


def a_mover(moved: list[int]) -> Service:
    """An endpoint that has learnt one thing of gracekit: safe points."""

    class Mover:
        target = Target(version="3.1")

        def move(self, ctxt: Any, vm: str, blocks: int) -> str:
            for block in current().steps(range(blocks)):
                moved.append(block)  # noqa: PERF402 - one at a time is the point
            return f"{vm} for {ctxt['user']}"

        @oslo_messaging.expected_exceptions(faults.NotFound)
        def resize(self, ctxt: Any, vm: str) -> int | None:
            return current().fence

        def delete(self, ctxt: Any, vm: str) -> None:
            raise AssertionError("not played")

    svc = Service("compute")
    options = {
        "move": {"resource": "vm", "on_interrupt": "retry"},
        "resize": {"resource": "vm"},
    }
    include_endpoints(svc, [Mover()], options=options)
    return svc


@virtual
async def test_a_method_can_stop_at_safe_points_of_gracekit():
    """`gracekit.current()` is there: in a drain it stops, and the next process goes on."""
    moved: list[int] = []
    async with InMemoryService(a_mover(moved)) as one:
        one.interrupt_at(2)
        view = one.prepare(version="3.0", context={"user": "ann"})
        pending = view.start_call("move", vm="vm-1", blocks=4)
        report = await one.wait_stopped()
        assert report.handed_over == [pending.request_id]
        assert moved == [0, 1]

        await one.start()
        assert await pending == "vm-1 for ann"

    assert moved == [0, 1, 2, 3]


@virtual
async def test_options_are_those_of_a_method_of_gracekit():
    """What names no option is `error`; a resource is leased, also behind a decorator that hides
    names.
    """
    svc = a_mover([])
    policies = {method.name: method.options.on_interrupt for method in svc.methods}
    assert policies == {"move": "retry", "resize": "error", "delete": "error"}

    async with InMemoryService(svc) as one:
        view = one.prepare(version="3.1")
        assert await view.call("resize", vm="vm-1") == 1
        assert await view.call("resize", vm="vm-1") == 2
        with pytest.raises(TypeError, match="missing a required argument"):
            await view.call("resize")


@virtual
async def test_hooks_come_with_the_options():
    """A probe decides after a crash, an errored hook is told; both get gracekit's own context."""
    told: list[tuple[str, str]] = []
    gate = threading.Event()

    class Endpoint:
        def create(self, ctxt: Any, disk: str) -> None:
            gate.wait(20)

        def charge(self, ctxt: Any, disk: str) -> None:
            gate.wait(20)

    async def is_it_there(ctx: Context, disk: str) -> Done:
        return Done(f"{disk} is there")

    async def errored(ctx: Context, disk: str, reason: str) -> None:
        told.append((disk, reason))

    svc = Service("shop")
    options = {
        "create": {"on_interrupt": "probe", "probe": is_it_there, "settle": 0},
        "charge": {"errored": errored},
    }
    include_endpoints(svc, [Endpoint()], options=options)
    async with InMemoryService(svc) as one:
        created = one.start_call("create", disk="d1")
        charged = one.start_call("charge", disk="d2")
        await one.until(lambda: one.state_of(charged.request_id) is TaskState.RUNNING)
        await one.crash()
        gate.set()
        await one.start()
        assert await created == "d1 is there"
        with pytest.raises(TaskInterruptedError):
            await charged

    assert told == [("d2", "interrupted")]


def test_methods_of_one_name_get_different_options_by_calls_of_their_own():
    """Options are given by name, so endpoints of one call share them."""

    class Old:
        target = Target(namespace="old")

        def create(self, ctxt: Any) -> None: ...

    class New(Old):
        target = Target(namespace="new")

    svc = Service("compute")
    include_endpoints(svc, [Old()], options={"create": {"on_interrupt": "requeue"}})
    include_endpoints(svc, [New()], options={"create": {"on_interrupt": "retry"}})

    found = [svc.methods.resolve(name, "create", "1.0").options for name in ("old", "new")]
    assert [one.on_interrupt for one in found] == ["requeue", "retry"]


def test_methods_of_getattr_are_served_where_options_name_them():
    """A proxy lists nothing; a request never makes gracekit look for an attribute."""

    class Proxy:
        target = Target(version="6.0")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("vm_"):
                return lambda ctxt, **args: [name, args]
            raise AttributeError(name)

    svc = Service("compute")
    include_endpoints(svc, [Proxy()], options={"vm_start": {}})

    assert svc.methods.resolve(None, "vm_start", "6.0")({}, vm=1) == ["vm_start", {"vm": 1}]
    with pytest.raises(NoSuchMethodError):
        svc.methods.resolve(None, "vm_stop", "6.0")


@pytest.mark.parametrize("policy", [oslo_messaging.DefaultRPCAccessPolicy(), "explicit"])
def test_an_access_policy_that_is_no_class_is_refused(policy: Any):
    """As by oslo with a TypeError, here one that says what to give."""
    with pytest.raises(DeclarationError, match="is no class: give a subclass of") as refused:
        include_endpoints(Service("shop"), [Stock()], access_policy=policy)

    assert isinstance(refused.value, TypeError)


# -- settings ----------------------------------------------------------------------------


def test_settings_come_from_oslo_config_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The function of docs/oslo.md reads what a service of OpenStack has in its file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "oslo"))
    shown = Page("oslo.md").files["oslo_main.py"]
    file = tmp_path / "service.conf"
    file.write_text(
        "[DEFAULT]\nhost = host1@lvm\ncontrol_exchange = cinder\n"
        "transport_url = rabbit://ann:pw@one:5671,ann:pw@two:5671/cloud?heartbeat_timeout_threshold=30\n"
        "[oslo_messaging_rabbit]\namqp_durable_queues = true\n"
    )
    conf = cfg.ConfigOpts()
    conf.register_opts([cfg.StrOpt("host")])
    conf(["--config-file", str(file)])
    names: dict[str, Any] = {}
    exec(shown, names)

    made = names["settings_from"](conf)

    url = read_url(made.transport_url, exchange=made.exchange, profile=made.declare_profile)
    assert [str(host) for host in url.hosts] == ["one:5671", "two:5671"]
    assert (url.vhost, made.exchange, made.host) == ("cloud", "cinder", "host1@lvm")
    assert url.heartbeat_s == 30
    assert made.declare_profile == "oslo-durable"
    assert made.origin("host") == "oslo.config [DEFAULT] host"


SITE = """
[DEFAULT]
host = node-1
transport_url = rabbit://ann:pw@one:5671/cloud
control_exchange = {exchange}
graceful_shutdown_timeout = {timeout}
executor_thread_pool_size = 64
[oslo_messaging_rabbit]
{rabbit}
"""


def site_of(tmp_path: Path, **options: object) -> cfg.ConfigOpts:
    """The oslo.config of one service, whose options are registered."""
    conf = cfg.ConfigOpts()
    conf.register_opts([cfg.StrOpt("host"), cfg.IntOpt("graceful_shutdown_timeout", default=60)])
    for group, found in opts.list_opts():
        conf.register_opts(found, group)
    file = tmp_path / "service.conf"
    file.write_text(SITE.format(**options))
    conf(["--config-file", str(file)])
    return conf


@pytest.mark.parametrize(
    ("exchange", "timeout", "rabbit", "profile", "query"),
    [
        ("nova", 180, "rabbit_quorum_queue = true", "oslo-quorum", ""),
        ("neutron", 80, "amqp_durable_queues = true\nssl = true", "oslo-durable", "?ssl=true"),
        (
            "cinder",
            80,
            "ssl = true\nssl_ca_file = /etc/ca.pem\nheartbeat_timeout_threshold = 30",
            "oslo-transient",
            "?ssl=true&ssl_ca_file=/etc/ca.pem&heartbeat_timeout_threshold=30",
        ),
    ],
)
def test_the_services_of_a_compute_site_become_settings(
    tmp_path: Path, exchange, timeout, rabbit, profile, query
):
    """Each keeps the time that its drain had, and options that are not used any more are named."""
    conf = site_of(tmp_path, exchange=exchange, timeout=timeout, rabbit=rabbit)

    made = Settings.from_oslo(conf, env={})

    assert (made.drain_timeout_s, made.exchange, made.host) == (timeout, exchange, "node-1")
    assert made.declare_profile == profile
    assert made.transport_url == f"rabbit://ann:pw@one:5671/cloud{query}"
    assert made.origin("drain_timeout_s") == "oslo.config [DEFAULT] graceful_shutdown_timeout"
    assert made.origin("prefetch") == "default"
    (doubt,) = made.doubts
    assert "[DEFAULT] executor_thread_pool_size is set and not used: see the table" in doubt
    levels = {finding.check: finding.level for finding in configuration.check_settings(made)}
    assert levels["oslo.config"] is Level.WARN


@pytest.mark.parametrize(
    ("given", "value", "origin"),
    [
        ("", False, "default"),
        ("rpc_ping_enabled = true", True, "oslo.config [DEFAULT] rpc_ping_enabled"),
    ],
)
def test_an_option_that_no_file_sets_leaves_the_default(tmp_path: Path, given, value, origin):
    """oslo registers `rpc_ping_enabled` with gracekit's own default."""
    conf = site_of(tmp_path, exchange=f"nova\n{given}", timeout=60, rabbit="")

    made = Settings.from_oslo(conf, env={})

    assert (made.rpc_ping_enabled, made.origin("rpc_ping_enabled")) == (value, origin)
    settings, *_ = configuration.check_settings(made)
    assert ("rpc_ping_enabled" in settings.seen) == value


OWN = {"drain_timeout": "180s"}


@pytest.mark.parametrize(
    ("by_code", "given", "defaults", "seconds", "origin"),
    [
        (None, [], OWN, 180, "service"),
        (None, [], {}, 25, "default"),
        (90, [], OWN, 180, "service"),
        (90, [], {}, 90, "oslo.config [DEFAULT] graceful_shutdown_timeout"),
        (90, ["file"], OWN, 50, "oslo.config [DEFAULT] graceful_shutdown_timeout"),
        (90, ["override"], OWN, 70, "oslo.config [DEFAULT] graceful_shutdown_timeout"),
        (90, ["file", "variable"], OWN, 40, "GRACEKIT_DRAIN_TIMEOUT"),
    ],
)
def test_only_what_is_set_counts_before_the_default_of_the_service(
    tmp_path: Path, by_code, given, defaults, seconds, origin
):
    """oslo.service registers 60 s, which nobody has asked for; a default that the service's code
    sets in oslo.config stands behind one that the service declares.
    """
    conf = cfg.ConfigOpts()
    options = copy.deepcopy(_options.service_opts)
    conf.register_opts(options)
    if by_code:
        cfg.set_defaults(options, graceful_shutdown_timeout=by_code)
    file = tmp_path / "service.conf"
    file.write_text("[DEFAULT]\n" + ("graceful_shutdown_timeout = 50\n" if "file" in given else ""))
    conf(["--config-file", str(file)])
    if "override" in given:
        conf.set_override("graceful_shutdown_timeout", 70)
    env = {"GRACEKIT_DRAIN_TIMEOUT": "40s"} if "variable" in given else {}

    made = Settings.from_oslo(conf, defaults=defaults, env=env)

    assert (made.drain_timeout_s, made.origin("drain_timeout_s")) == (seconds, origin)


def test_what_is_given_goes_before_variables_and_these_before_oslo_config(tmp_path: Path):
    """oslo.config wins over the defaults of the service."""
    conf = site_of(tmp_path, exchange="nova", timeout=180, rabbit="")

    made = Settings.from_oslo(
        conf,
        env={"GRACEKIT_DRAIN_TIMEOUT": "90s", "GRACEKIT_EXCHANGE": "mine"},
        defaults={"drain_timeout": "10s", "max_running": 3},
        drain_timeout="2m",
    )

    assert (made.drain_timeout_s, made.exchange, made.max_running) == (120, "mine", 3)
    assert made.origin("exchange") == "GRACEKIT_EXCHANGE"


@pytest.mark.parametrize(
    ("timeout", "rabbit", "doubt"),
    [
        (0, "", "graceful_shutdown_timeout = 0 means a drain without end"),
        (60, "heartbeat_timeout_threshold = 0", "heartbeats off"),
        (60, "rabbit_qos_prefetch_count = 1", "rabbit_qos_prefetch_count is set and not used"),
        (60, "amqp_auto_delete = true", "amqp_auto_delete is set"),
        (60, "rabbit_quorum_delivery_limit = 5", "rabbit_quorum_delivery_limit is set"),
        (60, "kombu_reconnect_delay = 2", "kombu_reconnect_delay is set"),
        (60, "kombu_compression = gzip", "kombu_compression is set"),
    ],
)
def test_what_cannot_be_mapped_is_named(tmp_path: Path, timeout, rabbit, doubt):
    """An operator must not believe that an option works that has no effect."""
    conf = site_of(tmp_path, exchange="nova", timeout=timeout, rabbit=rabbit)

    made = Settings.from_oslo(conf, env={})

    assert [text for text in made.doubts if re.search(doubt, text)]
    assert made.prefetch == 256
    assert made.drain_timeout_s == (timeout or 25)


def test_options_that_mean_no_profile_are_refused_with_the_others(tmp_path: Path):
    """All errors are reported together, wherever the settings come from."""
    conf = site_of(
        tmp_path, exchange="nova", timeout=-1, rabbit="rabbit_transient_quorum_queue = true"
    )

    with pytest.raises(ConfigError) as refused:
        Settings.from_oslo(conf, env={"GRACEKIT_MAX_RUNING": "3"})

    assert "oslo.config: rabbit_transient_quorum_queue alone has no profile" in str(refused.value)
    assert "did you mean GRACEKIT_MAX_RUNNING" in str(refused.value)


# -- resources inside of arguments ------------------------------------------------------


class Disk:
    """What a serializer makes of an argument."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class Disks(oslo_messaging.NoOpSerializer):
    """Makes a Disk of each text, and counts."""

    def __init__(self) -> None:
        self.read: list[tuple[Any, Any]] = []

    def deserialize_context(self, ctxt: Any) -> Any:
        assert not {"msg_id", "reply_q"} & ctxt.keys()
        return types.SimpleNamespace(**ctxt)

    def deserialize_entity(self, ctxt: Any, entity: Any) -> Any:
        self.read.append((ctxt.user, entity))
        if entity == "exit":
            raise SystemExit(entity)
        return Disk(entity)


class Storage:
    def attach(self, ctxt: Any, disk: Disk) -> Any:
        return disk.uuid

    def plain(self, ctxt: Any, disk: Any) -> Any:
        return disk if isinstance(disk, dict) else disk.uuid

    @oslo_messaging.expected_exceptions(faults.NotFound)
    def hidden(self, ctxt: Any, disk: Disk) -> Any:
        return disk.uuid


INSIDE: Final = {"resource": ("disk", "disk.uuid")}


@pytest.mark.looptime
@pytest.mark.parametrize("method", ["attach", "hidden"])
async def test_the_id_in_an_object_is_read_before_acceptance(world: World, method: str):
    """With the caller's context; the method gets an object as before."""
    serializer = Disks()
    body = a_request(method, {"disk": "d-1"}, context={"user": "ann", "msg_id": "m"})

    answer = await ask_gracekit(
        world, [Storage()], body, serializer=serializer, options={method: INSIDE}
    )

    assert answer == Answer(result="d-1")
    assert serializer.read == [("ann", "d-1")] * 2
    (row,) = world.rows("SELECT resource_kind, resource_id, state FROM task")
    assert tuple(row.values()) == ("disk", "d-1", "succeeded")


@pytest.mark.looptime
async def test_other_methods_are_read_once(world: World):
    """Only a path or a function needs the arguments early."""
    serializer = Disks()
    body = a_request("plain", {"disk": "d-1"}, context={"user": "ann"})

    answer = await ask_gracekit(
        world, [Storage()], body, serializer=serializer, options={"plain": {"resource": "disk"}}
    )

    assert answer == Answer(result="d-1")
    assert serializer.read == [("ann", "d-1")]


@pytest.mark.looptime
async def test_without_a_serializer_a_path_leads_through_plain_data(world: World):
    """As it does for gracekit's own methods."""
    options = {"plain": {"resource": ("disk", "disk.data.uuid")}}
    disk = {"data": {"uuid": "d-1"}}

    answer = await ask_gracekit(
        world, [Storage()], a_request("plain", {"disk": disk}), options=options
    )

    assert answer == Answer(result=disk)
    assert [row["resource_id"] for row in world.rows("SELECT resource_id FROM task")] == ["d-1"]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("disk", "said"),
    [("exit", "attach(): the serializer raised SystemExit"), ("", "needs a value for 'disk.uuid'")],
)
async def test_arguments_that_cannot_be_read_early_are_refused(world: World, disk: str, said: str):
    """As wrong arguments; the method is not called."""
    body = a_request("attach", {"disk": disk}, context={"user": "ann"})

    answer = await ask_gracekit(
        world, [Storage()], body, serializer=Disks(), options={"attach": INSIDE}
    )

    assert answer.kind == ("TypeError", "builtins")
    assert answer.failure is not None
    assert said in answer.failure["message"]
    (row,) = world.rows("SELECT state, reason, detail FROM task")
    assert (row["state"], row["reason"]) == ("rejected", "arguments")
    assert said in row["detail"]


# -- declarations that cannot work ------------------------------------------------------


class Async:
    async def work(self, ctxt: Any) -> None: ...


@contextlib.contextmanager
def timed() -> Iterator[None]:
    yield


class Hidden:
    @timed()
    async def work(self, ctxt: Any) -> None: ...


class OddTarget:
    target = "shop"

    def work(self, ctxt: Any) -> None: ...


@pytest.mark.parametrize(
    ("endpoint", "options", "words"),
    [
        (Async(), {}, "Async.work is a coroutine function"),
        (Hidden(), {}, "Hidden.work() is a coroutine function behind a plain decorator"),
        (OddTarget(), {}, "OddTarget.target is a str"),
        (Stock(), {"options": {"shap": {}}}, "no endpoint serves it; did you mean shape"),
        (Stock(), {"options": {"_private": {}}}, "no endpoint serves it"),
        (Stock(), {"options": {"shape": {"resorce": "first"}}}, "shape: unknown option 'resorce'"),
        (Stock(), {"options": {"shape": {"version": "2.0"}}}, "shape: unknown option 'version'"),
        (Stock(), {"options": {"shape": {"resource": "vm"}}}, "'vm' is not in"),
        (Stock(), {"options": {"shape": {"resource": ("vm", "vm.id")}}}, "'vm' is not in"),
        (
            Storage(),
            {"options": {"attach": {"resource": ("disk", "disk.uid")}}},
            "'disk.uid': Disk has no 'uid'; did you mean uuid",
        ),
        (Stock(), {"access_policy": Stock}, "access_policy=Stock is no subclass"),
    ],
)
def test_what_cannot_work_is_refused(endpoint: Any, options: Any, words: str):
    """At declaration, with the reason."""
    with pytest.raises(DeclarationError) as told:
        include_endpoints(Service("shop"), [endpoint], **options)

    assert words in str(told.value)


SHAPE: Final = "options={'create': {'on_interrupt': 'retry'}}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({Stock: {"resource": "first"}}, "Stock'>: write the name of a method, as options={"),
        ({1: {}}, "options name 1: write the name of a method"),
        ([("shape", {})], f"options must be a mapping, as {SHAPE}"),
        ("shape", f"options must be a mapping, as {SHAPE}"),
        ({"shape": "retry"}, f"options['shape']='retry' must be a mapping, as {SHAPE}"),
        ({"shape": None}, f"options['shape']=None must be a mapping, as {SHAPE}"),
        ({"shape": {1: 2}}, "shape: unknown option 1"),
        ({"shape": {"on_interrupt": "retyr"}}, "shape: on_interrupt='retyr' is none of error"),
        ({"shape": {"timeout": "5 min"}}, "shape: timeout='5 min' is not a duration"),
        ({"shape": {"probe": 5}}, "shape: probe=5 is no function"),
        ({"shape": {"ops": "yes"}}, "shape: ops='yes' must be True or False"),
        ({"shape": {"anywhere": 1}}, "shape: anywhere=1 must be True or False"),
        ({"echo": {"resource": ("vm",)}}, "echo: resource=('vm',) is no name"),
        ({"echo": {"resource": 5}}, "echo: resource=5 is no name"),
    ],
)
def test_options_of_a_wrong_shape_are_refused_with_the_right_one(options: Any, words: str):
    """As a declaration that cannot work, never as an error of the adapter's own code."""
    with pytest.raises(DeclarationError) as told:
        include_endpoints(Service("shop"), [Stock()], options=options)

    assert words in str(told.value)


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        (Stock(), "endpoints must be a list: write [Stock()]"),
        (Stock, "endpoints must be a list: write [Stock()]"),
        ([Stock], "Stock is a class, and its methods need an object: include Stock()"),
    ],
)
def test_endpoints_that_are_no_list_of_objects_are_refused(endpoints: Any, words: str):
    """Both mistakes are near at hand, and neither is one of the caller's types."""
    with pytest.raises(DeclarationError) as told:
        include_endpoints(Service("shop"), endpoints)

    assert words in str(told.value)


@pytest.mark.parametrize(
    ("endpoint", "options"), [(OddTarget(), {}), (Stock(), {"access_policy": Stock})]
)
def test_what_oslo_raises_a_type_error_for_is_one(endpoint: Any, options: Any):
    """Code that catches it goes on to work."""
    with pytest.raises(TypeError):
        include_endpoints(Service("shop"), [endpoint], **options)


def test_an_endpoint_may_have_no_methods():
    """As under oslo: others beside it are asked."""
    svc = Service("shop")

    include_endpoints(svc, [object(), Stock()])

    assert svc.methods.resolve(None, "shape", "1.0")({}, first=1) == [1, "two"]


def test_patched_threads_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Under eventlet's patches a worker thread is none, and the loop would stand still."""
    patcher = types.SimpleNamespace(is_monkey_patched=lambda what: what == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)

    with pytest.raises(DeclarationError, match=r"remove eventlet\.monkey_patch"):
        include_endpoints(Service("shop"), [Stock()])


@virtual
async def test_annotations_of_an_endpoint_are_not_checked():
    """As under oslo: its callers send what they always sent, and it gets that."""

    class Typed:
        def build(self, ctxt: Any, vm: int, at: dt.datetime | None = None) -> int:
            return [vm, at]  # type: ignore[return-value]

    svc = Service("shop")
    include_endpoints(svc, [Typed()])

    async with InMemoryService(svc) as one:
        assert await one.call("build", vm="vm-1", at="soon") == ["vm-1", "soon"]
