"""Events of the service: the catalogue, the emitter, metrics and log lines."""

from gracekit.telemetry.logs import RequestFilter

__all__ = ["RequestFilter"]
