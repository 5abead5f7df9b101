"""The door of a run: who comes in, what it answers, and for how long it is open."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gracekit import Runtime, Service, Settings, errors
from gracekit.clock import Clock
from gracekit.control import door
from gracekit.control.door import MAX_ASKS, Door
from gracekit.control.door_wire import (
    LONGEST_ANSWER,
    LONGEST_LINE,
    Ask,
    address_of,
    line_of_ask,
    line_of_error,
    read_answer,
)
from gracekit.errors import BadMessageError, GracekitError, NoSuchMethodError, RunEndedError
from gracekit.journal.tasks import Journal
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.runs.names import door_name
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane, TrackedTask

PATIENCE_S = 300.0


class House:
    """A service whose store is a file in *place*, and the door of its run."""

    def __init__(self, place: Path, svc: Service) -> None:
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        settings = Settings(
            transport_url="memory://", store_url=f"sqlite:///{place}/store.db", host="h"
        )
        self.runtime = Runtime(svc, settings, broker=MemoryBroker())
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.runtime.ground.telemetry.subscribe(
            lambda name, fields: self.events.append((name, dict(fields)))
        )
        self.runs = place / "store.db-runs"

    @property
    def run_id(self) -> str:
        return self.runtime.ground.seat.run_id

    @property
    def path(self) -> Path:
        return self.runs / door_name(self.run_id)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with address_of(self.path) as address:
            return await asyncio.open_unix_connection(address, limit=LONGEST_ANSWER)

    async def send(self, data: bytes, *, end: bool = False) -> bytes:
        """What comes back for *data*; *end* says that no more follows."""
        reader, writer = await self.connect()
        writer.write(data)
        if end:
            writer.write_eof()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await reader.readline()
        finally:
            writer.close()

    async def ask(self, verb: str, run_id: str = "", **args: Any) -> dict[str, Any]:
        ask = Ask(run_id=run_id or self.run_id, verb=verb, args=args)
        return read_answer(await self.send(line_of_ask(ask)))


@asynccontextmanager
async def open_house(place: Path, svc: Service) -> AsyncIterator[House]:
    house = House(place, svc)
    async with house.runtime:
        yield house


async def test_it_is_open_from_before_the_hooks_until_the_stop_record(tmp_path: Path, svc: Service):
    """While a start waits for the application, and while a drain does, an operator is answered."""
    seen: list[str] = []
    house = House(tmp_path, svc)

    async def look() -> None:
        seen.append((await house.ask("status"))["phase"])

    svc.on_start(look)
    svc.on_stop(look)
    async with house.runtime:
        await look()
        mode = house.path.stat().st_mode
        assert (await house.ask("drain", reason="an update"))["phase"] == "draining"
        report = await house.runtime.serve()

    assert report.exit_code == 0
    assert seen == ["starting", "serving", "draining"]
    assert mode & 0o777 == 0o600
    assert not house.path.exists()


async def test_an_order_to_drain_is_answered_although_the_run_ends_at_once(
    tmp_path: Path, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """A store that is slow to record who asked must not make an accepted order look refused."""

    async def tally(*_: object, **__: object) -> None:
        await asyncio.sleep(0.3)

    monkeypatch.setattr(Journal, "tally", tally)
    async with open_house(tmp_path, svc) as house:
        asking = asyncio.create_task(house.ask("drain"))
        await house.runtime.serve()

    assert (await asking)["phase"] == "draining"


async def test_a_path_that_no_address_can_hold_is_reached(tmp_path: Path, svc: Service):
    """The kernel takes 107 bytes; a volume of a pod has more."""
    async with open_house(tmp_path / ("deep-" * 30), svc) as house:
        assert len(str(house.path)) > 200
        assert (await house.ask("status"))["phase"] == "serving"


async def test_a_dump_is_one_answer_however_many_tasks_it_has(tmp_path: Path, svc: Service):
    """It is much longer than other lines. A thread makes it, and the loop's own one is marked."""
    tasks = [
        TrackedTask(
            request_id=f"{n:04d}{chr(1) * (MAX_NAME - 4)}",
            method="\U0001f600" * 250,
            lane=Lane.REQUESTS,
        )
        for n in range(300)
    ]
    async with open_house(tmp_path, svc) as house:
        tracker = house.runtime.ground.tracker
        for task in tasks:
            tracker.add(task)
        text = (await house.ask("dump"))["text"]
        for task in tasks:
            tracker.remove(task)

    assert len(text) > 2 * LONGEST_LINE
    assert text.startswith(f"--- gracekit {svc.topic}@")
    assert text.count("\ntask ") == 300
    assert text.endswith("--- end ---\n")
    assert "in _dump" not in text.partition("(event loop)")[2].partition("\nthread ")[0]


async def test_a_verb_for_another_run_is_refused(tmp_path: Path, svc: Service):
    """A command for a dead run does not hit its successor, whatever its door is called."""
    async with open_house(tmp_path, svc) as house:
        with pytest.raises(RunEndedError, match="ended meanwhile"):
            await house.ask("drain", run_id="0" * 32)
        with pytest.raises(NoSuchMethodError, match="did you mean drain"):
            await house.ask("drian")
        assert (await house.ask("status"))["phase"] == "serving"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\n", "no JSON"),
        (b"drain\n", "no JSON"),
        (b"[1]\n", "a JSON list"),
        (b'{"verb": "drain"}\n', "an ask is a line"),
        (b'{"run_id": "x", "verb": "drain", "args": NaN}\n', "NaN is not JSON"),
        (b"[" * 60_000 + b"\n", "no JSON"),
        (b"1" * 60_000 + b"\n", "no JSON"),
        (b"\xff\xfe\n", "no JSON"),
        (b"x" * (LONGEST_LINE + 1), "one line of at most"),
        (b'{"run_id"', "one line of at most"),
    ],
)
async def test_a_line_that_is_no_ask_is_refused(tmp_path: Path, svc: Service, data, said):
    """In a sentence, and the next ask is answered."""
    async with open_house(tmp_path, svc) as house:
        with pytest.raises(BadMessageError, match=said):
            read_answer(await house.send(data, end=True))
        assert (await house.ask("status"))["phase"] == "serving"


def test_each_refusal_comes_through_as_an_error_of_gracekit():
    """gracekit's own classes are rebuilt; the name of any other class goes into the message."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    own = [kind for kind in kinds if kind not in {errors.ConflictError, errors.Parked}]
    for kind in own:
        with pytest.raises(kind, match="as it was said") as raised:
            read_answer(line_of_error(kind("as it was said")))
        assert type(raised.value) is kind

    assert len(own) > 30
    with pytest.raises(GracekitError, match=r"^OSError: disk$"):
        read_answer(line_of_error(OSError("disk")))


async def test_many_who_say_nothing_keep_nobody_out_for_long(
    tmp_path: Path, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """So many are let in; who comes then is told so, until their time is up."""
    monkeypatch.setattr(door, "LINE_TIMEOUT_S", 3.0)
    async with open_house(tmp_path, svc) as house:
        silent = [await house.connect() for _ in range(MAX_ASKS)]
        with pytest.raises(GracekitError, match=f"{MAX_ASKS} asks are being answered"):
            read_answer(await house.send(b""))  # before it has said a word
        ended = [reader.read() for reader, _ in silent]
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*ended) == [b""] * MAX_ASKS
        assert (await house.ask("status"))["phase"] == "serving"
        for _, writer in silent:
            writer.close()


async def test_an_ask_whose_sender_has_gone_is_not_carried_out(tmp_path: Path, svc: Service):
    """The loop was blocked for longer than it waited: nothing acts on its word later."""

    def send_and_go() -> None:
        with socket.socket(socket.AF_UNIX) as asker, address_of(house.path) as address:
            asker.connect(address)
            asker.sendall(line_of_ask(Ask(run_id=house.run_id, verb="drain", args={})))

    async with open_house(tmp_path, svc) as house:
        send_and_go()  # on the loop's own thread, which cannot answer meanwhile
        await asyncio.sleep(0.2)

        assert (await house.ask("status"))["phase"] == "serving"


async def test_one_who_only_writes_no_more_is_answered(tmp_path: Path, svc: Service):
    """As `nc -N` does: an end of its words is not its end."""
    async with open_house(tmp_path, svc) as house:
        line = line_of_ask(Ask(run_id=house.run_id, verb="status", args={}))

        assert read_answer(await house.send(line, end=True))["phase"] == "serving"


async def test_what_changes_something_is_on_record_with_who_and_why(tmp_path: Path, svc: Service):
    """The uid is the kernel's word; a name is taken where it goes with that uid."""
    me = f"uid {os.geteuid()}"
    async with open_house(tmp_path, svc) as house:
        await house.ask("quiet", by=f"{me} (alice)@h", reason="a look")
        await house.ask("resume", by="uid 4711 (mallory)@h")
        await house.ask("status")
        rows = await house.runtime.ground.engine.query(
            "SELECT what, run_id, detail FROM incident ORDER BY id"
        )

    assert [tuple(row) for row in rows] == [
        ("operator_quiet", house.run_id, f"{me} (alice)@h: a look"),
        ("operator_resume", house.run_id, f"{me}: no reason given"),
    ]
    ordered = [fields for name, fields in house.events if name == "run.ordered"]
    assert [one["verb"] for one in ordered] == ["quiet", "resume"]


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused(tmp_path: Path, svc: Service):
    """Also where the modes of the files would let it in: the kernel says who asks."""
    script = """
import os, socket, sys
os.chdir(sys.argv[1])  # what is above it is closed to others
os.setgroups([]), os.setgid(65534), os.setuid(65534)
asker = socket.socket(socket.AF_UNIX)
asker.connect(sys.argv[2])
print(asker.makefile().readline())
"""
    async with open_house(tmp_path, svc) as house:
        house.runs.chmod(0o777)
        house.path.chmod(0o777)
        command = (sys.executable, "-c", script, str(house.runs), house.path.name)
        asker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(asker.communicate(), 30)
        house.runs.chmod(0o700)

    assert "uid 65534 may not ask this run" in json.loads(said)["error"]["message"]
    (refused,) = [fields for name, fields in house.events if name == "door.refused"]
    assert refused["uid"] == 65534


async def test_a_door_whose_file_was_removed_is_made_again(
    tmp_path: Path, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """The run has no other way to be asked on a broker; its log says that the file was gone."""
    monkeypatch.setattr(door, "LOOK_EVERY_S", 0.02)
    async with open_house(tmp_path, svc) as house:
        for _ in range(2):
            house.path.unlink()
            async with asyncio.timeout(PATIENCE_S):
                while not house.path.exists():
                    await asyncio.sleep(0.01)
            assert (await house.ask("status"))["phase"] == "serving"
            assert house.path.stat().st_mode & 0o777 == 0o600

    said = [fields["error"] for name, fields in house.events if name == "door.missing"]
    assert said == ["its file was removed; it is made again"] * 2
    assert not house.path.exists()


async def test_a_door_that_cannot_be_made_is_tried_again(
    tmp_path: Path, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """Its directory may be missing for a while; the log says once that the run has no door."""
    monkeypatch.setattr(door, "LOOK_EVERY_S", 0.02)
    make, failures = door._listener, [OSError("no room")] * 3

    def fail_first(path: Path) -> socket.socket:
        if failures:
            raise failures.pop()
        return make(path)

    monkeypatch.setattr(door, "_listener", fail_first)
    async with open_house(tmp_path, svc) as house:
        async with asyncio.timeout(PATIENCE_S):
            while not house.path.exists():
                await asyncio.sleep(0.01)
        assert (await house.ask("status"))["phase"] == "serving"

    said = [fields["error"] for name, fields in house.events if name == "door.missing"]
    assert said == ["no room"]


async def test_a_run_whose_door_cannot_be_made_goes_on_and_says_so(tmp_path: Path):
    """A file system without sockets, for example: requests matter more."""
    telemetry, events = Telemetry(), []
    telemetry.subscribe(lambda name, fields: events.append((name, dict(fields))))
    missing = Door(tmp_path / "none" / "x.sock", None, telemetry, Clock())  # type: ignore[arg-type]

    await missing.start()
    await missing.stop()

    ((name, fields),) = events
    assert name == "door.missing"
    assert "No such file" in fields["error"]
