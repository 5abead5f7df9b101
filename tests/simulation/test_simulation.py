"""Seeds by the hundred: no promise is broken, every fault is met, and planted bugs are found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit.testing.faults import Fault
from gracekit.tracker.task import _NEXT, TaskState, Verb
from tests.scale import scale
from tests.simulation.capacity import POINTS

ROOT = Path(__file__).resolve().parents[2]
PLANTED = sorted((Path(__file__).parent / "planted").glob("*.patch"))
# Those that were found here need hundreds or thousands of seeds each.
SOUGHT = scale([patch for patch in PLANTED if not patch.stem.startswith("found_")], PLANTED)
SEEDS_A_BLOCK = scale(300, 2500)
BLOCKS = scale(1, 8)
FOUND_WITHIN = scale(2000, 20_000)

# What a port can do wrong, as its step lists in gracekit/testing/ports.py say.
KINDS = {
    "clock": {Fault.DELAY, Fault.JUMP},
    "store": {
        Fault.DELAY,
        Fault.REFUSED,
        Fault.LOST_BEFORE,
        Fault.LOST_AFTER,
        Fault.BROKEN,
        Fault.CRASH,
    },
    "transport": {
        Fault.DELAY,
        Fault.REFUSED,
        Fault.LOST_BEFORE,
        Fault.LOST_AFTER,
        Fault.DUPLICATE,
        Fault.REORDER,
        Fault.CRASH,
    },
    "process": {Fault.DELAY, Fault.CRASH, Fault.NO_PROOF},
}

# What befalls hosts that share a store.
BLOWS = {"cut one", "store away", "stand still", "stand still and cut", "back in time", "twin"}

# What happens to parked tasks, where processes die then, and what resolvers hear and do.
PARKED = {
    *("no capacity", "answered Parked", "answered NoCapacity", "asked again", "cancel_pending"),
    *("pending to accepted", "pending to cancelled", "pending to errored operator"),
    *("pending to errored expired", "pending to errored gave_up"),
    *(f"killed {side} {point.value}" for side in ("before", "after") for point in POINTS),
    *("resolver: retry", "resolver: late", "resolver: args", "resolver: odd args"),
    *("resolver: stale", "resolver: twice", "resolver: give_up", "resolver: cancel"),
    *("resolver got Gone", "resolver got StaleVersionError", "resolver killed"),
    *("notification heard", "notification twice"),
    *("retried to succeeded", "retried to failed", "retried to errored", "retried to cancelled"),
    *(f"operator: {verb.value} of a parked task" for verb in Verb),
}

# What callers ask, of what, and what they are told.
ASKED = {
    *(f"lookup: {state.value}" for state in TaskState if state is not TaskState.REJECTED),
    *("lookup: unknown", "lookup: NoAnswerError", "outlived by callers"),
    *("result: str", "result: ValueError", "result: TaskCancelledError", "result: NoCapacity"),
    *("result: UnknownTaskError", "result: NoAnswerError", "result: CallTimeoutError"),
    *(f"cancel of a task that is {state}" for state in ("accepted", "running", "pending")),
    *(f"cancel of a task that is {state}" for state in ("succeeded", "failed", "cancelled")),
    *("cancel of a task that is handed_over", "cancel taken", "cancel left to a sibling"),
    *("cancel: cancelled", "cancel: running", "cancel: succeeded"),
    *("cancel: RpcError", "cancel: UnknownTaskError", "cancel: NoAnswerError"),
}


@pytest.mark.process
@pytest.mark.timeout(scale(600, 7200))
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_seed_breaks_a_promise_and_together_they_meet_everything(block: int, tmp_path: Path):
    """Every invariant holds in every seed; every step of a task and every kind of fault occurs."""
    seeds = f"{block * SEEDS_A_BLOCK}-{(block + 1) * SEEDS_A_BLOCK - 1}"
    print(_play(seeds, "--table", "--json", str(tmp_path / "met.json")))
    met = json.loads((tmp_path / "met.json").read_text())

    assert met["broken"] == {}
    assert met["fewest_runs"] >= 2
    kinds = {(port, kind.name) for port, kinds in KINDS.items() for kind in kinds}
    assert set(map(tuple, met["kinds"])) == kinds
    assert set(map(tuple, met["edges"])) >= _edges()
    assert {"term", "kill", "operator", "quiet", "pause"} <= set(met["ends"])
    assert {"drift", "probe answered", "probe raised", "delete"} <= set(met["ends"])
    assert {"write", "write refused"} <= set(met["ends"])
    assert {"host booted again", "fenced", "ended by the kernel"} <= set(met["ends"])
    assert {"declared dead", "hosts: copy fenced"} <= set(met["ends"])
    assert {f"hosts: {blow}" for blow in BLOWS} <= set(met["ends"])
    assert set(met["ends"]) >= PARKED
    assert set(met["ends"]) >= ASKED


def _edges() -> set[tuple[str, str]]:
    """The whole transition table."""
    return {(before.value, after.value) for before, steps in _NEXT.items() for after in steps}


@pytest.mark.process
def test_the_same_seed_gives_the_same_trace():
    """In other processes, with other hashes of strings, and after other seeds."""
    alone = {_digests("7", hash_seed)["7"] for hash_seed in ("0", "1", "random")}
    after_others = _digests("3-8", "random")

    assert alone == {after_others["7"]}
    assert len(set(after_others.values())) == 6


def _digests(seeds: str, hash_seed: str) -> dict[str, str]:
    told = _play(seeds, "--digest", PYTHONHASHSEED=hash_seed)
    return dict(re.findall(r"^seed (\d+): trace (\w+)", told, re.MULTILINE))


def _play(*arguments: str, **environment: str) -> str:
    """What the command tells; in a process of its own, whose leftovers are nobody else's."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return ran.stdout


@pytest.mark.process
@pytest.mark.parametrize("patch", PLANTED, ids=lambda patch: patch.stem)
def test_a_planted_bug_can_still_be_planted(patch: Path, tmp_path: Path):
    """A patch that no longer fits its module would prove nothing: mend it with the module."""
    _plant(patch, tmp_path)


@pytest.mark.process
@pytest.mark.timeout(scale(1200, 7200))
@pytest.mark.parametrize("patch", SOUGHT, ids=lambda patch: patch.stem)
def test_a_planted_bug_is_found(patch: Path, tmp_path: Path):
    """A production module with this bug breaks a promise, by name, in one of the first seeds."""
    _plant(patch, tmp_path)
    shutil.copytree(ROOT / "tests" / "simulation", tmp_path / "tests" / "simulation")

    begins = re.search(r"^Begin at: (\d+)$", patch.read_text(), re.MULTILINE)
    first = scale(int(begins[1]) if begins else 0, 0)  # those before did not find it
    seeds = f"{first}-{first + FOUND_WITHIN - 1}"
    command = [sys.executable, "-m", "tests.simulation", seeds, "--first"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    codes = re.search(r"^Found by: (.*)$", patch.read_text(), re.MULTILINE)
    found = re.search(r"^seed (\d+): Violation: (\w+):", ran.stdout, re.MULTILINE)
    assert codes is not None
    assert found is not None, f"not found in {FOUND_WITHIN} seeds: {ran.stdout}{ran.stderr}"
    print(f"{patch.stem}: seed {found[1]}, {found[2]}")
    assert found[2] in codes[1].split(), ran.stdout


def _plant(patch: Path, place: Path) -> None:
    """Copy the product to *place*, with the patch in it."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is missing: it puts the patches in")
    shutil.copytree(ROOT / "gracekit", place / "gracekit")
    applied = subprocess.run(
        [git, "apply", str(patch)], cwd=place, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"mend {patch.name}: {applied.stderr}"
