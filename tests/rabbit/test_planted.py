"""Bugs planted into the path of a message on RabbitMQ are found, each by its claim."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import scale

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PLANTED = sorted((Path(__file__).parent / "planted").glob("*.patch"))
NO_BROKER = [patch for patch in PLANTED if patch.stem == "ack_of_what_is_open"]
SOUGHT = scale(NO_BROKER, PLANTED)
ENOUGH = scale(1, None)  # claims of each: the others start a broker, and wait for what never comes


@pytest.mark.parametrize("patch", PLANTED, ids=lambda patch: patch.stem)
def test_a_planted_bug_can_still_be_planted(patch: Path, tmp_path: Path) -> None:
    """A patch that no longer fits its module would prove nothing: mend it with the module."""
    _plant(patch, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("patch", SOUGHT, ids=lambda patch: patch.stem)
def test_a_planted_bug_is_found(patch: Path, tmp_path: Path) -> None:
    """Each claim fails with the bug in the product, and for no other reason than its own."""
    _plant(patch, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    named = re.search(r"^Found by: (.*)$", patch.read_text(), re.MULTILINE)
    assert named is not None

    for claim in named[1].split()[:ENOUGH]:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", claim],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 1, f"{claim}: {ran.stdout}{ran.stderr}"
        assert re.search(
            r"^(E +assert|E +AssertionError|E +TimeoutError)", ran.stdout, re.MULTILINE
        )


def _plant(patch: Path, place: Path) -> None:
    """Copy the product to *place*, with the patch in it."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is missing: it puts the patches in")
    shutil.copytree(ROOT / "gracekit", place / "gracekit")
    applied = subprocess.run(
        [git, "apply", str(patch)], cwd=place, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"mend {patch.name}: {applied.stderr}"
