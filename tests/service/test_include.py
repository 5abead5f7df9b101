"""Classes as services: where each object's methods are served, and where a call of them goes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from gracekit import Context, Service, ops_method, rpc_method
from gracekit.errors import DeclarationError, UnsupportedVersionError
from tests.service.kit import World

pytestmark = pytest.mark.looptime


def desk() -> Any:
    """A class, as if just declared: its marks know of no other test."""

    class Desk:
        def __init__(self, name: str) -> None:
            self.name = name

        @rpc_method(on_interrupt="retry")
        async def who(self, ctx: Context) -> str:
            return self.name

        @ops_method
        async def where(self, ctx: Context) -> str:
            return self.name

    return Desk


async def test_each_object_is_called_where_it_is_served(world: World, svc: Service):
    """Two objects of one class, in two namespaces at two versions: a bound method finds its own."""
    kind = desk()
    east, west = kind("east"), kind("west")
    svc.include(east, namespace="east", version="1.3")
    svc.include(west, namespace="west", version="2.0")
    await world.start(svc)
    client = await world.client(svc)

    assert await client.call(east.who) == "east"
    assert await client.call(west.who) == "west"
    assert await client.call(east.where) == "east"
    assert (east.who.namespace, east.who.version) == ("east", "1.3")
    assert (west.who.namespace, west.who.version) == ("west", "2.0")


async def test_the_mark_of_a_class_served_twice_is_refused(world: World, svc: Service):
    """It does not say which is meant: the error names both places and the two ways to say it."""
    kind = desk()
    svc.include(kind("east"), namespace="east", version="1.3")
    svc.include(kind("west"), namespace="west", version="2.0")
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError) as told:
        await client.call(kind.who)

    for part in ("'east' at 1.3", "'west' at 2.0", "manager.who", "prepare(namespace=…)"):
        assert part in str(told.value)
    assert await client.prepare(namespace="west").call(kind.who) == "west"
    assert await client.prepare(version="1.2").call(kind.who) == "east"


async def test_a_version_alone_tells_places_of_one_namespace_apart(world: World, svc: Service):
    """One object served at two versions is called at the one that is asked for."""
    kind = desk()
    both = kind("both")
    svc.include(both, version="1.3")
    svc.include(both, version="2.0")
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError, match=r"prepare\(version=…\)"):
        await client.call(both.who)

    assert await client.prepare(version="1.1").call(both.who) == "both"
    assert await client.prepare(version="2.0").call(kind.who) == "both"


async def test_the_mark_of_a_class_served_once_is_enough(world: World, svc: Service):
    """A caller who has no object passes the mark, or the method of any object."""
    kind = desk()
    svc.include(kind("here"), namespace="here", version="1.3")
    await world.start(svc)
    client = await world.client(svc)

    assert await client.call(kind.who) == "here"
    assert await client.call(kind("elsewhere").who) == "here"
    with pytest.raises(UnsupportedVersionError):
        await client.prepare(namespace="there").call(kind.who)


async def test_two_objects_at_one_place_of_two_services_are_one_place():
    """A class that several services serve alike stays callable by its mark."""
    kind = desk()
    services = [Service("one"), Service("two")]
    for service in services:
        service.include(kind("x"), namespace="n")

    assert (kind.who.namespace, kind.who.version) == ("n", "1.0")


async def test_a_class_in_the_place_of_its_object_is_refused_with_what_to_write():
    """It does mark methods, and there is no object to call them on."""
    kind = desk()

    with pytest.raises(DeclarationError, match=rf"write svc.include\({kind.__name__}\(\)\)$"):
        Service("one").include(kind)


async def test_a_place_is_forgotten_with_its_object():
    """What is gone makes nothing ambiguous, and is not kept alive by its class."""
    kind = desk()
    Service("one").include(kind("gone"), namespace="old")
    gc.collect()
    assert kind.who.namespace == "old"
    service = Service("two")
    service.include(kind("here"), namespace="new")

    assert kind.who.namespace == "new"


async def test_an_object_without_weak_references_can_be_served(world: World, svc: Service):
    """`__slots__` is no obstacle."""

    class Slim:
        __slots__ = ()

        @rpc_method
        async def who(self, ctx: Context) -> str:
            return "slim"

    slim = Slim()
    svc.include(slim, namespace="n")
    await world.start(svc)

    assert await (await world.client(svc)).call(slim.who) == "slim"


async def test_an_include_that_is_refused_leaves_no_trace_on_the_class(svc: Service):
    """A name that is taken is no second place."""
    kind = desk()
    svc.include(kind("first"), namespace="n", version="1.0")
    second = kind("second")

    with pytest.raises(DeclarationError, match="registered twice"):
        svc.include(second, namespace="n", version="1.5")

    assert kind.who.version == "1.0"


async def test_a_version_that_is_not_served_is_refused_with_its_namespace(
    world: World, svc: Service
):
    """The text names where the method is served, as whoever asked may have another place in
    mind.
    """
    svc.include(desk()("here"), namespace="here", version="1.3")
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(
        UnsupportedVersionError, match=r"'who' in namespace 'here' is served at 1\.3"
    ):
        await client.prepare(namespace="here", version="2.0").call("who")
    with pytest.raises(UnsupportedVersionError, match="the default namespace is not served"):
        await client.call("who")
