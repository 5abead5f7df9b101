"""Leases as plain data: who has each, and what is known of that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gracekit.leases.declarations import LeaseFacts
from gracekit.leases.leases import Resource
from gracekit.listings.host_list import HostWord, judge_host
from gracekit.listings.store_view import StoreView
from gracekit.runs.run import Run
from gracekit.runs.watch import SeenBeat

LeaseState = Literal["FREE", "EXCLUSIVE", "CORRUPT"]


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a lease, without taking it.

    Attributes:
        kind: Kind of what it is for.
        id: Id of that.
        state: FREE: it can be had, from `grantable_at` on. EXCLUSIVE: a run has it that may act.
            CORRUPT: the run that has it is not on record; it counts as held.
        token: The last token that was granted.
        holder: Instance of the run that has it; None if none has.
        host: Its host.
        holder_state: What is known of that run, see `HostState`.
        task: The task, or the hold, that has it or had it last.
        since: Wall time since when it is held; of a free one, since when it is free.
        grantable_at: Wall time from which it may be granted, while the end of an unclean holder
            settles; None for now.
        last_end: How the last holder ended: clean, handoff, taken (it died), forced.
        declared: Whether people have declared it.
        payload: What they wrote beside it.
    """

    kind: str
    id: str
    state: LeaseState
    token: int
    holder: str | None
    host: str | None
    holder_state: HostWord | None
    task: str | None
    since: float | None
    grantable_at: float | None
    last_end: str | None
    declared: bool
    payload: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return msgspec.structs.asdict(self)


async def infos_of(
    view: StoreView, found: Sequence[LeaseFacts], seen: Mapping[str, SeenBeat]
) -> list[LeaseInfo]:
    """What is known of leases and of the runs that have them.

    Args:
        view: The store.
        found: The leases as stored.
        seen: What was seen of the beats of runs.
    """
    owners = {one.owner for one in found if one.owner is not None}
    runs = await view.runs_of(owners) if owners else {}
    now = view.clock.boot()
    words = {
        run_id: judge_host(run, view.judge(run), seen.get(run_id), now)[0]
        for run_id, run in runs.items()
    }
    return [_info(view, one, runs, words) for one in found]


def _info(
    view: StoreView,
    facts: LeaseFacts,
    runs: Mapping[str, Run],
    words: Mapping[str, HostWord],
) -> LeaseInfo:
    run, word = runs.get(facts.owner or ""), words.get(facts.owner or "")
    is_free = facts.owner is None or word in {"DEAD", "LEFT"}
    state: LeaseState = "FREE" if is_free else "EXCLUSIVE" if run is not None else "CORRUPT"
    now, granted_at = view.clock.wall(), facts.not_before
    if is_free and facts.owner is not None:  # its death is not recorded yet
        granted_at = max(granted_at, now + facts.settle_s)
    return LeaseInfo(
        kind=facts.kind,
        id=facts.id,
        state=state,
        token=facts.token,
        holder=None if run is None else run.instance,
        host=None if run is None else run.host,
        holder_state=word,
        task=facts.holder,
        since=facts.acquired_at if facts.owner is not None else facts.released_at,
        grantable_at=granted_at if is_free and granted_at > now else None,
        last_end=facts.release_reason,
        declared=facts.declared_at is not None,
        payload=facts.payload,
    )


def never_granted(resource: Resource) -> LeaseFacts:
    """A lease of which there is no row."""
    nothing = dict.fromkeys(LeaseFacts.__struct_fields__)
    kind, name = resource
    zeros = dict.fromkeys(("token", "not_before", "acquired_at", "settle_s"), 0)
    facts = nothing | zeros | {"kind": kind, "id": name}
    return msgspec.convert(list(facts.values()), LeaseFacts)


def why_held(info: LeaseInfo) -> str:
    """Who has the lease, and what is known of that run, as a sentence."""
    name = f"lease {info.kind}:{info.id}"
    if info.state == "FREE":
        if info.grantable_at is not None:
            return (
                f"{name} is free, and is granted when late effects of its last holder have settled"
            )
        return f"{name} is free, and a task that came before is to have it, or to be settled"
    who = f"{info.holder} on host {info.host}" if info.holder else "a run that is not on record"
    return f"{name} is held by {who}, which is {info.holder_state or 'unknown'}"
