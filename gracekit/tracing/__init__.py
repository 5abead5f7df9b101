"""Traces: the trace context of messages, and the spans of requests, drains and recovery.

This uses the OpenTelemetry API alone. Without a tracer provider nothing is recorded.
"""
