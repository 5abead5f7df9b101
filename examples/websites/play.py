"""Both sites under gunicorn: many requests at a time, and SIGTERM. They end at once.

    python -m examples.websites.play

It needs `pip install . django flask gunicorn`.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

SITES = ("examples.websites.flask_site:app", "examples.websites.django_site:application")
WORKERS = ("--workers", "2", "--threads", "4")
ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 60.0
END_S = 20.0  # gunicorn would kill a worker that has not ended in 30 s


def main(number: int = 200) -> None:
    """Play it, with so many requests to each site."""
    with tempfile.TemporaryDirectory() as directory, started(directory, "gracekit", *SERVICE):
        for site in SITES:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                bind = ("--bind", f"fd://{listener.fileno()}")
                port = listener.getsockname()[1]
                words = ("gunicorn", *WORKERS, *bind, site)
                with started(directory, *words, fd=listener.fileno()) as gunicorn:
                    with ThreadPoolExecutor(8) as pool:
                        answers = list(pool.map(partial(get, port), range(1, number + 1)))
                    right = [{"file": f"cat-{n}.jpg"} for n in range(1, number + 1)]
                    print(f"{site}: {len(answers)} answers, all right: {answers == right}")
                    print(f"a width of 0: {get(port, 0)}")
                    gunicorn.terminate()
                    print(f"SIGTERM: exit code {gunicorn.wait(END_S)}")


SERVICE = ("run", "examples.websites.service:svc")


@contextmanager
def started(
    directory: str, *words: str, fd: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `python -m`, until the end of the block."""
    process = subprocess.Popen(  # noqa: S603 - our own program
        (sys.executable, "-m", *words),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=() if fd is None else (fd,),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LONGEST_S)


def get(port: int, width: int) -> object:
    """What the site answers, once it does."""
    until = time.monotonic() + LONGEST_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
        try:
            connection.request("GET", f"/thumbnails/cat.png?width={width}")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.SERVICE_UNAVAILABLE:  # the service starts
                return json.load(answer)
        finally:
            connection.close()
        assert time.monotonic() < until
        time.sleep(0.1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
