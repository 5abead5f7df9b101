"""The wheel is whole: what `make dist` builds serves without the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from gracekit.version import VERSION
from tests.docs.pages import ROOT, Page, environment

pytestmark = pytest.mark.process


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A Python that has the wheel, and of other packages what the tests have."""
    built = tmp_path / "dist"
    command = ("-m", "hatchling", "build", "--target", "wheel", "--directory", str(built))
    subprocess.run((sys.executable, *command), cwd=ROOT, check=True, timeout=100)
    (wheel,) = built.glob("*.whl")
    folder = tmp_path / "env"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # as pip installs one that has no program
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    base = Path(sys.executable).resolve()
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(base)
    return folder / "bin" / "python3"


def test_the_wheel_serves_a_first_call_without_the_checkout(tmp_path: Path, installed: Path):
    """With its SQL, its type marker and its command; the quickstart's first service answers."""
    Page("quickstart.md").write_to(tmp_path)
    env = environment() | {"PYTHONPATH": ""}

    def start(*words: str) -> subprocess.Popen[str]:
        command = (installed, *words)
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)

    def output_of(*words: str) -> str:
        return start(*words).communicate(timeout=100)[0].strip()

    where = "import gracekit, importlib.metadata as m; print(gracekit.__file__, m.entry_points())"
    found = output_of("-c", where)
    service = start("-m", "gracekit", "run", "hello:svc")
    try:
        answer = output_of("-m", "gracekit", "call", "hello", "greet", "name=World")
        assert output_of("-m", "gracekit", "--version") == f"gracekit {VERSION}"
        service.terminate()
        assert service.wait(100) == 0
    finally:
        service.kill()
        service.communicate()

    assert found.startswith(str(tmp_path))
    assert "gracekit.cli.main:main" in found
    assert (Path(found.split()[0]).parent / "py.typed").exists()
    assert answer == '"Hello, World!"'
