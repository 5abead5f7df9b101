"""Lines in the process: who is next when several kinds wait."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.leases.lines import Kind, Lines

pytestmark = pytest.mark.looptime


class Line:
    """One line of width 1 that is full, and who got in when it moved."""

    def __init__(self) -> None:
        self._lines = Lines()
        assert self._lines.enter_nowait("key")
        self.inside: list[str] = []

    async def stand(
        self, name: str, kind: Kind, *, first: bool = False, width: int = 1
    ) -> asyncio.Task[None]:
        """Let *name* wait in it."""

        async def wait() -> None:
            await self._lines.enter("key", width, kind=kind, first=first)
            self.inside.append(name)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    async def move(self, times: int = 1) -> None:
        """Let so many leave, one after the other."""
        for _ in range(times):
            self._lines.leave("key")
            await asyncio.sleep(0)

    def is_settling(self) -> bool:
        return self._lines.is_settling("key")

    def is_free(self, width: int = 1) -> bool:
        return not self._lines.is_full("key", width)

    def resize(self, width: int) -> None:
        self._lines.resize("key", width)


async def test_while_both_kinds_wait_they_are_served_in_turns():
    """Each kind in its own order; when one has run out the other has every place."""
    line = Line()
    for n in range(4):
        await line.stand(f"new{n}", Kind.NEW)
    for n in range(2):
        await line.stand(f"old{n}", Kind.RECOVERED)
    await line.move(6)

    assert line.inside == ["old0", "new0", "old1", "new1", "new2", "new3"]
    await line.move()
    assert line.is_free()


async def test_recovery_that_settles_a_resource_goes_first():
    """Everybody else waits for what it finds out."""
    line = Line()
    await line.stand("new", Kind.NEW)
    await line.stand("old", Kind.RECOVERED)
    await line.stand("settling", Kind.SETTLING)
    assert line.is_settling()
    await line.move(3)

    assert line.inside == ["settling", "old", "new"]
    assert not line.is_settling()


async def test_who_had_its_turn_before_queues_in_front_of_its_kind():
    """A wait for a lease does not cost the place among those that wait for a slot."""
    line = Line()
    await line.stand("new", Kind.NEW)
    await line.stand("back", Kind.NEW, first=True)
    await line.move(2)

    assert line.inside == ["back", "new"]


@pytest.mark.parametrize("served", [False, True], ids=["waiting", "just served"])
async def test_a_wait_that_is_given_up_takes_no_place(served: bool):
    """Neither one that still waits nor one whose place came at the same moment."""
    line = Line()
    gone = await line.stand("gone", Kind.RECOVERED)
    await line.stand("next", Kind.NEW)
    if not served:
        gone.cancel()
        await asyncio.sleep(0)
    leaving = asyncio.ensure_future(line.move())
    if served:
        gone.cancel()
    await leaving
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert line.inside == ["next"]
    await line.move()
    assert line.is_free()


async def test_a_line_that_becomes_wider_lets_those_in_who_wait():
    """They enter at once and in order; later ones get the places that are left."""
    line = Line()
    for name in ("a", "b", "c"):
        await line.stand(name, Kind.NEW)
    line.resize(3)
    await asyncio.sleep(0)

    assert line.inside == ["a", "b"]
    line.resize(5)
    await asyncio.sleep(0)
    assert line.inside == ["a", "b", "c"]
    assert line.is_free(5)
    line.resize(4)
    assert not line.is_free(4)


async def test_a_line_that_becomes_narrower_waits_for_those_inside():
    """Places that become free are not refilled until the line is narrow enough; then they are."""
    line = Line()
    line.resize(3)
    for name in ("a", "b", "c", "d", "e"):
        await line.stand(name, Kind.NEW, width=3)
    assert line.inside == ["a", "b"]
    line.resize(1)
    await line.move(2)

    assert line.inside == ["a", "b"]
    await line.move()
    assert line.inside == ["a", "b", "c"]
    line.resize(2)
    await asyncio.sleep(0)
    assert line.inside == ["a", "b", "c", "d"]
    await line.move(3)
    assert line.is_free(2)
