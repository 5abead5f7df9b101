"""What a method takes and which versions it serves, as told at every request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.errors import InvalidArgumentsError, RpcError
from gracekit.rpc.methods import Method

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


@pytest.mark.parametrize("method", [plain, more, nothing], ids=lambda method: method.name)
def test_arguments_are_taken_exactly_if_the_signature_can_be_bound(method: Method[Any, Any]):
    """
    Names are compared first, which is nearly always enough; the answer is that of the signature.
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
    """
    What was read once is remembered, and means the same.
    """
    for _ in range(2):
        assert svc.methods.resolve(None, "nothing", asked) is nothing


@pytest.mark.parametrize("asked", ["2.0", "1.1", "x", "", "1." + "0" * 5000 + "1", "9" * 40])
def test_version_that_is_not_served_is_refused_each_time(asked: str):
    """
    However long: it comes from the wire.
    """
    for _ in range(2):
        with pytest.raises(RpcError):
            svc.methods.resolve(None, "nothing", asked)
