"""`python -m examples.reaper` is `python -m examples.reaper.play`."""

from __future__ import annotations

import runpy

runpy.run_module("examples.reaper.play", run_name="__main__")
