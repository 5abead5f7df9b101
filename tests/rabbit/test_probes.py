"""Probes and actions by HTTP of a service whose requests come through a broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.kit import ALICE, JSON, ask_now, write_tokens
from tests.admin.test_drains import free_port
from tests.process import served
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy
from tests.rabbit.site import RabbitSite

pytestmark = pytest.mark.process


@pytest.fixture
def proxy(shared_broker: Broker) -> Iterator[Proxy]:
    with Proxy(shared_broker.port) as made:
        yield made


@pytest.fixture
def site(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, proxy: Proxy
) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost, port=proxy.port)
    yield made
    made.close()


async def test_a_broker_that_goes_and_comes_back_is_seen_by_readiness_alone(
    site: RabbitSite, proxy: Proxy
):
    """Liveness passes, as a restart would not help. For some seconds readiness only warns."""
    address = f"127.0.0.1:{free_port()}"
    await site.start(admin=address).serving()

    def ready() -> tuple[int, str]:
        answer = ask_now(address, "/readyz")
        return answer.status, answer.json["status"]

    def others() -> list[int]:
        return [ask_now(address, path).status for path in ("/livez", "/startupz")]

    def connected() -> bytes:
        lines = ask_now(address, "/metrics").body.splitlines()
        return next(line for line in lines if line.startswith(b"gracekit_broker_connected "))

    assert ready() == (200, "pass")
    assert connected().endswith(b" 1.0")
    proxy.refuse()
    proxy.cut()
    await until(lambda: ready() == (200, "warn"), "a warning at once")
    await until(lambda: ready() == (503, "fail"), "not ready while the broker is away")
    assert others() == [200, 200]
    assert connected().endswith(b" 0.0")

    proxy.heal()
    await until(lambda: ready() == (200, "pass"), "ready again", within_s=60)
    assert others() == [200, 200]


async def test_requests_that_wait_on_a_broker_are_seen_by_http(site: RabbitSite, proxy: Proxy):
    """Those in the queue and those that the run has read and has no place for. While the broker is
    away there is no number, and the status is answered all the same.
    """
    address = f"127.0.0.1:{free_port()}"
    await site.start(admin=address, max_accepted=1, max_running=1).serving()

    def waiting() -> float | None:
        start = b'gracekit_requests_waiting{lane="requests"} '
        lines = ask_now(address, "/metrics").body.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(start)), None)

    assert waiting() == 0
    async with served.svc.client(site.url) as client:
        for key in ("a", "b", "c", "d"):
            await client.cast("slow", key=key, s=60)
    await until(lambda: waiting() == 3, "the number of those without a place", within_s=60)

    proxy.refuse()
    proxy.cut()
    await until(lambda: waiting() is None, "no number", within_s=60)
    (run,) = ask_now(address, "/api/v1/status").json["runs"]
    assert run["status"]["queues"] == {}
    proxy.heal()


async def test_every_verb_works_from_another_host_with_a_token(site: RabbitSite, tmp_path: Path):
    """Without a token none does; each that changes something is an incident with who and why."""
    address = f"127.0.0.1:{free_port()}"
    tokens = write_tokens(tmp_path)
    service = await site.start(admin=address, admin_token_file=tokens).serving()
    async with served.svc.client(site.url) as client:
        task_id = await client.cast("slow", key="k", s=60)
    await site.in_state(task_id, "running")

    def act(path: str, **body: str) -> int:
        key = ask_now(address, "/api/v1/action-key", **ALICE).json
        sent = {"run_id": key["run_id"], "key": key["key"], **body}
        assert ask_now(address, f"/api/v1/{path}", "POST", body=sent, **JSON).status == 401
        return ask_now(address, f"/api/v1/{path}", "POST", body=sent, **ALICE, **JSON).status

    (run,) = ask_now(address, "/api/v1/status", **ALICE).json["runs"]
    dump = ask_now(address, "/api/v1/dump", **ALICE).json["text"]
    done = [
        act("quiet", reason="a look"),
        act("resume"),
        act("drain", timeout="20s", reason="host moves"),
        act("extend", more="1m"),
        act(f"tasks/{task_id}/cancel", reason="not needed"),
    ]

    assert run["status"]["running"] == 1
    assert f"task {task_id} method=slow" in dump
    assert done == [200] * 5
    assert await service.exit_code() == 0
    rows = site.rows("SELECT what, detail FROM incident WHERE what LIKE 'operator_%' ORDER BY id")
    assert [row["what"] for row in rows][:4] == [
        *("operator_quiet", "operator_resume", "operator_drain", "operator_extend"),
    ]
    assert rows[2]["detail"] == "token alice: host moves"
