"""Traces: the trace context of messages, and the spans of requests and recovery.

Only the OpenTelemetry API is used. Without a tracer provider nothing is recorded.
"""
