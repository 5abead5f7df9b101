"""The sites of examples/websites under gunicorn, in the environment that has Django and Flask."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from examples.websites.play import END_S, SITES, WORKERS, get
from tests.docs.pages import ROOT, Program, run, running
from tests.scale import scale
from tools import dev

pytestmark = pytest.mark.process

SERVICE: Final = ("-m", "gracekit", "run", "examples.websites.service:svc")
PAGE: Final = 4096
MOST_GROWTH: Final = 8 * 2**20
"""Bytes by which the memory of a worker may grow; 10,000 leaks of 1 KiB would be more."""


@pytest.fixture(autouse=True)
def _with_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helpers start this Python."""
    monkeypatch.setattr(sys, "executable", str(dev.python(dev.WSGI_LOCK)))


@contextmanager
def serving(directory: Path, *words: str) -> Iterator[tuple[Program, int]]:
    """gunicorn, and its port."""
    place = directory / "gunicorn"
    place.mkdir()
    queues = f"sqlite:///{directory / 'gracekit.db'}"
    words = ("-m", "gunicorn", *WORKERS, "--bind", "127.0.0.1:0", *words)
    with running(place, *words, QUEUES=queues) as gunicorn:
        listening = re.compile(r"Listening at: http://127\.0\.0\.1:(\d+)")
        found = gunicorn.wait_for(lambda: listening.search(gunicorn.log.read_text()))
        assert found is not None
        yield gunicorn, int(found[1])


def test_both_sites_answer_all_requests_and_end_when_they_are_asked_to(tmp_path: Path):
    """As the README shows: two workers with four threads each, eight requests at a time."""
    shown = re.findall(
        r"^```text\n(.*?)^```",
        (ROOT / "examples/websites/README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )

    assert [run(tmp_path, "-m", "examples.websites.play")] == shown


def workers_of(gunicorn: Program) -> list[int]:
    pid = gunicorn.process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def held_by(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and bytes of memory of a process."""
    process = Path(f"/proc/{pid}")
    return (
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        int((process / "statm").read_text().split()[1]) * PAGE,
    )


@pytest.mark.parametrize("site", SITES, ids=["flask", "django"])
@pytest.mark.timeout(scale(120, 3600))
def test_workers_whose_parent_has_used_the_client_answer_and_do_not_grow(tmp_path: Path, site: str):
    """gunicorn loads the site before it forks, and the site calls at once."""
    module, name = site.split(":")
    (tmp_path / "warm.py").write_text(
        f"from {module} import {name} as app, client\n"
        "from examples.websites.service import shrink\n"
        "print(client.call(shrink, picture='of-the-parent.png', width=1), flush=True)\n"
    )
    with running(tmp_path, *SERVICE) as service, ThreadPoolExecutor(8) as pool:
        service.wait_text("service.serving")
        warm = ("--preload", "--pythonpath", str(tmp_path), "warm:app")
        with serving(tmp_path, *warm) as (gunicorn, port):
            ask = partial(get, port)
            list(pool.map(ask, range(1, 101)))
            before = {pid: held_by(pid) for pid in workers_of(gunicorn)}
            widths = range(1, scale(100, 10_000) + 1)
            assert list(pool.map(ask, widths)) == [{"file": f"cat-{n}.jpg"} for n in widths]
            after = {pid: held_by(pid) for pid in workers_of(gunicorn)}
            gunicorn.process.send_signal(signal.SIGTERM)
            assert gunicorn.process.wait(END_S) == 0
            assert "of-the-parent-1.jpg" in gunicorn.log.read_text()

    assert before.keys() == after.keys()
    assert len(before) == 2
    for pid, (descriptors, threads, memory) in after.items():
        # A worker may have a further connection of a visitor for a moment, and starts its threads
        # when it first needs them.
        assert descriptors <= before[pid][0] + 8
        assert threads <= before[pid][1] + 4
        assert memory <= before[pid][2] + MOST_GROWTH


SERVER = """
from wsgiref.simple_server import make_server
from examples.websites.flask_site import app

with make_server("127.0.0.1", 0, app) as server:
    print(server.server_port, flush=True)
    server.handle_request()
"""


def test_a_server_without_workers_ends_after_its_last_request(tmp_path: Path):
    """The client was made with the module, and nobody stops it."""
    (tmp_path / "server.py").write_text(SERVER)
    place = tmp_path / "server"
    place.mkdir()
    queues = f"sqlite:///{tmp_path / 'gracekit.db'}"
    with running(tmp_path, *SERVICE) as service:
        service.wait_text("service.serving")
        with running(place, "../server.py", QUEUES=queues) as server:
            server.wait_for(lambda: "\n" in server.log.read_text())
            assert get(int(server.log.read_text()), 7) == {"file": "cat-7.jpg"}
            assert server.process.wait(END_S) == 0, server.log.read_text()
