"""What a method takes and which versions it serves, as told at every request."""

from __future__ import annotations

import difflib
import enum
import itertools
import uuid
from decimal import Decimal
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.errors import (
    InvalidArgumentsError,
    NoSuchMethodError,
    RpcError,
    UnsupportedVersionError,
)
from gracekit.rpc.methods import Method
from gracekit.rpc.offer import can_serve, written

svc = Service("compute")


@svc.rpc
async def plain(ctx: Context, a: int, b: int, c: int = 0) -> None:
    """Two that must be there, one that may."""


@svc.rpc
async def more(ctx: Context, a: int, **rest: int) -> None:
    """One that must be there, and anything else."""


@svc.rpc
async def nothing(ctx: Context) -> None:
    """None at all."""


@svc.rpc
async def named(ctx: Context, alpha: int, beta: int = 0) -> None:
    """With names that are easily mistyped."""


class Named(str, enum.Enum):  # noqa: UP042 - its text is `Named.A`
    A = "a"


class Numbered(int, enum.Enum):
    A = 1


@svc.rpc(resource="vm")
async def leased(ctx: Context, vm: str) -> None:
    """One that acts on a resource."""


@pytest.mark.parametrize("method", [plain, more, nothing], ids=lambda method: method.name)
def test_arguments_are_taken_exactly_if_the_signature_can_be_bound(method: Method[Any, Any]):
    """Names are compared first, which is nearly always enough; the answer is that of the
    signature.
    """
    names = ["a", "b", "c", "d"]
    given = itertools.chain.from_iterable(
        itertools.combinations(names, number) for number in range(len(names) + 1)
    )

    for chosen in given:
        args = dict.fromkeys(chosen, 1)
        assert takes(method, args) == can_be_bound(method, args), args


def takes(method: Method[Any, Any], args: dict[str, int]) -> bool:
    try:
        method.bind(args)
    except InvalidArgumentsError:
        return False
    return True


def can_be_bound(method: Method[Any, Any], args: dict[str, int]) -> bool:
    try:
        method.signature.bind(**args)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("asked", ["1.0", "1"])
def test_version_is_served_each_time_it_is_asked_for(asked: str):
    """What was read once is remembered, and means the same."""
    for _ in range(2):
        assert svc.methods.resolve(None, "nothing", asked) is nothing


@pytest.mark.parametrize("asked", ["2.0", "1.1", "x", "", "1." + "0" * 5000 + "1", "9" * 40])
def test_version_that_is_not_served_is_refused_each_time(asked: str):
    """However long: it comes from the wire."""
    for _ in range(2):
        with pytest.raises(RpcError):
            svc.methods.resolve(None, "nothing", asked)


def several() -> Service:
    """One name at two minor versions, another at the higher alone."""
    shop = Service("shop")
    for version, names in (("1.2", ["sell"]), ("1.5", ["sell", "count"])):
        other = Service("shop", version=version)
        for name in names:

            async def handler(ctx: Context) -> None: ...

            handler.__name__ = name
            shop.methods.add(other.rpc(handler), beside=True)
    return shop


@pytest.mark.parametrize(
    ("name", "asked", "served"),
    [
        ("sell", "1.0", "1.2"),
        ("sell", "1.2.0", "1.2"),
        ("sell", "1.2.1", "1.5"),
        ("sell", "1.5", "1.5"),
        ("sell", "1.5.0.9", "1.5"),
        ("count", "1.0", "1.5"),
    ],
)
def test_of_methods_beside_each_other_the_first_that_serves_is_asked(
    name: str, asked: str, served: str
):
    """As of oslo's endpoints; a revision that is not said is 0, and there is no fourth part."""
    assert several().methods.resolve(None, name, asked).version == served


@pytest.mark.parametrize(
    ("name", "asked", "error", "words"),
    [
        (
            "sell",
            "1.6",
            UnsupportedVersionError,
            "'sell' in the default namespace is served at 1.2",
        ),
        (
            "nothing",
            "1.6",
            UnsupportedVersionError,
            "'nothing' is not served in the default namespace",
        ),
        (
            "sell",
            "v1.2",
            UnsupportedVersionError,
            "not at 'v1.2': the major version must match",
        ),
        ("nothing", "1.5", NoSuchMethodError, "'nothing' is not served"),
        ("cont", "1.5", NoSuchMethodError, "did you mean 'count'"),
    ],
)
def test_a_refusal_says_whether_an_older_version_may_do(
    name: str, asked: str, error: type[Exception], words: str
):
    """By its class, which is oslo's for the same endpoints: its callers then ask for less."""
    with pytest.raises(error) as told:
        several().methods.resolve(None, name, asked)

    assert words in str(told.value)


@pytest.mark.parametrize(
    ("namespace", "name", "version", "said"),
    [
        (
            None,
            "list_pending",
            "1.0",
            "method 'list_pending' is not served; it is in namespace 'gracekit.tasks' at 1.1",
        ),
        (
            None,
            "list_pending",
            "1.1",
            (
                "method 'list_pending' is not served in the default namespace; it is in namespace "
                "'gracekit.tasks' at 1.1"
            ),
        ),
        (
            "gracekit.task",
            "list_pending",
            "1.1",
            "namespace 'gracekit.task' is not served; did you mean 'gracekit.tasks'?",
        ),
        (
            "gracekit.tasks",
            "list_pendin",
            "1.1",
            "method 'list_pendin' is not served; did you mean 'list_pending'?",
        ),
        (
            "gracekit.tasks",
            "sell",
            "1.0",
            "method 'sell' is not served; it is in the default namespace at 1.0",
        ),
    ],
)
def test_a_method_of_another_namespace_is_shown_with_its_place(namespace, name, version, said):
    """The name alone would suggest what was asked for already."""
    shop = Service("shop", task_api=True)

    @shop.rpc
    async def sell(ctx: Context) -> None: ...

    with pytest.raises((NoSuchMethodError, UnsupportedVersionError)) as told:
        shop.methods.resolve(namespace, name, version)

    assert str(told.value) == said


def test_a_namespace_that_a_service_has_not_asked_for_is_explained():
    """The task API is off by default; any other namespace is none of this service's."""
    methods = several().methods

    with pytest.raises(UnsupportedVersionError) as off:
        methods.resolve("gracekit.tasks", "get", "1.1")
    with pytest.raises(UnsupportedVersionError, match=r"'other' is not served$"):
        methods.resolve("other", "get", "1.1")

    assert str(off.value) == (
        "namespace 'gracekit.tasks' is not served: the service was made without it, which is "
        "Service(..., task_api=True)"
    )


def test_the_context_is_no_argument():
    """Who sends it reads that the service gives it, and not how to write the handler."""
    with pytest.raises(InvalidArgumentsError) as told:
        plain.bind({"ctx": 1, "a": 1, "b": 2})

    assert str(told.value).endswith("; the service gives 'ctx' to its handler: leave it out")


@pytest.mark.parametrize(
    ("value", "kind"), [(["v"], "a list"), ({"v": 1}, "a dict"), ("v" * 256, "a text of 256")]
)
def test_a_resource_that_cannot_be_one_is_named_by_its_kind(value, kind):
    """Its value is the caller's secret."""
    shop = Service("shop")

    @shop.rpc(resource="vm")
    async def build(ctx: Context, vm: str) -> None: ...

    with pytest.raises(InvalidArgumentsError, match=f"NUL, for 'vm', and not {kind}: it names"):
        build.resource_of({"vm": value})


def test_a_method_that_is_older_than_its_place_is_told_apart():
    """The place serves the version, the method does not: as under oslo that is NoSuchMethod."""
    shop = Service("shop", version="1.5")
    shop.rpc(nothing.handler)
    shop.methods.add(plain)

    with pytest.raises(NoSuchMethodError, match=r"not served at '1\.4', .*only at 1\.0"):
        shop.methods.resolve(None, "plain", "1.4")


def test_a_refusal_is_short_whatever_was_sent():
    """The first three names are shown and compared, of at most 100 characters; the rest is a
    number.
    """
    near = {f"alpha_{number}": 0 for number in range(5000)}
    odd = {"\U000e0001" * 100: 0, "x" * 500_000: 0, "beta_": 0, "gamma": 0}

    with pytest.raises(InvalidArgumentsError) as many:
        named.bind(near)
    with pytest.raises(InvalidArgumentsError) as long:
        named.bind(odd)

    assert str(many.value) == (
        "named(*, alpha: 'int', beta: 'int' = 0): missing a required argument: 'alpha'; "
        "got an unexpected keyword argument 'alpha_0', 'alpha_1', 'alpha_2' and 4997 more; "
        "did you mean 'alpha' instead of 'alpha_0'?; did you mean 'alpha' instead of 'alpha_1'?; "
        "did you mean 'alpha' instead of 'alpha_2'?"
    )
    assert "did you mean 'beta' instead of 'beta_'?" in str(long.value)
    assert len(str(long.value)) < 1000


def test_an_unknown_method_is_compared_with_few_names_of_a_large_service(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of a thousand names only those that begin like it are compared, and the nearest is named."""
    compared = []
    compare = difflib.SequenceMatcher.set_seq1
    monkeypatch.setattr(
        difflib.SequenceMatcher,
        "set_seq1",
        lambda self, name: compared.append(name) or compare(self, name),
    )
    large = Service("compute")
    for number in range(1000):

        async def one(ctx: Context) -> None: ...

        one.__name__ = f"{'abcdefghij'[number % 10] * 3}_method_of_many_{number}"
        large.rpc(one)

    with pytest.raises(NoSuchMethodError, match="did you mean 'ddd_method_of_many_33'"):
        large.methods.resolve(None, "ddd_method_of_mny_33", "1.0")

    assert 1 <= len(set(compared)) <= 101


@pytest.mark.parametrize(
    "wrong",
    [["vm-1"], {"id": 1}, "x" * 256, 10**300, 1.0, 1.5, True, False, Decimal("1.0"), b"a"],
    ids=str,
)
def test_a_resource_has_a_short_name_of_one_spelling(wrong: object):
    """Text or a whole number of at most 255 characters, as its row outlives the request: `1` and
    `1.0` would be two resources with a lease each. Nothing else is accepted, nor left to a sibling.
    """
    with pytest.raises(InvalidArgumentsError, match="text or a whole number of 1 to 255 char"):
        leased.resource_of({"vm": wrong})

    assert not can_serve(written(svc.methods), None, "leased", "1.0", {"vm": wrong})
    for right in ("x" * 255, 7, Decimal(7), uuid.UUID(int=7)):
        assert leased.resource_of({"vm": right}) == ("vm", str(right))
    for member in (Named.A, Numbered.A):  # as JSON carries them
        assert leased.resource_of({"vm": member}) == ("vm", str(member.value))
