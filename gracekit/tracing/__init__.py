"""Traces: what goes along with messages, and the spans of requests, drains and recovery.

Of the OpenTelemetry API alone. Where the process has no tracer provider nothing is recorded.
"""
