"""The end of a story: when it is settled, and whether each request came to a rightful end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gracekit.phase import ServiceState
from gracekit.tracker.task import Lane, Verb
from tests.simulation.callers import Sent
from tests.simulation.truth import RETRIES, Violation

if TYPE_CHECKING:
    from tests.simulation.story import Story


class Reckoning:
    """Asked when the faults are over."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._reckoned: set[str] = set()

    def unsettled(self) -> list[str]:
        found = [
            f"{row['request_id']} {row['method']} {row['state']} {row['owner']} {row['target']}"
            for row in self._story.machine.rows(
                "SELECT * FROM task WHERE state IN ('accepted','running','handed_over','pending')"
            )
        ]
        found += self._story.records.unsettled()
        found += self._story.parked.unsettled()
        queues = ["compute", "compute-ops"]
        queues += [f"{topic}.{host}" for topic in queues for host in self._story.hosts]
        found += [f"queue {name}" for name in queues if self._story.machine.broker.waiting(name)]
        found += [
            f"{life.name} has a delivery in hand"
            for life in self._story.machine.lives
            if life.process.lives
            for consumer in life.transport._consumers
            if consumer._unsettled
        ]
        found += [
            f"errored hook of {row['request_id']}"
            for row in self._story.machine.rows("SELECT request_id FROM task WHERE errored_due = 1")
        ]
        living = {life.runtime.run_id for life in self._story.machine.lives if life.process.lives}
        found += [
            f"run {row['run_id']} is not classified"
            for row in self._story.machine.rows("SELECT run_id FROM run WHERE adopted_at IS NULL")
            if row["run_id"] not in living
        ]
        found += [
            f"reply of {row['row_id']}"
            for row in self._story.machine.rows("SELECT * FROM reply WHERE due_at IS NOT NULL")
        ]
        found += [
            f"hold {row['key']}"
            for row in self._story.machine.rows("SELECT * FROM hold WHERE ended_at IS NULL")
        ]
        found += [
            f"{life.name} has {task} in flight"
            for life in self._story.machine.lives
            if life.process.lives and life.runtime.wired
            for task in life.runtime.wired.tracker
            if task.lane in {Lane.REQUESTS, Lane.OPS}
        ]
        found += [
            f"{life.name} is draining"  # its leases are a sibling's matter once it is gone
            for life in self._story.machine.lives
            if life.process.lives and life.runtime.state is ServiceState.DRAINING
        ]
        return found

    def is_settled(self) -> bool:
        living = {
            life.runtime.settings.host
            for life in self._story.machine.lives
            if life.process.lives and life.runtime.state is ServiceState.SERVING
        }
        return living == set(self._story.hosts) and not self.unsettled()

    def reckon(self) -> None:
        """Every request came to a rightful end."""
        self._story.ledger.check_accounts()
        self._story.parked.reckon()
        for life in self._story.machine.lives:
            if told := life.told("store.stranded"):
                raise Violation(f"fence: {life.name} found rows of a run that may not act: {told}")
        for lease in self._story.machine.rows("SELECT * FROM lease WHERE owner IS NOT NULL"):
            life = self._story.ledger.runs[lease["owner"]]
            if life.report is None or not life.report.leases_kept:
                raise Violation(f"I12: {life.name}, which is gone, still has lease {lease}")
        self.reckon_requests()

    def reckon_requests(self) -> None:
        """Each request once: retention may remove its record later."""
        for request_id, one in self._story.sent.items():
            if request_id not in self._reckoned:
                self._reckoned.add(request_id)
                self._reckon_one(one)
        self._story.raise_first()

    def _reckon_one(self, one: Sent) -> None:
        plan = one.plan
        rows = self._story.machine.rows(
            "SELECT * FROM task WHERE request_id = ? ORDER BY state = 'rejected'", plan.request_id
        )
        self._reckon_charges(one, rows)
        self._reckon_orders(rows)
        for row in rows:
            self._story.inquirers.histories.check_answers(one, row)
        if one.is_fanout:
            return
        if plan.policy == "requeue":
            refused = any(row["state"] in {"rejected", "cancelled"} for row in rows)
            started = self._story.watch.was_started(plan.request_id)
            if one.confirmed and not one.is_call and not started and not refused:
                raise Violation(f"I1: requeue cast {plan.request_id} was never run")
            return
        if not rows:
            if one.confirmed and not one.is_call:
                raise Violation(f"I1: cast {plan.request_id} was confirmed and is not on record")
            return
        self._reckon_row(one, rows[0])

    def _reckon_charges(self, one: Sent, rows: list[dict[str, Any]]) -> None:
        """Only what killed its process, or may have as it was by itself, is given up for that."""
        for row in rows:
            key = f"{row['request_id']}/{row['recipient']}"
            guilty = one.plan.kills or key in self._story.ledger.charged_alone
            if row["reason"] == "attempts" and not guilty:
                raise Violation(f"charge: {key} was given up for what ran beside it")

    def _reckon_orders(self, rows: list[dict[str, Any]]) -> None:
        """Recovery decides nothing about a task whose end an operator has decided."""
        for row in rows:
            key = f"{row['request_id']}/{row['recipient']}"
            if row["reason"] in {"interrupted", "attempts"} and self._story.truth.order_taken(key):
                raise Violation(f"O1: {key} had an order, and ended as {row['reason']}")

    def _reckon_row(self, one: Sent, row: dict[str, Any]) -> None:
        truth, plan = self._story.truth, one.plan
        request_id, end = plan.request_id, (row["state"], row["reason"])
        if end[0] == "succeeded" and not truth.is_done(f"{request_id}/"):
            raise Violation(f"I1: {request_id} succeeded without its effects")
        if end[0] == "failed" and not self._may_have_failed(one, row):
            raise Violation(f"P3: {request_id} is FAILED, and nothing failed: {row['failure']}")
        if end == ("errored", "interrupted") and plan.policy == "error":
            self._reckon_call(request_id)
            return
        self._reckon_hook(one, row)
        rightful = {
            ("cancelled", row["reason"]): truth.was_ordered(request_id, Verb.CANCEL)
            or self._was_cancelled(one)
            or (
                row["reason"] == "caller"
                and request_id in self._story.inquirers.histories.may_cancel
            ),
            ("errored", "operator"): truth.was_ordered(request_id, Verb.FAIL)
            or Verb.FAIL in self._story.capacity.asked[request_id],
            ("errored", "gave_up"): truth.was_ordered(request_id, Verb.GIVE_UP)
            or Verb.GIVE_UP in self._story.capacity.asked[request_id],
            ("errored", "interrupted"): plan.policy == "ops",
            ("rejected", "draining"): plan.policy == "ops" or one.options.get("ops"),
        }
        known = end[0] in {"succeeded", "failed"} or end[1] in {"attempts", "expired"}
        if not rightful.get(end, known):
            raise Violation(f"P3: {plan.policy} task {request_id} ended as {end}")

    def _was_cancelled(self, one: Sent) -> bool:
        """Whether somebody has ordered that while it was parked."""
        capacity = self._story.capacity
        return (
            Verb.CANCEL in capacity.asked[one.plan.request_id]
            or one.args.get("vm") in capacity.dropped
        )

    def _reckon_hook(self, one: Sent, row: dict[str, Any]) -> None:
        """What ended as ERRORED while it was parked has had its hook called."""
        out = self._story.parked.out.get((one.plan.request_id, row["parkings"]))
        if out is None or (out[0], row["state"]) != ("errored", "errored"):
            return
        has_hook = one.method in self._story.app.methods.values()
        if has_hook:
            self._reckon_call(one.plan.request_id)

    def _reckon_call(self, request_id: str) -> None:
        """The errored hook was called, or given up: processes died where it was about to be."""
        given_up = "SELECT 1 FROM incident WHERE what = 'hook_given_up' AND request_id = ?"
        if self._story.truth.errored[request_id] or self._story.machine.rows(given_up, request_id):
            return
        raise Violation(f"P3: errored hook of {request_id} was not called")

    def _may_have_failed(self, one: Sent, row: dict[str, Any]) -> bool:
        """Its handler raised, timed out, was ordered to fail, or its probe gave it up."""
        plan, truth = one.plan, self._story.truth
        return (
            plan.raises
            or ("Flaky" in row["failure"] and truth.failed[f"{plan.request_id}/"] > RETRIES)
            or plan.policy == "probe"
            or one.method in self._story.app.holds  # a hold may be refused
            or one.method is self._story.app.drop  # the store may refuse to cancel what is parked
            or (bool(plan.needs) and self._may_not_wait(row))
            or "MethodTimeoutError" in row["failure"]
            or truth.was_ordered(plan.request_id, Verb.FAIL)
        )

    def _may_not_wait(self, row: dict[str, Any]) -> bool:
        """Whether a task that found no room may have failed for it."""
        lacks = "NoCapacity" in row["failure"] or row["reason"] == "attempts"
        return lacks and (not self._story.capacity.parks or "not parked" in row["failure"])
