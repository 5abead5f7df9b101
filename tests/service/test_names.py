"""Names of services and hosts, as OpenStack has them, in queues and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit import Context, RpcClient, Runtime, Service, Settings
from gracekit.errors import ConfigError
from gracekit.runs.names import instance_lock_name


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def settings(place: Path, **more: object) -> Settings:
    return Settings(
        transport_url=f"sqlite:///{place}/queues.db",
        store_url=f"sqlite:///{place}/store.db",
        drain_timeout_s=1.0,
        ops_quiet_timeout_s=0.1,
        **more,  # type: ignore[arg-type]
    )


def service(topic: str) -> Service:
    made = Service(topic)

    @made.rpc
    async def whose(ctx: Context) -> str:
        return topic

    return made


@pytest.mark.parametrize(
    ("topic", "host"),
    [
        ("ironic.conductor_manager", "host1@lvm"),
        ("cinder-volume", "host1@netapp#pool one"),
        ("/a:b@c,d+e", "..//.."),
        ("@" * 116, "#" * 130),
    ],
)
async def test_what_a_client_may_address_is_served(place: Path, topic: str, host: str):
    """Topic and host are names of queues; files are named for them in plain letters."""
    before = {path.parent for path in place.parent.rglob("*.lock")}

    async with (
        Runtime(service(topic), settings(place, host=host)) as runtime,
        RpcClient(f"sqlite:///{place}/queues.db", topic) as client,
    ):
        assert runtime.instance == f"{host}-0"
        assert await client.prepare(host=host, timeout=20).call("whose") == topic
        assert await client.prepare(host=runtime.instance, ops=True, timeout=20).call("whose")

    made = {path.parent for path in place.parent.rglob("*.lock")} - before
    assert len(made) == 1, "each in the run directory, whatever is in its name"


async def test_slots_of_names_that_look_alike_are_two(place: Path):
    """One instance's lock keeps out that instance alone."""
    async with (
        Runtime(service("a@b"), settings(place, instance="c")),
        Runtime(service("a"), settings(place, instance="b@c")) as second,
    ):
        assert second.state.value == "serving"


def test_plain_names_are_kept_in_file_names():
    """Who looks into the directory recognises service and instance."""
    assert instance_lock_name("compute", "node-1.example-0") == "compute@node-1.example-0.lock"


def test_file_names_differ_and_fit():
    """Whatever the names, and however long: at most 255 bytes, and no two alike."""
    words = ["a", "a@b", "b@c", "c", "%", "%40", "a/b", "a b", "ä", "@" * 120, "@" * 119 + "#"]
    pairs = [(one, other) for one in words for other in words]

    names = {instance_lock_name(one, other) for one, other in pairs}

    assert len(names) == len(pairs)
    assert all(len(name.encode()) <= 255 and "/" not in name for name in names)


async def test_names_that_make_no_queue_together_are_refused(place: Path):
    """A broker takes 255 characters, and topic and host share them."""
    runtime = Runtime(service("t" * 100), settings(place, host="h" * 150))

    with pytest.raises(ConfigError, match=r"queue 't+.* would have 259 characters.*GRACEKIT_HOST"):
        await runtime.__aenter__()
