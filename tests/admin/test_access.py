"""Who may do what by HTTP: a refused request changes nothing, and is logged."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import shutil
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gracekit import Context, RpcClient, Service
from gracekit.admin.access import Access, ActionKeys, Asking, Need, RefusedError, Tokens
from gracekit.errors import ConfigError
from gracekit.phase import ServiceState
from tests.admin.kit import ALICE, JSON, PATIENCE_S, TOKEN, Site, raw, write_tokens
from tests.rabbit.broker import Tls
from tests.rabbit.certificates import Certificates

EVE = {"Authorization": f"Bearer {TOKEN[::-1]}"}
READINGS = (
    *("status", "tasks", "dump", "exits", "incidents", "accounts", "config", "openapi.json"),
    "action-key",
)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with Site(tmp_path, Service("s"), admin_token_file=str(write_tokens(tmp_path))) as made:
        yield made


async def incidents(site: Site) -> list[tuple[str, str]]:
    engine = site.runtime.ground.engine
    rows = await engine.query("SELECT what, detail FROM incident ORDER BY id")
    return [(str(what), str(detail)) for what, detail in rows]


# -- who comes --------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, EVE, {"Authorization": f"Basic {TOKEN}"}])
async def test_without_a_token_of_the_file_only_probes_answer(site: Site, headers: dict[str, str]):
    """It gets no listing, no key and no action; each refusal is logged."""
    assert (await site.ask("/readyz", **headers)).status == 200
    for path in READINGS:
        answer = await site.ask(f"/api/v1/{path}", **headers)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    answer = await site.ask("/api/v1/quiet", "POST", body={"reason": "x"}, **headers, **JSON)

    assert answer.status == 401
    assert site.runtime.state is ServiceState.SERVING
    assert await incidents(site) == []
    assert {entry["why"] for entry in site.told("admin.refused")} == {"token"}


async def test_probes_ask_for_a_token_where_the_setting_says_so(tmp_path: Path):
    """This is for endpoints that strangers reach, if the platform can send a header."""
    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, Service("s"), admin_token_file=tokens, admin_open="nothing") as site:
        assert (await site.ask("/livez")).status == 401
        assert (await site.ask("/livez", **ALICE)).status == 200


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        (":probe", ["/readyz"]),
        (":metrics", ["/readyz", "/metrics"]),
        (":read", ["/readyz", "/metrics", "/api/v1/status", "/api/v1/events"]),
        (":act", ["/readyz", "/metrics", "/api/v1/status", "/api/v1/events", "/api/v1/action-key"]),
    ],
    ids=["probe", "metrics", "read", "act"],
)
async def test_a_token_may_do_what_its_scope_says_and_no_more(
    tmp_path: Path, scope: str, may: list[str]
):
    """So the token of a scraper cannot drain the service."""
    tokens = str(write_tokens(tmp_path, f"alice:{TOKEN}{scope}\n"))
    open_ = {"admin_open": "nothing"}
    async with Site(tmp_path, Service("s"), admin_token_file=tokens, **open_) as site:
        paths = ("/readyz", "/metrics", "/api/v1/status", "/api/v1/events", "/api/v1/action-key")
        answered = [path for path in paths if await status_of(site, path) == 200]
        refused = {path: await status_of(site, path) for path in paths if path not in may}
        action = await site.ask("/api/v1/drain", "POST", body={"reason": "x"}, **ALICE, **JSON)
        state = site.runtime.state

    assert answered == may
    assert set(refused.values()) <= {403}
    assert action.status == (400 if "/api/v1/action-key" in may else 403)  # it has no key
    assert state is ServiceState.SERVING
    assert {entry["why"] for entry in site.told("admin.refused")} <= {"scope"}
    assert TOKEN not in str(site.events)


async def status_of(site: Site, path: str) -> int:
    """The status of one request by alice; what is sent in its body is not read."""
    reader, writer = await raw(site)
    ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    writer.write(ask.encode())
    async with asyncio.timeout(PATIENCE_S):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_an_action_is_on_record_with_who_and_why(site: Site):
    """The record has the token's name, not the token."""
    answer = await site.act("/api/v1/quiet", reason="host moves")

    assert (answer.status, answer.json["phase"]) == (200, "quiet")
    assert await incidents(site) == [("operator_quiet", "token alice: host moves")]
    assert site.told("run.ordered") == [
        {"verb": "quiet", "by": "token alice", "reason": "host moves"}
    ]
    assert TOKEN not in str(site.events)


async def test_a_drain_by_http_is_given_more_time_and_undone(tmp_path: Path):
    """This works as by the command line; answers say how much time is left, and all is on
    record.
    """
    svc, begun, done = Service("s"), asyncio.Event(), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        await done.wait()

    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, svc, admin_token_file=tokens) as site:
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            await client.cast("work")
        await begun.wait()
        drained = await site.act("/api/v1/drain", timeout="20s", reason="host moves")
        while site.runtime.state is not ServiceState.DRAINING:
            await asyncio.sleep(0.01)
        extended = await site.act("/api/v1/extend", more="5m", reason="nearly done")
        wrong = await site.act("/api/v1/extend", more="soon")
        dump = await site.ask("/api/v1/dump", **ALICE)
        undone = await site.act("/api/v1/resume", reason="not today")
        done.set()
        noted = await incidents(site)

    assert [answer.status for answer in (drained, extended, wrong, undone)] == [200, 200, 400, 200]
    assert 300 < extended.json["drain_left_s"] <= 320
    assert "work" in dump.json["text"]
    assert [what for what, _ in noted] == ["operator_drain", "operator_extend", "operator_resume"]
    assert all(detail.startswith("token alice") for _, detail in noted)


async def test_tokens_are_read_again_when_their_file_changes(tmp_path: Path):
    """A new token works at once and the old one no longer; a broken file changes nothing."""
    file = write_tokens(tmp_path)
    tokens = Tokens(file, lambda _: None)
    assert tokens.scope_of(TOKEN) == ("alice", Need.ACT)

    write_tokens(tmp_path, f"# rotated\n\nbob: {TOKEN[::-1]} : read\n")
    assert (tokens.scope_of(TOKEN), tokens.scope_of(TOKEN[::-1])) == (None, ("bob", Need.READ))

    write_tokens(tmp_path, "half a li")
    assert tokens.scope_of(TOKEN[::-1]) == ("bob", Need.READ)


async def test_a_token_file_that_cannot_be_used_any_more_is_reported(tmp_path: Path):
    """Once for each state of the file. Tokens that were read before go on working, unless the file
    is empty or gone: so an operator withdraws them all.
    """
    file = write_tokens(tmp_path)
    async with Site(tmp_path, Service("s"), admin_token_file=str(file)) as site:
        spoil = (
            lambda: file.chmod(0o644),
            lambda: write_tokens(tmp_path, "half a li"),
            lambda: file.write_bytes(b"\xff" * 20),
            lambda: (file.unlink(), os.mkfifo(file, 0o600)),  # nobody writes to it
            lambda: (file.unlink(), file.mkdir(), file.chmod(0o700)),
        )
        for change in spoil:
            change()
            assert (await site.ask("/api/v1/status", **ALICE)).status == 200
            assert (await site.ask("/api/v1/status", **EVE)).status == 401
        file.rmdir()
        for change in (lambda: write_tokens(tmp_path, "# none\n"), file.unlink):
            write_tokens(tmp_path)
            assert (await site.ask("/api/v1/status", **ALICE)).status == 200
            change()
            for _ in range(2):
                assert (await site.ask("/api/v1/status", **ALICE)).status == 401
        write_tokens(tmp_path, f"eve:{TOKEN[::-1]}:act\n")
        assert (await site.ask("/api/v1/status", **ALICE)).status == 401
        assert (await site.ask("/api/v1/status", **EVE)).status == 200

    said = [entry["error"] for entry in site.told("admin.tokens_unusable")]
    words = ("has mode 0644", "line 1 of", "invalid start byte", "is a FIFO", "is a directory")
    words += ("holds no token", "No such file")
    assert [word in error for word, error in zip(words, said, strict=True)] == [True] * 7


async def test_a_stream_of_events_ends_when_its_token_is_withdrawn(site: Site, tmp_path: Path):
    """Its reader gets no further event, and the log says why; the reader with another token
    reads on.
    """
    write_tokens(tmp_path, f"alice:{TOKEN}:act\neve:{TOKEN[::-1]}:act\n")
    (alice, writer), (eve, other) = [await raw(site) for _ in range(2)]
    for sender, headers in ((writer, ALICE), (other, EVE)):
        token = headers["Authorization"]
        ask = f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n"
        sender.write(ask.encode())
    async with asyncio.timeout(PATIENCE_S):
        for reader in (alice, eve):
            await reader.readuntil(b"event: status\n")
        write_tokens(tmp_path, f"eve:{TOKEN[::-1]}:act\n")
        await alice.readuntil(b"\r\n0\r\n\r\n")
        for _ in range(3):
            await eve.readuntil(b"event: status\n")
    for sender in (writer, other):
        sender.close()

    (refused,) = site.told("admin.refused")
    assert (refused["path"], refused["why"]) == ("/api/v1/events", "token")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"alice:{TOKEN}\n", 0o644, "has mode 0644, so others may read the tokens: chmod 600"),
        ("alice:short\n", 0o600, "line 1 of admin_token_file"),
        (f"{TOKEN}\n", 0o600, "is no `name:token:scope`"),
        (f"a:{TOKEN}:metric\n", 0o600, "line 1 ('a') of admin_token_file"),
        (f"a:{TOKEN}:read:act\n", 0o600, "must end with one of the scopes probe, metrics, read, "),
        (f"a:{TOKEN}:\n", 0o600, "write `name:token:scope`"),
        (f"a:{TOKEN}\n", 0o600, "write `name:token:scope`"),
        (f"a:{TOKEN}:act\na:{TOKEN[::-1]}:act\n", 0o600, "names 'a' twice"),
        (f"a:{TOKEN}:act\n\nb: {TOKEN}:act\n", 0o600, "lines 1 ('a') and 3 ('b') of admin_token_"),
        ("# nobody\n", 0o600, "holds no token"),
    ],
)
def test_a_token_file_that_cannot_be_right_is_refused(
    tmp_path: Path, text: str, mode: int, said: str
):
    """The message names file, line and remedy, and no token."""
    file = write_tokens(tmp_path, text)
    file.chmod(mode)

    with pytest.raises(ConfigError) as caught:
        Tokens(file, pytest.fail)

    assert said in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "said"),
    [
        (0, 0, 0o440, ""),
        (0, 0, 0o640, ""),
        (0, 65534, 0o440, "has mode 0440, so others may read the tokens"),
        (0, 0, 0o644, "has mode 0644, so others may read the tokens"),
        (0, 0, 0o660, "has mode 0660, so others may read the tokens"),
        (65534, 0, 0o600, "belongs to uid 65534, who may read the tokens"),
        (65534, 65534, 0o400, "chown 0 "),
    ],
)
def test_a_service_of_root_takes_a_token_file_of_root_and_its_group_alone(
    tmp_path: Path, owner: int, group: int, mode: int, said: str
):
    """Kubernetes mounts a Secret as root's file that root's group may read; the owner of a file may
    always read it.
    """
    file = write_tokens(tmp_path)
    file.chmod(mode)
    os.chown(file, owner, group)

    if said:
        with pytest.raises(ConfigError, match=said):
            Tokens(file, pytest.fail)
    else:
        assert Tokens(file, pytest.fail).scope_of(TOKEN) == ("alice", Need.ACT)


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("group", "mode", "may"), [(0, 0o444, False), (65534, 0o440, True)])
def test_a_service_of_a_user_takes_a_token_file_that_root_gave_to_its_group(
    tmp_path: Path, group: int, mode: int, may: bool
):
    """As in a pod with a user and a `fsGroup`."""
    script = """
import os, sys
from pathlib import Path
from gracekit.admin.access import Tokens
os.chdir(sys.argv[1])  # what is above it is closed to others
os.setgroups([]), os.setgid(65534), os.setuid(65534)
Tokens(Path("tokens"), print)
"""
    file = write_tokens(tmp_path)
    file.chmod(mode)
    os.chown(file, 0, group)
    tmp_path.chmod(0o755)

    command = (sys.executable, "-c", script, str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode == 0) is may, ended.stderr
    assert may or "has mode 0444" in ended.stderr


def test_a_token_file_that_is_not_there_is_refused(tmp_path: Path):
    """The start fails and names the file."""
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        Tokens(tmp_path / "nowhere", pytest.fail)


# -- from where -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/livez", "/api/v1/status", "/api/v1/status/", "/livez/", "/nothing", "/api/v1/quiet"]
)
async def test_a_foreign_host_name_gets_no_answer(site: Site, path: str):
    """A page in a browser may have had its DNS name changed to this address."""
    answer = await site.ask(path, Host="evil.example:9701", **ALICE)

    assert answer.status == 403
    assert "GRACEKIT_ADMIN_HOSTS" in answer.why
    assert site.told("admin.refused")[0]["why"] == "host"


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("10.1.2.3:9701", True),
        ("[fe80::1]:9701", True),
        ("localhost", True),
        ("API.example", True),
        ("api.example:80", True),
        ("example", False),
        ("", False),
        ("[", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example@localhost", False),
        ("localhost/@evil.example", False),
        ("localhost?evil.example", False),
        ("localhost#evil.example", False),
        ("local\thost", False),
        ("localhost:evil", False),
        ("[localhost]", False),
    ],
)
def test_hosts_are_addresses_localhost_and_names_that_were_given(host: str, may: bool):
    """A Host header with an IP address is safe, because DNS rebinding needs a name."""
    access = Access(hosts=["api.example"])

    if may:
        access.admit(Asking(host=host), Need.PROBE)
    else:
        with pytest.raises(RefusedError):
            access.admit(Asking(host=host), Need.PROBE)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://["])
async def test_a_page_of_another_site_cannot_act(site: Site, origin: str):
    """This holds even if the browser would send a token."""
    foreign = {**ALICE, "Origin": origin}
    key = (await site.ask("/api/v1/action-key", **ALICE)).json
    body = {"run_id": key["run_id"], "key": key["key"]}

    assert (await site.ask("/api/v1/action-key", **foreign)).status == 403
    assert (await site.ask("/api/v1/quiet", "POST", body=body, **foreign, **JSON)).status == 403
    assert site.runtime.state is ServiceState.SERVING


# -- once, by POST, for this run --------------------------------------------------------


async def test_nothing_changes_by_get(site: Site):
    """A link, a crawler or a prefetch must not drain a service."""
    for path in ("quiet", "drain", "resume", "tasks/1/cancel"):
        answer = await site.ask(f"/api/v1/{path}", **ALICE)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    refused = [(entry["path"], entry["why"]) for entry in site.told("admin.refused")]
    verbs = ("quiet", "drain", "resume", "tasks/{task_id}/cancel")
    assert refused == [(f"/api/v1/{verb}", "method") for verb in verbs]

    assert site.runtime.state is ServiceState.SERVING


async def test_an_action_that_is_sent_again_changes_nothing(site: Site):
    """Its key was used: a recorded request does nothing, in this run or in another."""
    key = (await site.ask("/api/v1/action-key", **ALICE)).json
    body = {"run_id": key["run_id"], "key": key["key"]}
    first = await site.ask("/api/v1/quiet", "POST", body=body, **ALICE, **JSON)
    await site.act("/api/v1/resume")

    again = await site.ask("/api/v1/quiet", "POST", body=body, **ALICE, **JSON)

    assert (first.status, again.status) == (200, 403)
    assert "works once" in again.why
    assert site.runtime.state is ServiceState.SERVING
    assert [what for what, _ in await incidents(site)] == ["operator_quiet", "operator_resume"]


def test_a_key_works_for_a_minute_and_in_the_run_that_made_it():
    """A forged, a foreign and an expired key are refused, with what to do."""
    clock = [100.0]
    keys, others = ActionKeys(lambda: clock[0]), ActionKeys(lambda: clock[0])
    late, foreign = keys.issue(), others.issue()
    keys.use(keys.issue())
    clock[0] = 160.0

    unknown = [(key, "did not issue") for key in (foreign, "", "x.\ud800", "\ud800.x")]
    for key, said in [(late, "older than 60 s"), *unknown]:
        with pytest.raises(RefusedError, match=said):
            keys.use(key)
    with pytest.raises(RefusedError, match="did not issue"):
        keys.use(late.replace("160", "999", 1))


async def test_an_action_for_another_run_is_refused(site: Site):
    """An action for the run before must not hit its successor."""
    key = (await site.ask("/api/v1/action-key", **ALICE)).json["key"]

    body = {"run_id": "f" * 32, "key": key}
    answer = await site.ask("/api/v1/drain", "POST", body=body, **ALICE, **JSON)

    assert (answer.status, answer.json["error"]["class"]) == (409, "RunEndedError")
    assert site.runtime.state is ServiceState.SERVING


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"run_id": "x"}, 400, "field 'key' is missing"),
        ({"run_id": "x", "key": "y", "resaon": "z"}, 400, "did you mean reason"),
        ({"run_id": "x", "key": 3}, 400, "field 'key' must be a text"),
        ({"run_id": "x", "key": "y", "reason": "\ud800"}, 400, "reason has a lone surrogate"),
        ({"run_id": "\udfff", "key": "y"}, 400, "run_id has a lone surrogate"),
        ({"\ud800": "x"}, 400, "no field '\\ud800'"),
        ([], 400, "must be a JSON object"),
        (b"{", 400, "is no JSON"),
        (b'{"run_id": NaN}', 400, "NaN is not JSON"),
        (b"[" * 9000, 400, "is no JSON"),
        (b'"' + b"x" * 20_000 + b'"', 413, "longer than 16,384 bytes"),
    ],
)
async def test_a_body_that_is_no_action_is_refused(
    site: Site, body: object, status: int, said: str
):
    """The answer says what is wrong, and nothing is done."""
    answer = await site.ask("/api/v1/quiet", "POST", body=body, **ALICE, **JSON)

    assert (answer.status, said in answer.why) == (status, True), answer.body


async def test_a_form_is_no_action(site: Site):
    """A browser sends a form to any site without asking (CORS), but never JSON."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    answer = await site.ask("/api/v1/quiet", "POST", body=b"reason=x", **ALICE, **form)

    assert answer.status == 415
    assert site.runtime.state is ServiceState.SERVING


async def test_an_endpoint_that_only_shows_has_no_actions(tmp_path: Path):
    """Its OpenAPI description has none either."""
    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, Service("s"), admin_token_file=tokens, admin_read_only=True) as site:
        assert (await site.ask("/api/v1/status", **ALICE)).status == 200
        assert (await site.ask("/api/v1/action-key", **ALICE)).status == 403
        for path in ("quiet", "tasks/x/cancel", "tasks/x/retry"):
            answer = await site.ask(f"/api/v1/{path}", "POST", body={}, **ALICE, **JSON)
            assert answer.status == 404
        paths = (await site.ask("/api/v1/openapi.json", **ALICE)).json["paths"]

    assert {method for path in paths.values() for method in path} == {"get"}


# -- without tokens ---------------------------------------------------------------------


async def test_on_loopback_without_tokens_one_may_look_and_not_act(tmp_path: Path):
    """An action needs a name for the record."""
    async with Site(tmp_path, Service("s")) as site:
        assert (await site.ask("/api/v1/tasks")).status == 200
        answer = await site.ask("/api/v1/action-key")

    assert answer.status == 403
    assert "GRACEKIT_ADMIN_TOKEN_FILE" in answer.why


async def test_a_task_shows_the_message_of_its_failure_and_not_its_arguments(tmp_path: Path):
    """The message is shown as it was raised, so it may repeat an argument, as docs/security.md
    says.
    """
    svc = Service("s")

    @svc.rpc
    async def work(ctx: Context, disk: str, size: str) -> None:
        raise LookupError(f"no disk {disk}")

    async with Site(tmp_path, svc) as site:
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            task_id = await client.cast("work", disk="disk-of-bob", size="size-of-bob")
        async with asyncio.timeout(PATIENCE_S):
            while not site.told("task.failed"):
                await asyncio.sleep(0.02)
        shown = await site.ask(f"/api/v1/tasks/{task_id}")

    assert shown.json["task"]["state"] == "failed"
    assert b"no disk disk-of-bob" in shown.body
    assert b"size-of-bob" not in shown.body


async def test_by_a_socket_of_the_file_system_its_user_is_known(tmp_path: Path):
    """Other users cannot open the socket, so it needs no token."""
    path = tmp_path / "admin.sock"
    async with Site(tmp_path, Service("s"), admin=f"unix:{path}") as site:
        mode = stat.S_IMODE(path.stat().st_mode)
        answer = await site.act("/api/v1/quiet", {}, reason="by socket")
        noted = await incidents(site)

    assert (mode, answer.status) == (0o600, 200)
    assert noted == [("operator_quiet", f"uid {os.geteuid()}: by socket")]
    assert not path.exists()


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_by_a_socket_another_user_gets_probes_alone(tmp_path: Path):
    """Also where somebody has opened the modes of the files: the kernel says who asks."""
    script = """
import os, socket, sys
os.chdir(sys.argv[1])  # what is above it is closed to others
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for path in ("/livez", "/api/v1/status", "/api/v1/action-key"):
    asker = socket.socket(socket.AF_UNIX)
    asker.connect("admin.sock")
    asker.sendall(f"GET {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode())
    print(asker.makefile().read().replace("\\n", " "))
"""
    place = tmp_path / "open"
    place.mkdir()
    async with Site(place, Service("s"), admin=f"unix:{place}/admin.sock") as site:
        (place / "admin.sock").chmod(0o666)
        place.chmod(0o755)
        command = (sys.executable, "-c", script, str(place))
        asker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(asker.communicate(), 30)
        place.chmod(0o700)
        refused = site.told("admin.refused")

    probed, *others = said.decode().splitlines()
    assert probed.startswith("HTTP/1.1 200")
    for other in others:
        assert other.startswith("HTTP/1.1 403")
        assert "uid 65534 may not ask this run" in other
    assert [one["why"] for one in refused] == ["uid", "uid"]


# -- orders about tasks -----------------------------------------------------------------


async def test_a_task_is_shown_and_cancelled_by_its_id(tmp_path: Path):
    """The beginning of the id is enough where no other id begins so. The order needs a reason,
    because the caller gets it.
    """
    svc, begun = Service("s"), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context, vm: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, svc, admin_token_file=tokens) as site:
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            task_id = await client.cast("work", vm="vm-1")
        await begun.wait()

        listed = (await site.ask("/api/v1/tasks", **ALICE)).json["tasks"]
        shown = (await site.ask(f"/api/v1/tasks/{task_id}", **ALICE)).json
        unexplained = await site.act(f"/api/v1/tasks/{task_id}/cancel")
        unknown = await site.act("/api/v1/tasks/nobody/cancel", reason="x")
        done = await site.act(f"/api/v1/tasks/{task_id[:7]}/cancel", reason="wrong vm")
        while site.runtime.readings().in_flight:
            await asyncio.sleep(0.01)
        after = (await site.ask(f"/api/v1/tasks/{task_id}", **ALICE)).json
        again = [
            await site.act(f"/api/v1/tasks/{word}/cancel", reason="twice")
            for word in (task_id, task_id[:7])
        ]

    for late in again:
        assert (late.status, "has ended and cannot be cancelled" in late.why) == (409, True)
    assert [(task["request_id"], task["live"]) for task in listed] == [(task_id, True)]
    assert shown["live"]["state"] == "running"
    assert (unexplained.status, "needs a reason" in unexplained.why) == (400, True)
    assert (unknown.status, "no task nobody is on record" in unknown.why) == (404, True)
    assert done.status == 200
    assert after["task"]["state"] == "cancelled"
    assert any("token alice" in entry["detail"] for entry in after["incidents"])


@pytest.mark.parametrize("task_id", ["nova/vm-1", "/", "a\nb/", "1/cancel", "50%2F"])
async def test_a_task_is_reached_whatever_its_id_is(tmp_path: Path, task_id: str):
    """Ids are chosen by callers, and servers decode `%2F` before a route is looked for."""
    svc, begun = Service("s"), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        await asyncio.Event().wait()

    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, svc, admin_token_file=tokens) as site:
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            await client.prepare(request_id=task_id).cast("work")
        await begun.wait()
        path = f"/api/v1/tasks/{quote(task_id, safe='')}"
        shown = await site.ask(path, **ALICE)
        done = await site.act(f"{path}/cancel", reason="wrong vm")
        written = await site.ask("/api/v1/tasks?state=cancelled&state=running", **ALICE)

    if not task_id.endswith("/cancel"):  # only an action is asked for by this path
        assert (shown.status, shown.json["task"]["request_id"]) == (200, task_id)
    assert (done.status, done.json["task_id"]) == (200, task_id)
    assert [task["request_id"] for task in written.json["tasks"]] == [task_id]


@pytest.mark.parametrize("path", ["/api/v1/tasks/", "/api/v1/tasks/x/"])
async def test_a_path_without_an_id_shows_no_task(site: Site, path: str):
    """Neither as a beginning that all ids have, nor as the list."""
    assert (await site.ask(path, **ALICE)).status == 404


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("limit=0", "limit = 0 must be from 1 to 1000"),
        ("limit=many", "limit must be a whole number"),
        ("limit=1&limit=2", "comes 2 times"),
        ("state=runing", "state must be one of"),
        ("limt=1", "did you mean limit"),
    ],
)
async def test_a_query_that_means_nothing_is_refused(site: Site, query: str, said: str):
    """If it were ignored, other tasks would be shown than those that were asked for."""
    answer = await site.ask(f"/api/v1/tasks?{query}", **ALICE)

    assert (answer.status, said in answer.why) == (400, True), answer.body


async def test_every_described_path_is_answered(site: Site):
    """The description and the routes come from one table."""
    document: dict[str, Any] = (await site.ask("/api/v1/openapi.json", **ALICE)).json

    for path, methods in document["paths"].items():
        for method in methods:
            if path != "/api/v1/events":
                where = path.replace("{task_id}", "nobody")
                answer = await site.ask(where, method.upper(), body={}, **ALICE, **JSON)
                assert answer.status in {200, 400, 404}, (method, path, answer.body)
                assert str(answer.status) in methods[method]["responses"], (method, path)


# -- TLS --------------------------------------------------------------------------------


async def test_with_a_certificate_only_tls_is_spoken(tmp_path: Path, certificates: Certificates):
    """Clients that trust its authority get an answer; others, and plain HTTP, do not."""
    pair = f"{certificates.good.certificate},{certificates.good.key}"
    trusting = ssl.create_default_context(cafile=str(certificates.ca))

    def get(context: ssl.SSLContext) -> int:
        host, _, port = site.address.rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            return connection.getresponse().status

    async with Site(tmp_path, Service("s"), admin_tls=pair) as site:
        assert await asyncio.to_thread(get, trusting) == 200
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(get, ssl.create_default_context())
        with pytest.raises((OSError, http.client.HTTPException)):
            await site.ask("/readyz")


async def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, certificates: Certificates
):
    """While one file alone is new, or one is missing, the old certificate stays in use."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"

    def write(one: Tls) -> None:
        for file, source in zip(files, (one.certificate, one.key), strict=True):
            shutil.copyfile(source, file)

    def shown() -> str:
        host, _, port = site.address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), timeout=20)

    async def told(event: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(site.told(event)) < times:
                await asyncio.sleep(0.05)

    write(certificates.good)
    pair = ",".join(map(str, files))
    async with Site(tmp_path, Service("s"), admin_tls=pair) as site:
        before = await asyncio.to_thread(shown)
        shutil.copyfile(certificates.wrong_host.certificate, files[0])
        await told("admin.certificate_unusable")
        half = await asyncio.to_thread(shown)
        write(certificates.wrong_host)
        await told("admin.certificate_renewed")
        after = await asyncio.to_thread(shown)
        files[1].unlink()
        await told("admin.certificate_unusable", 2)
        without = await asyncio.to_thread(shown)

    assert [before, half, after, without] == [
        *[certificates.good.certificate.read_text()] * 2,
        *[certificates.wrong_host.certificate.read_text()] * 2,
    ]
    assert "stays in use" in site.told("admin.certificate_unusable")[0]["error"]


async def test_tokens_without_tls_beyond_this_host_are_warned_of(tmp_path: Path):
    """Tokens would cross the network unencrypted; behind a proxy with TLS that may be intended."""
    tokens = str(write_tokens(tmp_path))
    async with Site(tmp_path, Service("s"), admin="0.0.0.0:0", admin_token_file=tokens) as site:
        (doubt,) = site.told("service.doubted")

    assert "set GRACEKIT_ADMIN_TLS=cert.pem,key.pem" in doubt["text"]


async def test_tasks_of_a_sibling_are_shown_as_the_record_has_them(tmp_path: Path):
    """An endpoint asks no other run, and says which ones it has not asked."""
    tokens = str(write_tokens(tmp_path))
    settings = {"admin_token_file": tokens}
    async with (
        Site(tmp_path, Service("s"), instance="a", **settings) as asked,
        Site(tmp_path, Service("s"), instance="b", **settings),
    ):
        listed = (await asked.ask("/api/v1/tasks", **ALICE)).json

    assert listed["not_heard"] == {
        "s@b": "not asked: its own endpoint or `gracekit status` answers"
    }
