"""Lets a test make a pass over the resources of a service, as an operator can."""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.recovery.resources.results import PassReport, Result
from gracekit.testing.instance import InstanceLife

LONGEST_PASS_S: Final = 7200.0
"""Timeout of a pass in virtual seconds: it may wait for queues, and for another pass."""


class ByHand:
    """The methods of InMemoryService for reconciliation by hand."""

    def _living(self) -> InstanceLife:
        raise NotImplementedError

    def _note_news(self, quiet_s: float = 0.0) -> None:
        raise NotImplementedError

    async def reconcile(
        self,
        *,
        dry_run: bool = False,
        kind: ResourceKind | str | None = None,
        resource: Resource | None = None,
    ) -> list[Result]:
        """Make one pass over the resources, as `gracekit reconcile` does.

        Like every pass, it first waits until the requests that are now in the queues are taken.

        Args:
            dry_run: Only report what would be done.
            kind: Settle only this kind.
            resource: Settle only this one: `share.of("sh-12")`, or `("share", "sh-12")`.

        Returns:
            The result for each resource that was found. If the process is killed, or a drain
            begins meanwhile: the results until then.

        Raises:
            GracekitError: a kind could not be read, there is no such kind, both *kind* and
                *resource* are given, or the service accepts no requests now.
            TimeoutError: the pass has not ended within two hours.
        """
        life = self._living()
        _check_chosen(kind, resource)
        request = PassRequest(
            by_hand=True,
            dry_run=dry_run,
            kind=kind.name if isinstance(kind, ResourceKind) else kind,
            resource=resource,
            at_least_s=life.runtime.settings.startup_reconciliation_wait_seconds,
        )
        _check(life, request)
        self._note_news(LONGEST_PASS_S)
        async with asyncio.timeout(LONGEST_PASS_S):
            report = await _make(life, request)
        if report.broken:
            shown = "; ".join(f"{name}: {why}" for name, why in report.broken.items())
            raise GracekitError(f"not all resources could be settled: {shown}")
        return report.results


def _check_chosen(kind: object, resource: object) -> None:
    if kind is not None and resource is not None:
        raise GracekitError("give kind= or resource=, not both")
    if resource is None:
        return
    match resource:
        case (str(), str()) if isinstance(resource, tuple):
            return
    raise GracekitError(
        f"resource={resource!r} is no kind and id: write resource=share.of('sh-12'), or "
        "resource=('share', 'sh-12')"
    )


def _check(life: InstanceLife, request: PassRequest) -> None:
    kinds = life.runtime.service.kinds
    name = request.kind if request.resource is None else request.resource[0]
    if name is not None and name not in kinds:
        known = [kind.name for kind in kinds]
        raise GracekitError(f"no kind {name!r} is declared{did_you_mean(name, known)}")


async def _make(life: InstanceLife, request: PassRequest) -> PassReport:
    """Make the pass, and return its report, which is incomplete if the process ends meanwhile."""
    assert life.runtime.wired is not None, "it lives"
    reconciler = life.runtime.wired.reconciler
    report = PassReport(keeps=True)
    making = life.machine.spawn_as(life, reconciler.by_hand.make(request, report))
    over = asyncio.ensure_future(life.over.wait())
    try:
        await asyncio.wait({making, over}, return_when=asyncio.FIRST_COMPLETED)
        if making.done() and not making.cancelled():
            making.result()
        return report
    finally:
        over.cancel()
