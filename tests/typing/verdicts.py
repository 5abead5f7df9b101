"""Checked by mypy, never run: what a probe may answer."""

from __future__ import annotations

from typing import assert_type

from gracekit import Wait

assert_type(Wait("1m").seconds, float)
assert_type(Wait(5), Wait)
assert_type(Wait(seconds=0.5), Wait)

Wait()  # type: ignore[call-arg]
Wait(None)  # type: ignore[arg-type]
