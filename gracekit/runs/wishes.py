"""The wish that an instance stays down, which outlives its process, its supervisor and a reboot.

A user wrote it by a stop from inside (`ctx.request_stop`), or an operator by `gracekit service
stop`. The unit of systemd asks for it before each start (`gracekit service wanted`). A service that
is started by hand does not obey it.
"""

from __future__ import annotations

import shlex
from typing import Any, Final, Literal

import msgspec

from gracekit.process import Point
from gracekit.runs import runs_sql as sql
from gracekit.store.batch import Batch
from gracekit.store.engine import Queries

WishSource = Literal["user", "admin"]
_NAMES: Final = ("service", "instance", "source", "by", "reason", "at")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """That one instance stays down.

    Attributes:
        service: Topic of the service.
        instance: Name of the instance, as GRACEKIT_INSTANCE says it.
        source: user: a stop from inside; admin: an operator.
        by: Who.
        reason: Why.
        at: Wall time.
    """

    service: str
    instance: str
    source: WishSource
    by: str
    reason: str
    at: float

    def __str__(self) -> str:
        """`down by user 7: out of licences`."""
        return f"down by {self.by}" + (f": {self.reason}" if self.reason else "")

    @property
    def undo(self) -> str:
        """The command that ends it."""
        words = ("gracekit", "service", "start", self.service, "--instance", self.instance)
        return shlex.join(words)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return msgspec.structs.asdict(self)


def add_wish(batch: Batch, wish: Wish) -> None:
    """Put it on record, in the place of an earlier one."""
    batch.add(sql.WISH, *(getattr(wish, name) for name in _NAMES))


def unwish(service: str, instance: str) -> Batch:
    """A batch that removes the wish, if there is one."""
    batch = Batch(Point.STOP_INTENT)
    batch.add(sql.UNWISH, service, instance)
    return batch


async def list_wishes(engine: Queries) -> dict[tuple[str, str], Wish]:
    """All wishes, by service and instance."""
    rows = await engine.query(sql.WISHES)
    found = [msgspec.convert(dict(zip(_NAMES, row, strict=True)), Wish) for row in rows]
    return {(wish.service, wish.instance): wish for wish in found}
