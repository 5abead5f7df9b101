"""What happened, and who hears of it: the catalogue, the emitter, metrics, log lines."""

from gracekit.telemetry.logs import RequestFilter

__all__ = ["RequestFilter"]
