"""A start beside a service that reads the same queue into another store."""

from __future__ import annotations

import json
from pathlib import Path

import apsw
import pytest

from gracekit import Context, Runtime, Service, Settings
from gracekit.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def settings(place: Path, store: str, **more: object) -> Settings:
    return Settings(
        transport_url=f"sqlite:///{place}/queues.db",
        store_url=f"sqlite:///{place}/{store}.db",
        **more,  # type: ignore[arg-type]
    )


def service(topic: str = "compute", **options: object) -> Service:
    made = Service(topic)

    @made.rpc(**options)  # type: ignore[arg-type]
    async def work(ctx: Context, vm: str) -> str:
        return vm

    return made


def stop_record(store: Path) -> tuple[int, int]:
    """Exit codes of the only run of a store: its own, and the one in its report."""
    connection = apsw.Connection(str(store), flags=apsw.SQLITE_OPEN_READONLY)
    ((code, report),) = connection.execute("SELECT exit_code, report FROM run")
    connection.close()
    return code, json.loads(report)["exit_code"]


@pytest.mark.parametrize(
    "options",
    [
        {"on_interrupt": "error"},
        {"on_interrupt": "probe"},
        {"on_interrupt": "retry", "resource": "vm"},
    ],
)
async def test_a_start_beside_a_foreign_reader_is_refused(place, options):
    """Dedupe, resources and verdicts do not reach the other store: nothing is consumed."""
    async with Runtime(service(**options), settings(place, "one")) as first:
        second = Runtime(service(**options), settings(place, "two"))

        with pytest.raises(
            ConfigError, match="services with different stores read queue"
        ) as caught:
            await second.__aenter__()

        said = str(caught.value)
        assert f"compute@{first.instance}" in said
        assert "work must not run twice" in said
        assert "GRACEKIT_ACCEPT_UNSHARED_STORE" in said
        assert stop_record(place / "two.db") == (78, 78), "what the process says to its supervisor"
    async with Runtime(service(**options), settings(place, "two")):
        pass  # the first is gone, and with it the reason


@pytest.mark.parametrize("on_interrupt", ["retry", "requeue"])
async def test_methods_that_may_run_twice_need_no_common_store(place, on_interrupt):
    """Where a second run does no harm, two stores may share a queue; that is told all the same."""
    options = {"on_interrupt": on_interrupt}
    async with Runtime(service(**options), settings(place, "one")):
        second = Runtime(service(**options), settings(place, "two"))
        told: list[str] = []
        second.ground.telemetry.subscribe(lambda event, _: told.append(event))

        async with second:
            pass

    assert told.count("reader.foreign") == 2  # requests and ops


async def test_an_unshared_store_can_be_accepted(place):
    """accept_unshared_store is the operator's word that it is known."""
    async with (
        Runtime(service(), settings(place, "one")),
        Runtime(service(), settings(place, "two", accept_unshared_store=True)) as second,
    ):
        assert second.state.value == "serving"


async def test_siblings_of_one_store_start_beside_each_other(place):
    """The same store by another path is the same store."""
    (place / "link").symlink_to(place, target_is_directory=True)
    linked = Settings(
        transport_url=f"sqlite:///{place}/queues.db", store_url=f"sqlite:///{place}/link/one.db"
    )
    async with (
        Runtime(service(), settings(place, "one", instance="a")),
        Runtime(service(), linked) as second,
    ):
        assert second.state.value == "serving"


async def test_services_with_topics_of_their_own_share_a_transport(place):
    """Two services with a store each, and one file of queues, are a usual thing."""
    async with (
        Runtime(service("compute"), settings(place, "one")),
        Runtime(service("network"), settings(place, "two")) as second,
    ):
        assert second.state.value == "serving"
