"""Passes that operators ask for: the verb `reconcile` begins one, `reconciled` shows its progress.

A pass takes longer than an answer may take. So it goes on by itself, and its report is kept for
some time after its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.values import did_you_mean
from gracekit.control.door_wire import page_of
from gracekit.errors import GracekitError, InvalidArgumentsError
from gracekit.recovery.reconciler import Reconciler
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.results import PassReport
from gracekit.rpc.argument_paths import need_resource_id

MOST_KEPT: Final = 4
NEWS_WITHIN_S: Final = 0.2
"""If a pass has no new results, an answer waits so many seconds for its end. A drain ends the
process soon after the pass, but still answers earlier asks: so the operator sees the end."""


class _HandPass(msgspec.Struct, kw_only=True):
    """One pass.

    Attributes:
        error: Why the pass was not made; None if it was made, or is under way.
    """

    request: PassRequest
    report: PassReport
    task: asyncio.Task[None] | None = None
    error: str | None = None


class HandPasses:
    """The last passes of one run that operators have asked for."""

    def __init__(self, reconciler: Reconciler, kinds: KindTable, clock: Clock) -> None:
        self._reconciler = reconciler
        self._kinds = kinds
        self._clock = clock
        self._passes: dict[str, _HandPass] = {}

    @property
    def settles(self) -> bool:
        """Whether recovery settles unfinished tasks and resources without an operator's request."""
        return self._reconciler.settles

    def begin(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a pass. The answer is that of `look`, with three more fields.

        They are its `pass_id`, `dry_run`, and `kinds`, the number of kinds of the service.

        Args:
            args: `dry_run`, true or false. To settle only one: `kind`, or `resource` as `kind:id`.

        Raises:
            GracekitError: a pass that is no dry run is under way.
            InvalidArgumentsError: there is no such kind.
        """
        request = self._read(args)
        if not request.dry_run and any(_is_settling(one) for one in self._passes.values()):
            raise GracekitError(
                "a pass that an operator has asked for is under way: wait for its end, or look at "
                "what it would do with --dry-run"
            )
        one = _HandPass(request=request, report=PassReport(keeps=True))
        one.task = asyncio.create_task(self._make(one), name="gracekit-reconcile")
        pass_id = self._clock.new_id()
        self._passes[pass_id] = one
        ended = [name for name, kept in self._passes.items() if kept.task and kept.task.done()]
        for name in ended[: max(0, len(self._passes) - MOST_KEPT)]:
            del self._passes[name]
        kinds = len(self._kinds)
        about = {"pass_id": pass_id, "dry_run": request.dry_run, "kinds": kinds}
        return {**about, **_page_of(one, 0)}

    async def look(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The progress of a pass, and a page of its results.

        Args:
            args: `pass_id`; and `after`, the `next` of the previous page.

        Raises:
            GracekitError: the pass is not kept any more.
        """
        one = self._passes.get(str(args.get("pass_id")))
        if one is None:
            raise GracekitError(
                f"pass {str(args.get('pass_id'))[:50]} is kept no longer: the last {MOST_KEPT} are"
            )
        after = args.get("after", 0)
        after = after if isinstance(after, int) and after >= 0 else 0
        if one.task is not None and len(one.report.results) <= after:
            await asyncio.wait({one.task}, timeout=NEWS_WITHIN_S)
        return _page_of(one, after)

    async def _make(self, one: _HandPass) -> None:
        try:
            await self._reconciler.by_hand.make(one.request, one.report)
        except Exception as error:  # noqa: BLE001 - the operator reads it
            one.error = str(error) or type(error).__name__

    def _read(self, args: Mapping[str, Any]) -> PassRequest:
        kind, word = args.get("kind"), args.get("resource")
        resource = None
        if word is not None:
            name, colon, resource_id = str(word).partition(":")
            if not colon or not resource_id:
                raise InvalidArgumentsError(
                    f"resource {str(word)[:50]!r} is no kind and id: write it as share:sh-12"
                )
            resource = (name, need_resource_id(resource_id, name))
        asked = resource[0] if resource is not None else kind
        for name in () if asked is None else (asked,):
            if name not in self._kinds:
                known = [one.name for one in self._kinds]
                has = f"it has {', '.join(known)}" if known else "it declares none by svc.kind()"
                raise InvalidArgumentsError(
                    f"this service has no kind {str(name)[:50]!r}"
                    f"{did_you_mean(str(name)[:50], known)}; {has}"
                )
        return PassRequest(
            by_hand=True,
            dry_run=bool(args.get("dry_run")),
            kind=None if kind is None else str(kind),
            resource=resource,
            at_least_s=self._reconciler.least_age_s,
        )


def _is_settling(one: _HandPass) -> bool:
    return not one.request.dry_run and one.task is not None and not one.task.done()


def _page_of(one: _HandPass, after: int) -> dict[str, Any]:
    """The progress of a pass, with its results after the first *after* ones."""
    report = one.report
    done = one.task is None or one.task.done()  # read before the results, which may still grow
    results = page_of([result.as_json() for result in report.results[after : after + 500]])
    following = after + len(results)
    return {
        "state": ("refused" if one.error else "finished") if done else "running",
        "error": one.error,
        "waits_for_pass": report.waits_for_pass,
        "waits_for": report.waits_for,
        "tasks": report.tasks,
        "counts": report.counts,
        "broken": report.broken,
        "unruled": [
            {"kind": kind, "status": status, "number": number}
            for (kind, status), number in list(report.unruled.items())[:100]
        ],
        "interrupted": report.interrupted,
        "results": results,
        "next": following if following < len(report.results) or not done else None,
    }
