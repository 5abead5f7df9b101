"""What the printed unit lets a service do, and what not, under a real systemd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from tests.systemd.kit import LOG, NAME
from tests.systemd.machine import USER

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "adopting-nova.md"


def test_an_operator_reaches_a_run_that_its_unit_confines(machine, shop):
    """It works by the door, as the service's user: status, and a drain that systemd counts as a
    good end.
    """
    shop.start()

    (run,) = json.loads(shop.ask("status", "--json"))["runs"]
    shop.ask("health", "--ready")
    drained = shop.ask("drain")

    assert run["phase"] == "serving"
    machine.wait_for(NAME, ActiveState="inactive", Result="success", NRestarts="0")
    assert "drained" in drained


def test_a_unit_confines_its_service(machine, shop):
    """The service may only write into its own directories, and cannot get more rights."""
    machine.run("mkdir", "-m", "777", "/srv/open")
    machine.run("touch", "/tmp/of-others")
    shop.start()

    refusals = json.loads(shop.ask("call", "shop", "refusals"))

    assert refusals == {
        "write where all may": "EROFS",
        "be root": "EPERM",
        "have a namespace": "EPERM",
        "look into /tmp of others": "ENOENT",
    }


def test_the_drop_in_for_privsep_lets_a_child_become_root(machine, shop):
    """Without it `NoNewPrivileges=no` alone changes nothing; with it the child has all
    capabilities.
    """
    machine.run("mkdir", "/srv/sudo")
    machine.run("install", "-o", "root", "-m", "4755", "/bin/sh", "/srv/sudo/sh")
    (drop_in,) = re.findall(r"^```ini\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split("=", 1) for line in drop_in.splitlines() if re.match("[A-Z]", line)]
    found = {}
    for name, directives in {
        "printed": {},
        "one line": {"NoNewPrivileges": "no"},
        "the page's": dict(lines),
    }.items():
        shop.set(**directives)
        shop.start()
        found[name] = json.loads(shop.ask("call", "shop", "who_sudo_is"))
        shop.stop()

    assert [who for who, *_ in found.values()] == [USER, USER, "root"]
    assert found["the page's"][-1] == machine.run("grep", "CapEff", "/proc/self/status").split()[-1]


def test_a_store_in_a_home_can_be_written(machine, shop):
    """Homes are read-only for the service then, but for the directory of the store."""
    machine.run("install", "-d", "-o", USER, "-m", "700", "/run/user/shop")
    machine.add_unit(NAME, shop.printed("--store-url", "sqlite:////run/user/shop/own.db"), **LOG)
    shop.start()

    machine.run("test", "-s", "/run/user/shop/own.db")


def test_a_setting_arrives_as_it_was_given(machine, shop):
    """systemd reads the quotes, percent signs and dollars of the unit as they were meant."""
    queues = 'a "b" \\c $d ${e} %i %% 100%,é'
    machine.add_unit(NAME, shop.printed("--reply-queues", queues), **LOG)
    shop.start()

    pid = machine.show(NAME, "MainPID")["MainPID"]
    variables = machine.run("cat", f"/proc/{pid}/environ").split("\0")

    assert f"GRACEKIT_REPLY_QUEUES={queues}" in variables


def test_a_confined_run_answers_by_http(machine, shop):
    """It listens at a socket in its runtime directory; the tokens are in root's file that its group
    may read, as Kubernetes mounts a Secret.
    """
    machine.run("sh", "-c", f"echo op:{'t' * 32}:act > /run/tokens; chgrp nogroup /run/tokens")
    machine.run("chmod", "440", "/run/tokens")
    admin = ("--admin", "unix:/run/shop/admin.sock", "--admin-token-file", "/run/tokens")
    machine.add_unit(NAME, shop.printed(*admin), **LOG)
    shop.start()

    ask = ("curl", "-sS", "--unix-socket", "/run/shop/admin.sock")
    ready = machine.run(*ask, "http://localhost/readyz")

    assert json.loads(ready)["status"] == "pass"


def test_doctor_finds_nothing_beside_a_running_unit(shop):
    """There is no fault in the unit, in the process that it has started, or in its files."""
    shop.start()

    words = ("doctor", "shop:svc", "--unit", f"/run/units/{NAME}", "--json")
    found = json.loads(shop.ask(*words))["findings"]

    areas = {"settings", "application", "platform", "process", "store", "transport"}
    assert areas <= {one["area"] for one in found}
    assert [one for one in found if one["level"] in {"warn", "fail"}] == []


def test_instances_of_a_template_share_a_store(machine, shop):
    """Each is a run with a name and a runtime directory of its own."""
    machine.add_unit("shop@.service", shop.printed("--instances", "2"), **LOG)
    machine.ctl("start", "shop@0", "shop@1")

    runs = json.loads(shop.ask("status", "--json"))["runs"]
    host = machine.run("hostname")
    before = machine.run("ls", "/run/shop")
    machine.ctl("stop", "shop@0")
    after = machine.run("ls", "/run/shop")

    assert {run["instance"] for run in runs} == {f"{host}-0", f"{host}-1"}
    assert (before.split(), after) == (["0", "1"], "1")
