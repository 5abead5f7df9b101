"""Processes: who stands above them, which signals arrive, what they would inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit import Settings
from gracekit.doctor import host, proc
from gracekit.doctor.finding import Level
from gracekit.doctor.processes import (
    check_alarm,
    check_pid,
    check_shell_above,
    check_stop_signals,
)
from tests.doctor.kit import levels, process

SHELL = ("sh", "-c", "gracekit run compute; true")


# -- who stands above ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents", "level"),
    [
        ([SHELL], Level.FAIL),  # PID 1 of a container
        ([("systemd",), SHELL], Level.FAIL),  # the unit's main process
        ([("systemd",), ("sshd",), SHELL], Level.WARN),
        ([("systemd",), ("bash", "start.sh")], Level.FAIL),
        ([("bash",)], Level.FAIL),  # docker run -it image bash
        ([("systemd",), ("sshd",), ("-bash",)], Level.OK),
        ([("systemd",), ("-bash",), ("python", "tool.py")], Level.OK),
        ([("tini",)], Level.OK),
    ],
)
def test_a_shell_above_the_service_keeps_sigterm(tmp_path, parents, level):
    """A shell that runs a command or script passes no signal on; one that people type into may."""
    for pid, command in enumerate(parents, start=1):
        process(tmp_path, pid, *command, parent=pid - 1)
    service = len(parents) + 1
    process(tmp_path, service, "gracekit", "run", "compute", parent=len(parents))

    found = check_shell_above(service, tmp_path)

    assert found.level is level
    assert level is Level.OK or 'ENTRYPOINT ["gracekit"' in found.remedy


@pytest.mark.process
def test_real_parents_are_read(tmp_path):
    """A child of a real shell is seen to have one above it."""
    script = f"{sys.executable} -c 'print(0, flush=True); input()'; true"
    with subprocess.Popen(["sh", "-c", script], stdin=-1, stdout=-1, text=True) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        (child,) = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()

        found = check_shell_above(int(child))

        shell.communicate("\n")
    assert found.level in {Level.WARN, Level.FAIL}
    assert f"(pid {shell.pid})" in found.seen


# -- signals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "level", "word"),
    [
        ({}, Level.OK, "arrive"),
        ({"ignored": [signal.SIGTERM]}, Level.FAIL, "ignores SIGTERM"),
        ({"blocked": [signal.SIGINT]}, Level.FAIL, "blocks SIGINT"),
        ({"caught": []}, Level.WARN, "no handler"),
    ],
)
def test_stop_signals_that_do_not_arrive_are_found(tmp_path, masks, level, word):
    """Blocked and ignored ones begin no drain; one without handler ends the process at once."""
    process(tmp_path, 7, "gracekit", **masks)

    found = check_stop_signals(7, tmp_path)

    assert (found.level, word in found.seen) == (level, True)


@pytest.mark.parametrize("mask", ["blocked", "ignored", "caught"])
def test_the_kernels_alarm_must_keep_its_default(tmp_path, mask):
    """SIGALRM ends a stuck process only where nobody touches it."""
    process(tmp_path, 7, "gracekit", **{mask: [signal.SIGALRM]})

    assert check_alarm(7, tmp_path).level is Level.FAIL


@pytest.mark.parametrize(
    ("masks", "level"),
    [
        ({}, Level.FAIL),
        ({"caught": [signal.SIGALRM]}, Level.OK),
        ({"caught": [signal.SIGALRM], "blocked": [signal.SIGALRM]}, Level.FAIL),
        ({"ignored": [signal.SIGALRM]}, Level.FAIL),
    ],
)
def test_as_pid_1_the_alarm_needs_a_handler(tmp_path, masks, level):
    """The kernel drops what has none there; a container's PID 1 has another number outside."""
    process(tmp_path, 1, "gracekit", **masks)
    process(tmp_path, 4711, "gracekit", inner=1, **masks)

    assert check_alarm(1, tmp_path).level is level
    assert check_alarm(4711, tmp_path).level is level


@pytest.mark.process
def test_masks_are_those_of_the_kernel():
    """A real child that ignores SIGTERM and blocks SIGALRM is read as such."""
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); print(0, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = levels(check_pid(child.pid))
        child.communicate("\n")

    assert found[f"signals of {child.pid}"] is Level.FAIL
    assert found[f"alarm of {child.pid}"] is Level.FAIL


def test_a_process_that_is_gone_fails(tmp_path):
    """--pid with a number of nobody is told, not passed over."""
    assert levels(check_pid(7, tmp_path)) == {"pid 7": Level.FAIL}


# -- surroundings -------------------------------------------------------------------


def test_a_container_is_known_by_its_group_its_environment_or_its_root(tmp_path):
    """Kubernetes says so in the environment, Docker and Podman leave a file."""
    process(tmp_path, 1, "x", cgroup="/system.slice/docker-abc.scope")
    process(tmp_path, 2, "x", environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    process(tmp_path, 3, "x", cgroup="/machine.slice/libpod-abc.scope")
    process(tmp_path, 4, "x")
    process(tmp_path, 5, "x")
    (tmp_path / "5" / "root").mkdir()
    (tmp_path / "5" / "root" / ".dockerenv").touch()

    kinds = [proc.container_of(pid, tmp_path) for pid in (1, 2, 3, 4, 5)]

    assert kinds == ["docker", "kubernetes", "podman", None, "docker"]


@pytest.mark.parametrize(
    ("root", "kind"),
    [
        ("27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw", None),
        ("27 1 254:0 / / rw,relatime - xfs /dev/sda1 rw", None),
        ("27 1 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/l", "docker"),
        ("27 1 0:50 / / rw,relatime - zfs pool/docker/1 rw", "docker"),
        ("27 1 254:0 /var/lib/docker/vfs/dir/1 / rw - ext4 /dev/vda rw", "docker"),
    ],
)
def test_the_file_of_docker_on_a_whole_disk_is_a_stray(tmp_path, root, kind):
    """A machine that was made from the image of a container has the file, and runs in none."""
    process(tmp_path, 1, "x")
    (tmp_path / "1" / "root").mkdir()
    (tmp_path / "1" / "root" / ".dockerenv").touch()
    (tmp_path / "1" / "mountinfo").write_text(f"22 27 0:21 / /proc rw - proc proc rw\n{root}\n")

    assert proc.container_of(1, tmp_path) == kind


def test_a_clock_that_was_never_set_fails():
    """After a boot without time the store's moments mean nothing."""
    assert host.check_clock(86_400.0).level is Level.FAIL
    assert host.check_clock().level is Level.OK


@pytest.mark.parametrize(
    ("name", "cgroup", "origins", "level"),
    [
        ("3f2a9c01b7de", "/docker/abc", {}, Level.WARN),
        ("3f2a9c01b7de", "/docker/abc", {"host": "GRACEKIT_HOST"}, Level.OK),
        ("3f2a9c01b7de", "/", {}, Level.OK),
        ("worker", "/docker/abc", {}, Level.OK),
        ("compute-7d9c5b6f4-x2k4p", "/kubepods/pod1", {}, Level.WARN),
        ("compute-0", "/kubepods/pod1", {}, Level.OK),
    ],
)
def test_a_host_name_that_changes_with_each_restart_is_told(tmp_path, name, cgroup, origins, level):
    """What was directed to a container's drawn name finds nobody after a restart."""
    process(tmp_path, 7, "gracekit", cgroup=cgroup)
    settings = Settings(host=name, origins=origins)

    assert host.check_host_name(settings, 7, tmp_path).level is level


def test_a_pid_is_known_in_its_own_namespace():
    """A run in a container has written down another pid than the machine knows it by."""
    namespace, inner = proc.inner_pid(os.getpid())

    assert namespace == Path("/proc/self/ns/pid").stat().st_ino
    assert inner == os.getpid()
