"""`gracekit lease run` on two hosts: its command runs at one place, whatever ends its keeper."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from gracekit import Leases, Settings
from tests.postgres.fleet import DEAD_S, HARD_S, QUICK
from tests.postgres.site import InPostgres
from tests.process.helpers import ServiceProcess, Site, until
from tests.rabbit.proxy import Proxy
from tests.scale import scale
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]

ON_ANOTHER_MACHINE: Final = """
import sys
from gracekit import life

boot_id, read = sys.argv.pop(1), life._read
life._read = lambda path: boot_id if path.endswith("boot_id") else read(path)

from gracekit.cli.main import main
main()
"""
ACT: Final = "while :; do echo $GRACEKIT_LEASE_TOKEN >> effects; sleep 0.1; done"
"""Acts on something that compares no tokens."""
FORKS_TWICE: Final = f"setsid sh -c '({ACT}) & :' & {ACT}"


class Hosts(InPostgres, Site):
    """Hosts that share a schema, each behind a wire to the server."""

    def __init__(self, root: Path, server: Postgres, schema: str) -> None:
        super().__init__(root)
        self.keep_in(server, schema)
        self.server = server
        self.schema = schema
        self.wires: dict[str, Proxy] = {}

    def run(self, host: str, *words: str, script: str = ACT) -> ServiceProcess:
        """Hold vm:vm-1 on *host* for a shell."""
        return self.lease(host, "run", "vm:vm-1", *words, "--", "sh", "-c", script)

    def lease(self, host: str, *words: str) -> ServiceProcess:
        """`gracekit lease` on *host*."""
        wire = self.wires.get(host)
        if wire is None:
            wire = self.wires[host] = Proxy(self.server.port).__enter__()
        ours: dict[str, Any] = {
            "host": host,
            "run_directory": self.root / f"runs-{host}",
            "store_url": f"{self.server.url(port=wire.port)}&schema={self.schema}",
        }
        return self._start(
            [sys.executable, "-c", ON_ANOTHER_MACHINE, host, "lease", *words], QUICK | ours
        )

    def close(self) -> None:
        super().close()
        for wire in self.wires.values():
            wire.__exit__()

    @property
    def tokens(self) -> list[int]:
        """Those of all effects, in their order."""
        effects = self.root / "effects"
        return list(map(int, effects.read_text().split())) if effects.exists() else []

    async def acts(self, token: int) -> float:
        """Wait until the command of that hold has acted; when that was seen."""
        await until(lambda: token in self.tokens, f"an effect with token {token}", within_s=90.0)
        return time.monotonic()

    async def is_idle(self) -> float:
        """Wait until nothing has acted for a second; since when that is."""
        while True:
            seen, at = len(self.tokens), time.monotonic()
            await asyncio.sleep(1.0)
            if len(self.tokens) == seen:
                return at


@pytest.fixture
async def hosts(tmp_path: Path, postgres: Postgres, schema: str) -> Any:
    """With a declared lease vm:vm-1."""
    made = Hosts(tmp_path, postgres, schema)
    url = str(made.settings["store_url"])
    settings = Settings(store_url=url, host="zero", run_directory=str(tmp_path / "runs"))
    async with Leases(settings=settings) as leases:
        await leases.create("vm", "vm-1")
    yield made
    made.close()


async def test_a_second_host_is_refused_while_the_first_one_holds(hosts: Hosts) -> None:
    """75, with the holder's name; the first one goes on, and gives the lease back at its end."""
    first = hosts.run("one")
    await hosts.acts(1)
    second = hosts.run("two", script="touch never")
    refused = await second.exit_code()
    first.terminate()
    ended = await first.exit_code()
    third = hosts.run("two", script="exit 5")

    assert refused == 75
    assert "lease vm:vm-1 is held by one-0 on host one, which is " in second.log
    assert not (hosts.root / "never").exists()
    assert ended == 128 + signal.SIGTERM
    assert await third.exit_code() == 5


@pytest.mark.parametrize(
    "script",
    [
        ACT,
        pytest.param(
            FORKS_TWICE,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only the command is promised"),
        ),
    ],
    ids=["simple", "forks twice"],
)
async def test_the_command_of_a_killed_keeper_is_gone_and_runs_elsewhere(
    hosts: Hosts, script: str
) -> None:
    """At once, with all that it started; elsewhere when the keeper counts as dead."""
    first = hosts.run("one", script=script)
    await hosts.acts(1)
    second = hosts.run("two", "--wait", "2m")
    await asyncio.sleep(2.0)  # its keeper has joined, and watches

    first.kill()
    killed_at = time.monotonic()
    idle_at = await hosts.is_idle()
    again_at = await hosts.acts(2)
    second.terminate()

    assert idle_at - killed_at < 3.0
    assert again_at - killed_at >= DEAD_S - 2.0
    assert hosts.tokens == sorted(hosts.tokens)
    assert await second.exit_code() == 128 + signal.SIGTERM


async def test_a_stopped_keeper_is_gone_with_its_command_before_others_get_the_lease(
    hosts: Hosts,
) -> None:
    """The kernel ends it; nobody has to wake it up."""
    first = hosts.run("one", script=FORKS_TWICE if os.geteuid() == 0 else ACT)
    await hosts.acts(1)
    second = hosts.run("two", "--wait", "2m")

    first.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    code = await first.exit_code(within_s=60.0)
    gone_at = time.monotonic()
    seen = hosts.tokens
    await hosts.acts(2)
    second.terminate()

    assert code == -signal.SIGKILL
    assert HARD_S - 2.0 <= gone_at - stopped_at <= HARD_S + scale(2.0, 10.0)
    assert set(seen) == {1}
    assert hosts.tokens == sorted(hosts.tokens)
    assert hosts.tokens.count(1) <= len(seen) + 2
    assert await second.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize("script", [ACT, f"trap '' TERM; {ACT}"], ids=["hears", "deaf"])
async def test_a_keeper_that_is_cut_off_from_the_store_ends_its_command(
    hosts: Hosts, script: str
) -> None:
    """Before others get the lease; by SIGKILL if the command does not heed SIGTERM."""
    first = hosts.run("one", script=script)
    await hosts.acts(1)
    second = hosts.run("two", "--wait", "2m")

    hosts.wires["one"].swallow()
    code = await first.exit_code(within_s=60.0)
    seen = hosts.tokens
    await hosts.acts(2)
    second.terminate()

    assert "lease vm:vm-1 is lost: its member could not show that it lives" in first.log
    assert code == 128 + (signal.SIGKILL if "trap" in script else signal.SIGTERM)
    assert set(seen) == {1}
    assert hosts.tokens == sorted(hosts.tokens)
    assert await second.exit_code() == 128 + signal.SIGTERM


async def test_a_holder_on_another_host_is_seen_to_live_and_ends_by_an_order(hosts: Hosts) -> None:
    """From a host without a member. Of one that was killed nothing is known until members watch."""

    async def says(*words: str) -> tuple[int, str]:
        command = hosts.lease("two", *words)
        return await command.exit_code(within_s=60.0), command.log

    first = hosts.run("one")
    await hosts.acts(1)
    status = json.loads((await says("status", "vm:vm-1", "--json"))[1])
    forced = await says("force", "vm:vm-1", "--token", "1", "--reason", "it moves")
    ended = await first.exit_code()
    killed = hosts.run("one", "--wait", "1m")
    await hosts.acts(2)
    killed.kill()
    unknown = await says("status", "vm:vm-1")
    waits = await says("force", "vm:vm-1", "--token", "2", "--reason", "it burnt", "--wait", "1s")
    second = hosts.run("two", "--wait", "2m")
    dead = await says("force", "vm:vm-1", "--token", "2", "--reason", "it burnt")
    await hosts.acts(3)
    second.terminate()

    assert (status["state"], status["host"], status["holder_state"]) == ("EXCLUSIVE", "one", "LIVE")
    assert (forced[0], ended) == (0, 128 + signal.SIGTERM)
    assert " one-0 one UNKNOWN " in " ".join(unknown[1].split())
    assert waits[0] == 3
    assert waits[1].endswith("which is UNKNOWN; the order stands\n")
    assert dead[0] == 0, dead[1]
    assert dead[1].endswith("; token 2 has ended\n")
    assert await second.exit_code() == 128 + signal.SIGTERM
