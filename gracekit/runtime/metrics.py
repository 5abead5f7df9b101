"""The metrics of one run: the values of their labels, and the counters for `/metrics`."""

from __future__ import annotations

import importlib.util
from typing import Final

from gracekit.config.choices import RejectReason, choices_of
from gracekit.periodic import JobOutcome
from gracekit.phase import ServiceState
from gracekit.recovery.decisions import Step
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.service import Service
from gracekit.telemetry.metrics import LabelWords
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import TERMINAL, TRANSIENT, Lane, TaskState
from gracekit.version import VERSION

_ENDS: Final = frozenset(state.value for state in TERMINAL - {TaskState.REJECTED})


def label_words(service: Service) -> LabelWords:
    """Every value that a label of the service's metrics may have."""
    methods = frozenset(method.name for method in service.methods)
    jobs = frozenset(job.name for job in service.jobs)
    return LabelWords(
        methods=methods,
        jobs=jobs,
        handlers=methods | jobs,
        lanes=frozenset(lane.value for lane in Lane),
        outcomes=_ENDS,
        decisions=_ENDS | {Step.RUN_AGAIN.value},
        reasons=frozenset(choices_of(RejectReason)),
        states=frozenset(state.value for state in TRANSIENT),
        job_outcomes=frozenset(outcome.value for outcome in JobOutcome),
        kinds=frozenset(kind.name for kind in service.kinds),
        resource_outcomes=frozenset(outcome.value for outcome in ResourceOutcome),
        phases=frozenset(state.value for state in ServiceState),
        versions=frozenset({VERSION}),
    )


def count_metrics(service: Service, telemetry: Telemetry) -> RunMetrics | None:
    """Begin to count for `/metrics`; None if `prometheus_client` is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    counted = RunMetrics(label_words(service))
    telemetry.count_into(counted)
    return counted
