"""docs/adopting-nova.md: its program, its names. Its service runs in tests/oslo/test_nova.py."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Final

import pytest

from gracekit import Settings
from gracekit.config.settings import variable_name
from gracekit.deploy.systemd import HARDENING
from tests.docs.pages import ROOT, Page
from tests.oslo.kit import oslo_python

PAGE: Final = Page("adopting-nova.md")
HARMLESS: Final = {"SystemCallErrorNumber"}  # says only how a refusal looks


def test_the_drop_in_for_privsep_undoes_each_restriction_of_the_unit():
    """One that were left would keep sudo from working; tests/systemd/ tries it."""
    (drop_in,) = re.findall(r"^```ini\n(.*?)^```", PAGE.text, re.MULTILINE | re.DOTALL)
    undone = set(re.findall(r"^(\w+)=", drop_in, re.MULTILINE))

    assert {line.split("=")[0] for line in HARDENING} - HARMLESS <= undone


def test_the_page_names_settings_that_there_are():
    """Each variable of gracekit on it is one."""
    known = {variable_name(field.name) for field in fields(Settings)}

    assert set(re.findall(r"GRACEKIT_\w+", PAGE.text)) <= known


@pytest.mark.process
def test_doctor_finds_the_methods_with_the_options_of_the_page(tmp_path: Path):
    """Three of the example, one of them on the ops topic, too, and three of oslo.service."""
    PAGE.write_to(tmp_path)
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}

    done = subprocess.run(
        (oslo_python(), "-m", "gracekit", "doctor", "compute_options:svc"),
        cwd=tmp_path,
        env=ours | {"PYTHONPATH": str(ROOT), "GRACEKIT_OPS_TOPIC": "compute-alt"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    said = " ".join(done.stdout.split())
    counted = "methods: 6 on topic compute: 4 error, 1 requeue, 1 retry; 6 in threads; 1 also in a"
    assert counted in said, done.stderr
    assert "counts six methods" in PAGE.text
