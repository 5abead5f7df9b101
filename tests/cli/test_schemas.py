"""What each command prints with `--json` is described by a JSON schema that users may rely on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

from gracekit.cli.main import cli
from tests.cli.kit import ROOT, Answer, Running, Started, gracekit, write_service
from tests.cli.parked import PARKING, left_parked, running
from tests.cli.test_statuses import commands

SCHEMAS: Final = ROOT / "docs" / "schemas" / "commands.json"
SHARED: Final = {"state", "live task", "run status", "drain report", "sending error"}


def closed(schema: Any) -> Any:
    """*schema* without any further field, so that a field without a description is found."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


class Schemas:
    """Checks documents by the name of their command."""

    def __init__(self) -> None:
        self._all = json.loads(SCHEMAS.read_text())
        self.names = set(self._all["$defs"]) - SHARED
        self.seen: set[str] = set()

    def check(self, name: str, document: Any) -> None:
        """Refuse a document that is not described."""
        schema = closed(self._all) | {"$ref": f"#/$defs/{name}"}
        jsonschema.Draft202012Validator(schema).validate(document)
        self.seen.add(name)

    def check_answer(self, name: str, answer: Answer) -> None:
        """Refuse printed text that is not described."""
        assert answer.out, answer
        self.check(name, answer.json)


def test_each_command_with_json_has_a_schema():
    """This fails for a new command without a schema; `run` prints a log, `lease run` what its
    command does.
    """
    found = {
        name
        for name, command in commands(cli)
        if any("--json" in parameter.opts for parameter in command.params)
    }

    schemas = json.loads(SCHEMAS.read_text())
    jsonschema.Draft202012Validator.check_schema(schemas)
    assert Schemas().names == found - {"run", "lease run"}


@pytest.mark.process
def test_what_each_command_prints_is_as_its_schema_says(tmp_path: Path):
    """There are runs that serve, drain and have ended, and tasks that run, wait, have failed, and
    are parked.
    """
    schemas = Schemas()
    write_service(tmp_path)

    def says(name: str, *words: str, as_: str = "") -> Answer:
        answer = gracekit(tmp_path, *name.split(), *words, "--json")
        schemas.check_answer(as_ or name, answer)
        return answer

    with Running(tmp_path, "--instance", "api-1") as killed:
        gracekit(tmp_path, "cast", "compute", "work", "vm=vm-0", "--id", "cut")
        killed.wait_line("at work")
        killed.kill()
    says("status")
    says("tasks")
    with Running(tmp_path, "--instance", "api-1") as run:
        says("call", "compute", "echo", "value=1", "--id", "short")
        says("call", "compute", "boom", "--id", "failed")
        says("cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work 'vm-1'")
        says("cast", "compute", "work", "vm=vm-1", "--id", "order-2")
        says("cast", "compute", "work", "vm=vm-1", "--host", "nobody-reads-here")
        says("call", "compute", "hold", "vm=vm-7")
        says("cast", "compute", "peek", "--id", "peek-1")
        run.wait_line("peeking")
        for name in ("status", "hosts", "tasks", "holds", "incidents", "health", "doctor", "dump"):
            says(name)
        says("tasks", "--stuck")
        says("tasks", "--state", "all")
        for task_id in ("order-1", "order-2", "peek-1", "failed", "cut"):
            says("tasks show", task_id)
        says("holds end", "migration", "vm-7", "--reason", "done")
        says("tasks cancel", "order-2", "--reason", "wrong")
        says("tasks fail", "order-1", "--reason", "wrong", "--no-wait")
        says("tasks retry", "failed")
        says("reconcile")
        says("extend", "--by", "5s")
        for name in ("quiet", "resume", "config show"):
            says(name)
        says("prune", "--dry-run")
        say_of_leases(tmp_path, says)
        says("store backup", "copy.db")
        says("drain", "--timeout", "100ms")
        run.wait()
    for name in ("status", "exits"):
        says(name)
    says("hosts gone", says("hosts").json["hosts"][0]["host"], "--reason", "scrapped")
    says("store restored")

    parking = tmp_path / "parking"
    parking.mkdir(mode=0o700)
    write_service(parking, text=PARKING)
    with running(parking):
        says_parked = gracekit(parking, "call", "compute", "build", "vm=v", "--json")
        schemas.check_answer("call", says_parked)
    left_parked(parking, "park-1", "park-2", "park-3")
    for name, *words in (
        ("status",),
        ("pending",),
        ("tasks", "--state", "all"),
        ("tasks show", "park-1"),
        ("pending retry", "park-1"),
        ("pending give-up", "park-2", "--reason", "too large"),
        ("pending cancel", "park-3", "--reason", "wrong"),
        ("status",),
        ("store retire",),
    ):
        schemas.check_answer(name, gracekit(parking, *name.split(), *words, "--json"))

    # It needs a run that cannot be proven dead.
    assert schemas.names - schemas.seen == {"runs gone"}


def say_of_leases(directory: Path, says: Callable[..., Answer]) -> None:
    """Of one that a task holds, too; and the wish that an instance stays down."""
    says("lease create", "vm:vm-9", "--payload", "on node 7")
    says("lease status", "vm:vm-9")
    says("lease check")
    says("lease status", "vm:vm-1")
    words = ("lease", "run", "vm:vm-9", "--", "sh", "-c", "echo holds; exec sleep 600")
    with Started(directory, *words) as holder:
        holder.wait_line("holds")
        says("lease list")
        says("lease force", "vm:vm-9", "--token", "1", "--reason", "it moves")
    for words in (("stop", "compute", "--reason", "moved"), ("start", "compute")):
        says(f"service {words[0]}", *words[1:], "--instance", "api-1")
    says("lease create", "vm:vm-8")  # the other one settles
    says("lease delete", "vm:vm-8")
