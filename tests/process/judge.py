"""The judgement over a site: what was confirmed, against the journal and the effects."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.process.caster import METHODS
from tests.process.helpers import Site


def rows(site: Site) -> dict[str, dict[str, Any]]:
    return {row["request_id"]: row for row in site.rows("SELECT * FROM task")}


def check_journal(site: Site, ids: set[str]) -> None:
    found = rows(site)
    assert found.keys() == ids, "each confirmed cast has one row, and nothing else has"
    assert not site.transient()
    assert site.queued() == 0
    tally = {row["what"]: row["n"] for row in site.rows("SELECT what, n FROM tally")}
    assert tally["accepted"] == len(ids)
    assert "rejected" not in tally
    unowned = site.rows("SELECT kind, id FROM lease WHERE owner IS NOT NULL")
    assert not unowned, "no lease outlives its task"
    for row in found.values():
        done = row["state"] == "succeeded"
        assert done or (row["on_interrupt"], row["reason"]) == ("error", "interrupted"), row


def check_effects(site: Site, ids: set[str]) -> None:
    started = Counter(effect.key for effect in site.seen("start"))
    done = Counter(effect.key for effect in site.seen("done"))
    assert started.keys() | done.keys() <= ids
    for key, row in rows(site).items():
        assert started[key] <= row["attempts"], "each attempt is recorded before it starts"
        if row["state"] == "succeeded":
            assert done[key] >= 1, f"{key} is on record as done and is not"
        if METHODS[2] in key:
            assert started[key] <= 1, f"{key} is not safe to repeat and was started again"


def check_fences(site: Site) -> None:
    """Tokens of a resource rise from start to start."""
    vms = {row["request_id"]: row["resource_id"] for row in site.rows("SELECT * FROM task")}
    last: dict[str, int] = {}
    for effect in sorted(site.seen("start"), key=lambda effect: effect.at):
        if (vm := vms[effect.key]) is not None:
            token = int(effect.more[1])
            assert token > last.get(vm, 0), f"{effect} has a stale token"
            last[vm] = token
