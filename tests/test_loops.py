"""Which event loop a process of its own runs on, and what is said of one that cannot be had."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from gracekit import ConfigError, Service, Settings
from gracekit.runtime.loops import OLDEST_UVLOOP, loop_factory
from gracekit.runtime.process_life import run_service

ROOT = Path(__file__).resolve().parents[1]

UNUSABLE = {
    "missing": (None, "loop = uvloop needs the package uvloop, which cannot be imported here"),
    "old": (SimpleNamespace(__version__="0.9.1"), "needs uvloop 0.21 or newer, and 0.9.1 is"),
}


@pytest.fixture(params=UNUSABLE)
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said where uvloop cannot be used."""
    package, text = UNUSABLE[request.param]
    monkeypatch.setitem(sys.modules, "uvloop", package)
    return text


def test_only_who_asks_for_another_loop_gets_one():
    """A package that came with another one must not change what a service runs on."""
    assert loop_factory(Settings()) is None
    assert loop_factory(Settings(loop="asyncio")) is None
    assert loop_factory(Settings(loop="uvloop")) is uvloop.new_event_loop
    assert loop_factory(Settings(loop="auto")) is uvloop.new_event_loop


@pytest.mark.usefixtures("told")
def test_auto_is_asyncio_where_uvloop_cannot_be_used():
    """One value serves for machines with uvloop and for those without."""
    assert loop_factory(Settings(loop="auto")) is None


def test_a_package_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever it raises, such as for a missing library of the system, is in the message."""
    (tmp_path / "uvloop.py").write_text("raise RuntimeError('no libuv; none')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop")

    with pytest.raises(ConfigError, match=r"cannot be imported here \(no libuv, none\); pip inst"):
        loop_factory(Settings(loop="uvloop"))
    assert loop_factory(Settings(loop="auto")) is None


def test_a_start_on_a_loop_that_cannot_be_had_is_refused_with_the_remedy(
    told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Nothing is opened, and the exit code is 78."""
    files = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("transport_url", "store_url")}
    settings = Settings(loop="uvloop", **files)

    assert run_service(Service("compute"), settings) == 78

    assert list(tmp_path.iterdir()) == []
    said = capfd.readouterr().err
    assert told in said
    assert "; pip install 'gracekit[uvloop]', or set GRACEKIT_LOOP=asyncio" in said


def test_an_unknown_loop_gets_a_hint():
    """As every other word that is none of a set."""
    with pytest.raises(ConfigError) as refused:
        Settings(loop="uvlop")

    assert str(refused.value) == (
        "loop = 'uvlop' must be auto, asyncio or uvloop; did you mean uvloop?"
    )


def test_the_extra_and_the_check_name_the_same_oldest_version():
    """Otherwise the remedy would install what the next start refuses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    least = ".".join(map(str, OLDEST_UVLOOP))

    assert project["project"]["optional-dependencies"]["uvloop"] == [f"uvloop>={least}"]
