"""Resources whose id is inside of an argument: paths, functions, and what refuses them."""

from __future__ import annotations

import dataclasses
import uuid
from collections import UserDict
from typing import Any, NamedTuple, TypedDict

import msgspec
import pytest

from gracekit import Context, Service
from gracekit.errors import DeclarationError, InvalidArgumentsError
from gracekit.rpc.methods import Method
from gracekit.rpc.offer import can_serve, written


class Flavor(msgspec.Struct):
    name: str


class Instance:
    """With attributes of each sort: annotated, of the class, a property, set by a method."""

    uuid: str
    host = "node-1"

    def __init__(self, flavor: Flavor) -> None:
        self.flavor_of = flavor

    @property
    def display_name(self) -> str:
        raise RuntimeError(f"no name for {self.uuid}")


class Volume(NamedTuple):
    volume_id: str


class Port(TypedDict):
    port_id: str
    flavor: Flavor


@dataclasses.dataclass
class Share:
    share_id: str
    port: Port | None = None


class Lazy:
    def __getattr__(self, name: str) -> str:
        return name


def method_of(source: Any, annotation: Any = Any, **options: Any) -> Method[..., Any]:
    """A method `build(ctx, it)` that acts on a thing."""

    async def build(ctx: Context, it: Any = None) -> None: ...

    build.__annotations__["it"] = annotation
    made: Method[..., Any] = Service("shop").rpc(resource=("thing", source), **options)(build)
    return made


# -- reading ----------------------------------------------------------------------------

INSTANCE = Instance(Flavor("small"))
INSTANCE.uuid = "i-1"


@pytest.mark.parametrize(
    ("source", "it", "found"),
    [
        ("it.uuid", {"uuid": "i-1"}, "i-1"),
        ("it.uuid", INSTANCE, "i-1"),
        ("it.keys", {"keys": 7}, "7"),  # a key, not the method of a mapping
        ("it.flavor_of.name", INSTANCE, "small"),
        ("it.a.b.c", {"a": UserDict(b={"c": uuid.UUID(int=7)})}, str(uuid.UUID(int=7))),
        (lambda args: args["it"]["a.b"]["uuid"], {"a.b": {"uuid": "i-1"}}, "i-1"),
        (lambda args: args["it"].uuid, INSTANCE, "i-1"),
    ],
)
def test_the_id_is_read_from_inside_of_an_argument(source: Any, it: Any, found: str):
    """Keys of mappings, attributes of others, or what a function returns."""
    assert method_of(source).resource_of({"it": it}) == ("thing", found)


SECRET = "s3cret"


@pytest.mark.parametrize(
    ("source", "it", "words"),
    [
        ("it.uuid", {}, "needs a value for 'it.uuid': it names the thing"),
        ("it.uuid", None, "needs a value for 'it.uuid': it names"),
        ("it.uuid", {"uuid": ""}, "needs a value for 'it.uuid': it names"),
        ("it.uuid", {"uuid": None}, "needs a value for 'it.uuid': it names"),
        ("it.uuid", [SECRET], "needs a value for 'it.uuid': it names"),
        ("it.uuid.x", {"uuid": {}}, "needs a value for 'it.uuid.x': it names"),
        ("it.uuid", {"uuid": {SECRET: 1}}, "NUL, for 'it.uuid', and not a dict: it names"),
        ("it.uuid", {"uuid": SECRET * 99}, "for 'it.uuid', and not a text of 594: it names"),
        ("it.title", SECRET, "for 'it.title', and not a builtin_function_or_method: it names"),
        ("it.flavor_of", INSTANCE, "for 'it.flavor_of', and not a Flavor: it names"),
        (
            "it.display_name",
            INSTANCE,
            "needs a value for 'it.display_name', and reading it raised RuntimeError: it names",
        ),
        (
            lambda args: args["it"][SECRET],
            {},
            "value for the result of its resource function, and reading it raised KeyError: it",
        ),
        (lambda args: args["it"], INSTANCE, "resource function, and not a Instance: it names"),
    ],
)  # fmt: skip
def test_what_has_no_id_is_a_wrong_argument(source: Any, it: Any, words: str):
    """The refusal names the path, and shows no value."""
    with pytest.raises(InvalidArgumentsError) as told:
        method_of(source).resource_of({"it": it})

    assert words in str(told.value)
    assert SECRET not in str(told.value)
    assert "i-1" not in str(told.value)


def test_siblings_judge_a_path_and_leave_a_function_to_the_run():
    """In a rolling upgrade, a request without an id is not given back for a sibling."""
    path, function = Service("shop"), Service("shop")
    path.rpc(resource=("thing", "it.uuid"))(method_of("it").handler)
    function.rpc(resource=("thing", lambda args: args["it"]))(method_of("it").handler)

    def served(svc: Service, it: Any) -> bool:
        return can_serve(written(svc.methods), None, "build", "1.0", {"it": it})

    assert (served(path, {"uuid": "i-1"}), served(path, {})) == (True, False)
    assert (served(function, "i-1"), served(function, None)) == (True, True)


# -- declarations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "path", "words"),
    [
        (Instance, "it.uid", "'it.uid': Instance has no 'uid'; did you mean uuid"),
        (Instance | None, "it.uid", "has no 'uid'; did you mean uuid"),
        (Flavor, "it.nam", "Flavor has no 'nam'; did you mean name"),
        (Volume, "it.volume", "Volume has no 'volume'; did you mean volume_id"),
        (Port, "it.port", "Port has no 'port'; did you mean port_id"),
        (Share, "it.share", "Share has no 'share'; did you mean share_id"),
        (Share, "it.port.flavor.nam", "Flavor has no 'nam'; did you mean name"),
        (str, "it.uuid", "str has no 'uuid'"),
        (dict, "it.no-name", "path 'it.no-name': 'no-name' is no public name"),
        (dict, "it._uuid", "path 'it._uuid': '_uuid' is no public name"),
        (dict, "it.", "path 'it.': '' is no public name"),
        (dict, "that.uuid", "resource argument 'that' is not in"),
    ],
)
def test_a_path_that_cannot_be_is_refused(annotation: Any, path: str, words: str):
    """At the declaration, with the name that may have been meant."""
    with pytest.raises(DeclarationError) as told:
        method_of(path, annotation)

    assert words in str(told.value)


@pytest.mark.parametrize(
    ("annotation", "path"),
    [
        *((Instance, f"it.{part}") for part in ("uuid", "host", "display_name", "flavor_of")),
        (Instance, "it.host.anything"),
        (Instance | dict[str, str], "it.uid"),
        (Share, "it.port.flavor.name"),
        *((kind, "it.uuid") for kind in (dict, dict[str, Any], Any, object, Lazy, UserDict)),
        ("nowhere.Unknown", "it.uuid"),
        ("list[Unknown]", "it.uuid"),
    ],
)
def test_a_path_that_types_do_not_refute_is_taken(annotation: Any, path: str):
    """Where a type says nothing, the first request does."""
    assert method_of(path, annotation).options.resource == ("thing", path)


async def later(args: Any) -> str:
    return "i-1"


@pytest.mark.parametrize(
    "resource", ["it.uuid", ("it", 5), ("it", "it.uuid", "it"), (later, "it"), later]
)
def test_what_is_neither_path_nor_function_is_refused(resource: Any):
    """With the two shapes that it can have."""

    async def build(ctx: Context, it: Any) -> None: ...

    with pytest.raises(DeclarationError, match=r"\('kind', 'argument'\) or \('kind', 'argument\."):
        Service("shop").rpc(resource=resource)(build)
