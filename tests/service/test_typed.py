"""Typed arguments: handlers get what their annotations say; wire and journal keep plain data."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import msgspec
import pytest

from gracekit import Context, Done, Service, TaskInterruptedError, Wait, rpc_method
from gracekit.doctor.declared import check_types
from gracekit.doctor.finding import Level
from gracekit.errors import BadMessageError, DeclarationError, UnserialisableError
from tests.service.kit import World

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]

pytestmark = pytest.mark.looptime

pydantic = pytest.importorskip("pydantic")


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Level3(enum.IntEnum):
    LOW = 1


class Disk(msgspec.Struct):
    gib: int
    made: dt.datetime | None = None
    content: bytes = b""


@dataclass
class Guest:
    name: str
    disks: list[Disk]
    size: Size = Size.SMALL


class Model(pydantic.BaseModel):
    name: str
    at: dt.datetime
    cores: int = pydantic.Field(alias="vcpus")


class Strict(pydantic.BaseModel, extra="forbid"):
    name: str

    @pydantic.computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def shout(self) -> str:
        return self.name.upper()


class Told(msgspec.Struct):
    word: str

    def __post_init__(self) -> None:
        raise ValueError(f"no {self.word}")


class Hides(pydantic.BaseModel):
    word: pydantic.SecretStr


class Halves(pydantic.BaseModel):
    content: bytes


class Falls(pydantic.BaseModel):
    @pydantic.model_serializer
    def fall(self) -> dict[str, Any]:
        raise RuntimeError("it falls")


@dataclass
class Host:
    ip: IPv4Address


class Opaque:
    """No type of plain data."""


AT = dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)
GUEST = Guest("a", [Disk(3, AT, b"\xff\x00")], Size.LARGE)
MODEL = Model(name="m", at=AT, vcpus=3)
VALUES: list[tuple[Any, Any]] = [
    (Disk, Disk(3)),
    (Guest, GUEST),
    (Model, MODEL),
    (Strict, Strict(name="m")),
    (list[Guest], [GUEST]),
    (dict[str, Model], {"a": MODEL}),
    (dict[int, Disk], {7: Disk(1)}),
    (dt.datetime, AT),
    (dt.datetime, AT.replace(tzinfo=None)),
    (dt.date, AT.date()),
    (dt.time, dt.time(3, 4)),
    (dt.timedelta, dt.timedelta(seconds=90.5)),
    (UUID, UUID(int=5)),
    (Decimal, Decimal("1.10")),
    (Size, Size.LARGE),
    (Level3, Level3.LOW),
    (Literal["a", 1], "a"),
    (tuple[int, str], (1, "a")),
    (set[int], {3, 1, 2}),
    (float, 1.5),
    (int, 2**70),
    (str | None, None),
    (Mapping[str, Any], {"a": [1, {}]}),
    (Any, {"a": 1}),
    (bytes, "text"),  # not checked: bytes arrive as text
]


async def served(world: World, handler: Any, *, hints: Any = None, **options: Any) -> Any:
    """The method of a service that runs, and a client."""
    if hints is not None:
        handler.__annotations__ = {"ctx": Context, **hints}
    svc = Service("compute", **options)
    method = svc.rpc(handler)
    await world.start(svc)
    return method, await world.client(svc)


# -- what fits --------------------------------------------------------------------------


@pytest.mark.parametrize(("hint", "value"), VALUES, ids=[str(hint) for hint, _ in VALUES])
async def test_a_value_comes_as_its_type_and_its_result_goes_back_as_it(
    world: World, hint: Any, value: Any
):
    """Through the client, the wire, the handler and the reply; by name the result is plain data."""
    got = []

    async def work(ctx: Context, value: Any) -> Any:
        got.append(value)
        return value

    method, client = await served(world, work, hints={"value": hint, "return": hint})
    result = await client.call(method, value=value)
    plain = await client.call("work", value=value)

    assert got == [value, value]
    assert type(got[0]) is type(value)
    assert (result, type(result)) == (value, type(value))
    assert plain == json.loads(json.dumps(plain))


async def test_what_is_kept_and_compared_is_the_plain_data(world: World):
    """So a request that comes again, from a client that sends plain data, is a duplicate."""
    got, kept = [], []

    async def work(ctx: Context, guest: Guest, at: dt.datetime) -> int:
        got.append((guest, at))
        kept.append(json.loads(world.task("w")["args"]))
        return len(got)

    method, client = await served(world, work)
    named = client.prepare(request_id="w")
    plain = {"guest": msgspec.to_builtins(GUEST), "at": "2026-01-02T03:04:00.000000+00:00"}
    first = await named.call(method, guest=GUEST, at=AT)
    again = await named.call("work", **plain)

    assert (first, again) == (1, 1)
    assert (got, kept) == ([(GUEST, AT)], [plain])


async def test_each_spelling_of_an_id_is_one_resource(world: World):
    """A UUID in upper case, or inside of a Struct, names the same lease."""
    svc = Service("compute")

    @svc.rpc(resource=("vm", "vm"))
    async def one(ctx: Context, vm: UUID) -> None: ...

    @svc.rpc(resource=("vm", "server.id"))
    async def other(ctx: Context, server: Server) -> None: ...

    await world.start(svc)
    client = await world.client(svc)
    vm = UUID(int=0xAB)
    await client.call(one, vm=vm)
    await client.call("one", vm=str(vm).upper())
    await client.call("one", vm=vm.hex)
    await client.call(other, server=Server(vm))
    await client.call("other", server={"id": vm.hex})

    rows = world.rows("SELECT resource_id FROM task")
    assert [row["resource_id"] for row in rows] == [str(vm)] * 5


class Server(msgspec.Struct):
    id: UUID


async def test_an_int_is_a_float_and_a_default_none_makes_none_a_value(world: World):
    """Where the annotation alone would be stricter than Python's users are."""
    got = []

    async def work(ctx: Context, part: float, size: int = None, more: int = 3) -> None:  # type: ignore[assignment]  # noqa: RUF013
        got.append((part, size, more))

    _, client = await served(world, work)
    await client.call("work", part=2, size=None)
    await client.call("work", part=2.5)

    assert got == [(2.0, None, 3), (2.5, None, 3)]


async def test_other_names_stay_plain_data(world: World):
    """Those that `**` takes are neither checked nor lost."""
    got = []

    async def work(ctx: Context, disk: Disk, **more: int) -> None:
        got.append((disk, more))

    _, client = await served(world, work)
    await client.call("work", disk={"gib": 1}, name="x")

    assert got == [(Disk(1), {"name": "x"})]


# -- what does not ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (int, True, "value: expected int, got bool"),
        (int, "1", "value: expected int, got str"),
        (int, 1.0, "value: expected int, got float"),
        (int, None, "value: expected int, got null"),
        (float, True, "value: expected float, got bool"),
        (str, 81, "value: expected str, got int"),
        (bool, 1, "value: expected bool, got int"),
        (dict, "secret", "value: expected object, got str"),
        (Guest, {"disks": []}, "value: Object missing required field name"),
        (Guest, {"name": "a", "disks": [{"gib": "x"}]}, "value.disks[0].gib: expected int, got "),
        (dict[str, Disk], {"a": {"gib": None}}, "value[...].gib: expected int, got null"),
        (dict[int, str], {"a": ""}, "a key of value: expected int, got str"),
        (dt.datetime, 5, "value: expected datetime, got int"),
        (dt.datetime, "tomorrow", "value: Invalid RFC3339 encoded datetime"),
        (dt.date, "tomorrow", "value: Invalid RFC3339 encoded date"),
        (UUID, "secret", "value: Invalid UUID"),
        (Decimal, "secret", "value: Invalid decimal string"),
        (Size, "secret", "value: expected one of its values"),
        (Literal["a", "b"], "secret", "value: expected one of its values"),
        (Literal["a", "b"], "secret" * 500, "value: expected one of its values"),
        (Level3, 81, "value: expected one of its values"),
        (Told, {"word": "secret" * 500}, "value: what is wrong takes 3003 characters to say"),
        (Model, "secret", "value: Input should be an object"),
        (Model, {"name": "a", "at": "x", "vcpus": 1}, "value: at: Input should be a valid datet"),
        (Model, {"name": "a", "at": AT.isoformat(), "vcpus": "1"}, "value: vcpus: Input should "),
    ],
)
async def test_a_refusal_names_the_field_and_what_is_expected(
    world: World, hint: Any, value: Any, said: str
):
    """Before acceptance: nothing is run, and the record has the reason; no value is shown."""
    got = []

    async def work(ctx: Context, value: Any) -> None:
        got.append(value)

    method, client = await served(world, work, hints={"value": hint})
    with pytest.raises(TypeError) as refusal:
        await client.call("work", value=value)
    with pytest.raises(TypeError, match="refused the request, and ran nothing"):
        await client.call(method, value=value)

    assert said in str(refusal.value)
    assert "secret" not in str(refusal.value)
    assert str(refusal.value).startswith("work(")
    assert got == []
    rows = world.rows("SELECT state, reason, detail FROM task")
    assert {(row["state"], row["reason"]) for row in rows} == {("rejected", "arguments")}
    assert all(said in row["detail"] for row in rows)


async def test_code_of_a_type_that_fails_refuses_the_request(world: World):
    """Whatever it raises: it runs on the event loop, which goes on."""

    async def work(ctx: Context, rude: Rude) -> None: ...

    _, client = await served(world, work)
    for word, said in [("exit", "SystemExit"), ("key", "KeyError"), ("no", "rude: not so")]:
        with pytest.raises(TypeError, match=said):
            await client.call("work", rude={"word": word})


class Rude(msgspec.Struct):
    word: str

    def __post_init__(self) -> None:
        raise {"exit": SystemExit(1), "key": KeyError("k"), "no": ValueError("not so")}[self.word]


async def test_a_refused_cast_is_refused_at_once_also_with_siblings(world: World):
    """A sibling with the same types would refuse it, too, so it does not go back to the queue."""
    svc = Service("compute")

    @svc.rpc
    async def work(ctx: Context, n: int) -> None: ...

    for instance in "ab":
        await world.start(svc, instance=instance)
    await (await world.client(svc)).cast("work", n="x")
    await world.until(lambda: bool(world.rows("SELECT * FROM task WHERE state = 'rejected'")))

    assert [life.told("task.passed_on") for life in world.lives] == [[], []]


async def test_a_sibling_with_other_types_may_take_what_does_not_fit_here(world: World):
    """In a rolling upgrade that widens a type the older version gives the request back."""
    old, new, got = Service("compute"), Service("compute"), []

    @old.rpc(on_interrupt="retry")
    async def work(ctx: Context, n: int) -> None: ...

    async def wider(ctx: Context, n: int | str) -> None:
        got.append(n)

    wider.__name__ = "work"
    new.rpc(on_interrupt="retry")(wider)
    await world.start(old, instance="a")
    await world.start(new, instance="b")
    client = await world.client(new)
    for _ in range(5):
        await client.call("work", n="x")

    assert got == ["x"] * 5


# -- what is not checked ----------------------------------------------------------------


async def test_annotations_that_mean_nothing_here_are_not_checked(world: World):
    """Neither names for a type checker alone, which doctor lists, nor types of other things."""
    got = []

    async def work(
        ctx: Context,
        unknown: Unknown,
        opaque: Opaque,
        either: dt.datetime | str,
        nothing: Any,
        n: int,
    ) -> Unknown:
        got.append((unknown, opaque, either, nothing, n))
        return unknown

    method, client = await served(world, work)
    args = {"unknown": 1, "opaque": "x", "either": "2026-01-02", "nothing": []}
    result = await client.call(method, **args, n=1)
    with pytest.raises(TypeError, match="n: expected int"):
        await client.call("work", **args, n="1")

    assert (result, got) == (1, [(1, "x", "2026-01-02", [], 1)])
    assert set(method.types.unresolved) == {"unknown", "return"}
    assert set(method.types.unsupported) == {"opaque", "either"}


def test_doctor_lists_annotations_that_are_not_checked():
    """With the reason and the remedy; without one it counts what is checked."""
    svc = Service("compute")

    @svc.rpc
    async def good(ctx: Context, n: int, anything: Any) -> None: ...

    assert check_types(svc).level is Level.OK
    assert "1 methods" in check_types(svc).seen

    @svc.rpc
    async def work(ctx: Context, unknown: Unknown, holder: Holder) -> None: ...

    found = check_types(svc)
    assert found.level is Level.WARN
    assert "work(unknown): NameError" in found.seen
    assert "work(holder): " in found.seen
    assert "Opaque'> is no type of plain data" in found.seen
    assert "TYPE_CHECKING" in found.remedy
    assert "validate=False" in check_types(Service("compute", validate=False)).seen


@dataclass
class Holder:
    opaque: Opaque


async def test_a_service_may_leave_its_types_unchecked(world: World):
    """`validate=False`: arguments and results are plain data, of functions and of classes."""
    got = []

    async def work(ctx: Context, at: dt.datetime) -> dt.datetime:
        got.append(at)
        return at

    method, client = await served(world, work, validate=False)

    class Manager:
        @rpc_method
        async def other(self, ctx: Context, at: dt.datetime) -> dt.datetime:
            return at

    svc = Service("classes", validate=False)
    svc.include(manager := Manager())
    await world.start(svc)

    assert await client.call(method, at=AT) == "2026-01-02T03:04:00.000000+00:00"
    assert await client.call("work", at=5) == 5
    assert got == ["2026-01-02T03:04:00.000000+00:00", 5]
    assert await (await world.client(svc)).call(manager.other, at=5) == 5
    with pytest.raises(DeclarationError, match="validate='no' must be True or False"):
        Service("compute", validate="no")  # type: ignore[arg-type]


async def test_methods_of_classes_are_typed_too(world: World, svc: Service):
    """By the object and by the class."""

    class Manager:
        @rpc_method
        async def later(self, ctx: Context, at: dt.date) -> dt.date:
            return at + dt.timedelta(days=1)

    svc.include(manager := Manager())
    await world.start(svc)
    client = await world.client(svc)

    assert await client.call(manager.later, at=AT.date()) == dt.date(2026, 1, 3)
    assert await client.call(Manager.later, at=AT.date()) == dt.date(2026, 1, 3)


# -- results ----------------------------------------------------------------------------


async def test_a_result_that_does_not_fit_is_an_error_at_the_caller(world: World):
    """Its task has succeeded; a caller by name gets it as it is."""

    async def work(ctx: Context) -> list[int]:
        return ["x"]  # type: ignore[list-item]

    method, client = await served(world, work)
    with pytest.raises(BadMessageError, match=r"work\(\) has succeeded.*result\[0\]: expected int"):
        await client.call(method)

    assert await client.call("work") == ["x"]
    assert {row["state"] for row in world.rows("SELECT state FROM task")} == {"succeeded"}


@pytest.mark.parametrize(
    "value",
    [Opaque(), [Opaque()], Guest("a", [Opaque()])],  # type: ignore[list-item]
    ids=["itself", "in a list", "in a field"],
)
async def test_other_objects_are_refused_by_the_client_as_before(world: World, value: Any):
    """The error names the argument and the type."""

    async def work(ctx: Context, value: Any) -> None: ...

    method, client = await served(world, work)
    with pytest.raises(TypeError, match=r"args\.value.*: object of type Opaque"):
        await client.call(method, value=value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Hides(word="secret"), r"^args\.value: Hides writes asterisks for a SecretStr"),
        ([Hides(word="secret")], r"^args\.value\[0\]: Hides writes asterisks"),
        (Halves(content=b"\xff"), r"^args\.value: "),
        (Falls(), r"^args\.value: .*falls"),
    ],
)
async def test_a_model_that_cannot_be_written_whole_is_not_sent(
    world: World, value: Any, said: str
):
    """Otherwise the handler would get asterisks for a secret."""

    async def work(ctx: Context, value: Any) -> None: ...

    method, client = await served(world, work)
    with pytest.raises(UnserialisableError, match=said):
        await client.call(method, value=value)


async def test_an_address_is_text_also_in_a_field(world: World):
    """The field's annotation, which msgspec cannot check, leaves the argument plain data."""

    async def work(ctx: Context, value: Any) -> Any:
        return value

    method, client = await served(world, work)
    assert await client.call(method, value=Host(IPv4Address("10.0.0.1"))) == {"ip": "10.0.0.1"}


# -- recovery ---------------------------------------------------------------------------


async def cut(world: World, method: Any, svc: Service, **args: Any) -> None:
    """Kill the process while the task `w` of *method* runs."""
    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(method, **args)
    await life.hears("task.started")
    await life.crash()


async def test_probe_retry_and_errored_hook_get_the_types_again(world: World):
    """The stored arguments are converted for each."""
    svc, got = Service("compute"), []

    @svc.rpc(on_interrupt="probe", settle=0)
    async def work(ctx: Context, disk: Disk, at: dt.datetime = AT) -> Size:
        await asyncio.sleep(100_000)
        return Size.SMALL

    @work.probe
    async def _(ctx: Context, disk: Disk, at: dt.datetime) -> Done:
        got.append((disk, at))
        return Done(Size.LARGE)

    await cut(world, work, svc, disk=Disk(3))
    await world.start(svc)
    await world.until(lambda: world.state("w") == "succeeded")
    result = await (await world.client(svc)).prepare(request_id="w").call(work, disk=Disk(3))

    assert got == [(Disk(3), AT)]
    assert result is Size.LARGE


def declare_typed(svc: Service, called: list[Any], **options: Any) -> None:
    """The method `work` of a newer version, which takes a Disk; *called* gets what is run."""

    @svc.rpc(settle=0, **options)
    async def work(ctx: Context, disk: Disk) -> None:
        called.append("run")

    @work.probe
    async def _(ctx: Context, disk: Disk) -> Wait:
        called.append("probed")
        return Wait(1)

    @work.errored
    async def _(ctx: Context, disk: Any, reason: str) -> None:
        called.append((disk, reason))


@pytest.mark.parametrize("policy", ["retry", "error", "probe"])
async def test_stored_arguments_that_no_longer_fit_end_the_task(world: World, policy: Any):
    """ERRORED for `arguments`: its caller hears it, and its errored hook gets them as sent."""
    old, new, told = Service("compute"), Service("compute"), []

    @old.rpc(on_interrupt=policy, settle=0)
    async def work(ctx: Context, disk: dict[str, Any]) -> None:
        await asyncio.sleep(100_000)

    declare_typed(new, told, on_interrupt=policy)
    life = await world.start(old)
    named = (await world.client(old)).prepare(request_id="w")
    call = asyncio.create_task(named.call(work, disk={"gib": "three"}))
    await life.hears("task.started")
    await life.crash()
    await world.start(new)
    with pytest.raises(
        TaskInterruptedError, match=r"ERRORED\(arguments\): its arguments on record"
    ):
        await call
    await world.until(lambda: bool(told))

    row = world.task("w")
    assert (row["state"], row["reason"]) == ("errored", "arguments")
    assert "disk.gib: expected int, got str" in row["detail"]
    assert told == [({"gib": "three"}, "arguments")]


async def test_a_hold_whose_arguments_no_longer_fit_ends_without_its_probe(world: World):
    """As its probe could not be called; its errored hook gets the arguments as sent."""
    old, new, told = Service("compute"), Service("compute"), []

    @old.rpc(settle=0)
    async def work(ctx: Context, disk: dict[str, Any]) -> None:
        await ctx.hold("migration", "m-1", at_most="1h")

    declare_typed(new, told)
    life = await world.start(old)
    await (await world.client(old)).call(work, disk={"gib": "three"})
    await life.crash()
    await world.start(new)
    await world.until(lambda: bool(told))

    (hold,) = world.rows("SELECT end_reason FROM hold")
    assert hold["end_reason"] == "arguments"
    assert told == [({"gib": "three"}, "hold")]
