"""The examples of `docs/oslo.md`: a service before and after its move, called by the same story."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gracekit import RemoteError, RpcClient, Settings
from gracekit.config.settings import variable_name
from tests.docs.pages import Page
from tests.oslo.kit import ROOT, OsloError, oslo_client, oslo_python, serving

pytestmark = pytest.mark.process

EXAMPLES = ROOT / "examples" / "oslo"
PAGE = (ROOT / "docs" / "oslo.md").read_text()

TIMEOUT_S = 120
KILL = (signal.SIGKILL, -signal.SIGKILL)  # its own stop takes the library some seconds
DRAIN = (signal.SIGTERM, 0)

Call = Callable[..., Awaitable[Any]]


async def tell(call: Call, directory: Path) -> None:
    """What callers of the service do, and see."""
    assert await call("create", disk="d1", size=1) == {"disk": "d1", "size": 1}
    assert (directory / "d1.disk").read_text() == "1 GB for ann"
    assert await call("count") == 1

    (directory / "d1.attached").touch()
    with pytest.raises((OsloError, RemoteError), match="d1 is attached"):
        await call("delete", disk="d1")
    (directory / "d1.attached").unlink()
    for _ in range(2):
        assert await call("delete", disk="d1") is None
    assert await call("count") == 0
    with pytest.raises((OsloError, TypeError), match="size"):
        await call("create", disk="d2")


async def test_before(rabbit_url: str, tmp_path: Path):
    """On oslo.messaging, called by it."""
    url = rabbit_url.replace("amqp://", "rabbit://")
    async with (
        serving(tmp_path, EXAMPLES / "before.py", url, until="serving", end=KILL),
        oslo_client(rabbit_url, "disks") as client,
    ):
        view = client.prepare(version="1.1", timeout=20)

        await tell(lambda method, **args: view.call({"user": "ann"}, method, **args), tmp_path)


async def test_after(tmp_path: Path):
    """On gracekit, called by it."""
    url = f"sqlite:///{tmp_path}/gracekit.db"
    run = ("-m", "gracekit", "run", "--app-dir", EXAMPLES, "after:svc")
    async with (
        serving(tmp_path, *run, until="service.serving", end=DRAIN, GRACEKIT_TRANSPORT_URL=url),
        RpcClient(url, "disks") as client,
    ):
        view = client.prepare(version="1.1", timeout=20, context={"user": "ann"})

        await tell(view.call, tmp_path)


async def test_the_program_of_the_page_runs_on_a_file_of_oslo_config(
    rabbit_url: str, tmp_path: Path
):
    """It says in its log that it serves, which option has no effect, and drains by a signal."""
    Page("oslo.md").write_to(tmp_path)
    url = rabbit_url.replace("amqp://", "rabbit://")
    file = tmp_path / "disks.conf"
    file.write_text(
        f"[DEFAULT]\ntransport_url = {url}\nhost = host1\nexecutor_thread_pool_size = 9\n"
        "[oslo_messaging_rabbit]\namqp_durable_queues = true\n"
    )
    run = (tmp_path / "oslo_main.py", "--config-file", file)
    path = f"{EXAMPLES}{os.pathsep}{ROOT}"
    said: list[str] = []
    async with (
        serving(tmp_path, *run, until="service.serving", end=DRAIN, said=said, PYTHONPATH=path),
        RpcClient(f"{url}?exchange=openstack&profile=oslo-durable", "disks") as client,
    ):
        view = client.prepare(version="1.1", timeout=20, host="host1")
        assert await view.call("count") == 0

    (doubt,) = [line for line in said if "service.doubted" in line]
    assert "executor_thread_pool_size is set and not used" in doubt


async def test_doctor_shows_each_step_of_the_move_as_the_page_says(rabbit_url: str, tmp_path: Path):
    """The methods; then the profile that fits, and with it that the queues do."""
    url = rabbit_url.replace("amqp://", "rabbit://")
    settings = {"GRACEKIT_TRANSPORT_URL": url, "GRACEKIT_EXCHANGE": "openstack"}
    shown = " ".join(PAGE.split())

    nothing = await doctor(tmp_path, **settings)
    async with serving(tmp_path, EXAMPLES / "before.py", url, until="serving", end=KILL):
        wrong = await doctor(tmp_path, **settings)
        (profile,) = re.findall(r"set (GRACEKIT_DECLARE_PROFILE=[\w-]+)", wrong)
        fits = await doctor(tmp_path, **settings, **dict([profile.split("=")]))
        more = dict([profile.split("=")], GRACEKIT_ACCEPT_UNSHARED_STORE="true")
        accepts = await doctor(tmp_path, **settings, **more)
        elsewhere = await doctor(tmp_path, **{**settings, "GRACEKIT_EXCHANGE": "cinder"})

    for said, line in (
        (nothing, "none of its queues and exchanges exists yet"),
        (nothing, "3 on topic disks: 1 error, 1 requeue, 1 retry"),
        (nothing, "3 in threads"),
        (wrong, "FAIL profile durable would be refused (406): "),
        (wrong, profile),
        (fits, "ok profile: oslo-transient fits what exists: exchange openstack, queue disks, "),
        (fits, "ok directed queue: requests to this host come by disks."),
        (fits, "FAIL foreign readers"),
        (elsewhere, "WARN control exchange"),
        (accepts, "ok accepted requests"),
    ):
        assert line in " ".join(said.split()), said
        assert line.rstrip() in shown
    assert "0 FAIL" in accepts
    assert "WARN  foreign readers" in accepts


def test_the_test_of_the_page_passes(tmp_path: Path):
    """The endpoint of the example in the test kit, in place of oslo.messaging's fake driver."""
    Page("oslo.md").write_to(tmp_path)
    path = f"{EXAMPLES}{os.pathsep}{ROOT}"

    done = subprocess.run(
        (oslo_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_disks.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


async def doctor(directory: Path, **environment: str) -> str:
    """What `gracekit doctor after:svc` prints."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    process = await asyncio.create_subprocess_exec(
        oslo_python(), "-m", "gracekit", "doctor", "--app-dir", EXAMPLES, "after:svc",
        cwd=directory, env=ours | environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return said.decode()


def test_the_page_shows_what_was_changed():
    """Its diff is how the two files end; before that they have the same classes."""
    before, after = ((EXAMPLES / name).read_text() for name in ("before.py", "after.py"))
    classes, main, removed = before.partition("def main")
    same, svc, added = after.partition("svc = Service")
    (shown,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    assert classes.partition("\nclass ")[2] == same.partition("\nclass ")[2]
    assert marked(shown, "-") == (main + removed).split()
    assert marked(shown, "+") == (svc + added).split()


def test_the_page_names_settings_that_there_are():
    """Each variable in its table is one."""
    known = {variable_name(field.name) for field in fields(Settings)}

    assert set(re.findall(r"GRACEKIT_\w+", PAGE)) <= known


def marked(diff: str, sign: str) -> list[str]:
    """The words of the lines with that sign."""
    return [word for line in diff.splitlines() if line[:1] == sign for word in line[1:].split()]
