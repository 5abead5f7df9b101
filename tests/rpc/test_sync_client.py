"""A client for code that is not async: calls of threads, forks, and the end of Python."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from gracekit import (
    CallTimeoutError,
    ConfigError,
    Context,
    RpcError,
    Runtime,
    Service,
    Settings,
    SyncClient,
    TaskCancelledError,
)
from gracekit.errors import DependencyError
from tests.docs.pages import environment, running
from tests.scale import scale

PATIENCE_S = 100.0  # for what must happen; never waited for in full


class Refused(Exception):  # noqa: N818 - an application may name its exceptions so
    """What a handler raises."""


class Site:
    """A service that runs, in a thread of its own, and the blocking client of the tests.

    Attributes:
        begun: Set when `hang` runs.
        heard: By fanouts.
    """

    def __init__(self, directory: Path) -> None:
        self.url = f"sqlite:///{directory / 'queues.db'}"
        self.svc = svc = Service(
            "inside", exceptions={f"{__name__}.Refused": Refused}, task_api="callers"
        )
        self.client = client = svc.sync_client(self.url)
        self.begun = begun = threading.Event()
        self.heard = heard = threading.Event()

        @svc.rpc(on_interrupt="requeue")
        async def double(ctx: Context, n: int) -> int:
            if n < 0:
                raise Refused(n)
            return 2 * n

        @svc.rpc(on_interrupt="retry")
        def relay(ctx: Context, n: int) -> int:
            return client.call(double, n=n)

        @svc.rpc(on_interrupt="requeue")
        async def trace_of(ctx: Context) -> str:
            return f"{trace.get_current_span().get_span_context().trace_id:032x}"

        @svc.rpc(on_interrupt="retry", allow_cancel="anyone")
        async def hang(ctx: Context) -> None:
            begun.set()
            await asyncio.Event().wait()

        @svc.rpc(on_interrupt="requeue")
        async def hear(ctx: Context) -> None:
            heard.set()

        self.double, self.relay, self.trace_of = double, relay, trace_of
        self.hang, self.hear = hang, hear


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """One whose service serves until the end of the test."""
    site = Site(tmp_path)
    settings = Settings(
        transport_url=site.url,
        store_url=f"sqlite:///{tmp_path / 'store.db'}",
        drain_timeout_s=0.1,
        handover_grace_s=0.1,
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Runtime(site.svc, settings)),
    ):
        yield site
        site.client.stop()


# -- the verbs --------------------------------------------------------------------------------


def test_a_thread_without_an_event_loop_calls_casts_and_fans_out(site: Site):
    """The first request connects."""
    assert site.client.call(site.double, n=21) == 42
    assert site.client.call("double", n=4) == 8
    assert len(site.client.cast(site.double, n=4)) == 32
    site.client.fanout(site.hear)
    assert site.heard.wait(PATIENCE_S)


def test_each_thread_gets_the_answer_to_its_own_call(site: Site):
    """One client may be used in many threads at a time, the first calls too."""
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: site.client.call(site.double, n=n), range(200)))

    assert found == [2 * n for n in range(200)]


def test_what_became_of_a_request_is_asked_for_later(site: Site):
    """State, result and cancel are those of the async client."""
    done, hangs = site.client.cast(site.relay, n=3), site.client.cast(site.hang)

    assert site.client.result(done, wait=PATIENCE_S) == 6
    assert site.begun.wait(PATIENCE_S)
    site.client.cancel(hangs, reason="not wanted")
    found = site.client.results([done, hangs], wait=PATIENCE_S)
    assert (found[done], type(found[hangs])) == (6, TaskCancelledError)
    states = site.client.states([done, hangs])
    assert [states[one].state for one in (done, hangs)] == ["succeeded", "cancelled"]
    assert site.client.state(done) == states[done]


def test_a_view_has_the_options_and_the_client_does_not(site: Site):
    """`prepare` returns a new view, which checks its options as the async one does."""
    view = site.client.prepare(version_cap="1.3", request_id="one")

    assert (view.can_send_version("1.4"), site.client.can_send_version("1.4")) == (False, True)
    assert view.prepare(timeout=9).cast(site.double, n=1) == "one"
    with pytest.raises(TypeError, match=r"did you mean|has no option 'timeuot'"):
        site.client.prepare(timeuot=3)  # type: ignore[call-arg]


def test_an_error_of_the_handler_is_raised_as_the_service_declares(site: Site):
    """With the exceptions of the service, as by its async client."""
    with pytest.raises(Refused, match="-1"):
        site.client.call(site.double, n=-1)


def test_a_plain_handler_may_call(site: Site):
    """It runs in a worker thread, which has no event loop."""
    assert site.client.call(site.relay, n=3) == 6


def test_the_handler_runs_in_the_trace_of_the_calling_thread(site: Site):
    """Context variables of the thread reach the request, and a later one has none of them."""
    span = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(span)):
        assert site.client.call(site.trace_of) == f"{0xABC:032x}"

    assert site.client.call(site.trace_of) == f"{0:032x}"


async def test_a_thread_whose_event_loop_it_would_block_is_refused(site: Site):
    """Every verb, and also starts and stops; nothing was sent or stopped."""
    await asyncio.to_thread(site.client.start)
    for verb in (
        lambda: site.client.call(site.double, n=1),
        lambda: site.client.cast(site.double, n=1),
        lambda: site.client.fanout(site.hear),
        site.client.start,
        site.client.stop,
    ):
        with pytest.raises(ConfigError, match="use the async client here"):
            verb()
    assert await asyncio.to_thread(site.client.call, site.double, n=1) == 2


# -- its times --------------------------------------------------------------------------------


def test_a_call_waits_as_long_as_was_prepared(site: Site):
    """As the async client does, with the same error."""
    with pytest.raises(CallTimeoutError, match=r"no reply to hang\(\)"):
        site.client.prepare(timeout=0.2).call(site.hang)


def test_the_timeout_of_a_call_includes_the_time_to_connect():
    """Here a broker that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SyncClient(f"amqp://127.0.0.1:{silent.getsockname()[1]}/", "inside")
        with pytest.raises(CallTimeoutError, match="nothing was sent: not connected within"):
            client.prepare(timeout=0.2).call("double", n=1)
        client.stop()


def test_a_client_that_could_not_connect_tries_again_at_the_next_call(site: Site, tmp_path: Path):
    """A queue file whose directory is made later."""
    client = site.svc.sync_client(f"sqlite:///{tmp_path / 'later' / 'queues.db'}")
    for _ in range(2):
        with pytest.raises(ConfigError, match="later"):
            client.cast(site.double, n=1)
    (tmp_path / "later").symlink_to(tmp_path)

    assert client.call(site.double, n=1) == 2
    client.stop()


# -- its life ---------------------------------------------------------------------------------


def test_what_is_not_valid_is_refused_when_the_client_is_made():
    """Not at the first request, which is too late."""
    with pytest.raises(ConfigError, match="its scheme is none of"):
        SyncClient("kafka://here", "inside")
    with pytest.raises(ConfigError, match="not a subclass of Exception"):
        SyncClient("sqlite:///queues.db", "inside", exceptions={"a.B": int})  # type: ignore[dict-item]


def test_a_stop_ends_the_calls_that_wait(site: Site):
    """With the id of the request, which may run; later calls are refused, until a start."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(site.client.call, site.hang)
        assert site.begun.wait(PATIENCE_S)
        site.client.stop()
        error = waiting.exception(PATIENCE_S)

    assert type(error) is RpcError
    assert error.request_id
    with pytest.raises(DependencyError, match="this client is stopped"):
        site.client.call(site.double, n=1)
    site.client.stop()
    with site.client as client:
        assert client.call(site.double, n=1) == 2


def test_a_relative_file_is_that_of_the_directory_in_which_the_client_was_made(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server may change the directory before the first request."""
    monkeypatch.chdir(tmp_path)
    client = site.svc.sync_client("sqlite:///queues.db")
    monkeypatch.chdir("/")

    assert client.call(site.double, n=1) == 2
    client.stop()


def objects() -> Counter[str]:
    """What calls could leave behind: of this process, by kind."""
    gc.collect()
    kinds = (asyncio.Future, asyncio.Task, asyncio.Handle, asyncio.TimerHandle)
    found = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))
    found["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    found["threads"] = threading.active_count()
    return found


def test_calls_leave_nothing_behind(site: Site):
    """Neither tasks nor futures, timers, threads or descriptors; nor a call that has failed."""

    def use(number: int) -> None:
        for n in range(number):
            site.client.call(site.double, n=n)
        for _ in range(number // 20):
            with pytest.raises(Refused):
                site.client.call(site.double, n=-1)

    use(40)
    before = objects()
    use(scale(200, 10_000))

    assert all(n <= before[kind] + 5 for kind, n in objects().items()), (before, objects())


# -- processes of their own -------------------------------------------------------------------

INSIDE = """
import asyncio, os
from pathlib import Path
from gracekit import Context, Service

svc = Service("inside")

@svc.rpc(on_interrupt="requeue")
async def double(ctx: Context, n: int) -> int:
    return 2 * n

@svc.rpc(on_interrupt="retry")
async def wait_for(ctx: Context, name: str) -> str:
    Path(f"{name}-waits").touch()
    while not Path(name).exists():
        await asyncio.sleep(0.02)
    return name

client = svc.sync_client(os.environ.get("GRACEKIT_TRANSPORT_URL", "sqlite:///gracekit.db"))
"""

BEGIN = """
import os, re, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from inside import client, double, wait_for

def wait_file(name):
    while not Path(name).exists():
        time.sleep(0.01)

def told(fd):
    assert os.read(fd, 1) == b"1"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the service of the module `inside` and its callers run."""
    (tmp_path / "inside.py").write_text(INSIDE)
    return tmp_path


def ends_with(directory: Path, program: str, **env: str) -> list[str]:
    """Run *program* beside its service; its lines. It must end by itself, without a complaint."""
    (directory / "program.py").write_text(BEGIN + program)
    with running(directory, "-m", "gracekit", "run", "inside:svc", **env) as service:
        service.wait_text("service.serving")
        done = subprocess.run(
            (sys.executable, "-X", "dev", "program.py"),
            cwd=directory,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.process
def test_a_call_that_waits_during_a_fork_is_answered_and_the_child_calls_too(directory: Path):
    """The child has a thread and a connection of its own, and closes what is its parent's."""
    program = """
with ThreadPoolExecutor() as pool:
    waiting = pool.submit(client.call, wait_for, name="first")
    wait_file("first-waits")
    before, (heard, say) = set(Path("gracekit.db-wakeups").glob("*.wakeup")), os.pipe()
    child = os.fork()
    if child == 0:
        mine = [link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.exists()]
        print([one for one in mine if re.search(r"wakeup|\\.db($|-wal|-shm)|lock", one)])
        print(client.call(double, n=2), client.call(wait_for, name="inside.py"), flush=True)
        os.write(say, b"1")
        sys.exit()  # with all that Python does at its end
    os.close(say)
    told(heard)
    print(os.waitpid(child, 0)[1], client.call(double, n=1), flush=True)
    Path("first").touch()
    print(waiting.result())
    print(before == set(Path("gracekit.db-wakeups").glob("*.wakeup")))
"""
    # The service has one pipe, and the parent one; the child has removed its own at its end.
    assert ends_with(directory, program) == ["[]", "4 inside.py", "0 2", "first", "True"]


@pytest.mark.process
def test_over_a_broker_parent_and_child_have_connections_of_their_own(
    directory: Path, rabbit_url: str
):
    """The call that waited during the fork is answered after the child has ended, with all that
    Python does at its end.
    """
    program = """
with ThreadPoolExecutor() as pool:
    waiting = pool.submit(client.call, wait_for, name="first")
    wait_file("first-waits")
    child = os.fork()
    if child == 0:
        print(client.call(double, n=2), flush=True)
        sys.exit()
    print(os.waitpid(child, 0)[1], client.call(double, n=1), flush=True)
    Path("first").touch()
    print(waiting.result())
"""
    found = ends_with(directory, program, GRACEKIT_TRANSPORT_URL=rabbit_url)

    assert found == ["4", "0 2", "first"]


@pytest.mark.process
def test_children_of_a_process_that_calls_all_the_time_can_call(directory: Path):
    """Whatever its threads are doing at the fork: each child ends, and no call fails."""
    program = f"""
ends, calls = threading.Event(), []

def call():
    while not ends.is_set():
        calls.append(client.call(double, n=len(calls)))

with ThreadPoolExecutor() as pool:
    callers = [pool.submit(call) for _ in range(3)]
    for _ in range({scale(15, 300)}):
        child = os.fork()
        if child == 0:
            os._exit(client.call(double, n=21))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    ends.set()
    [one.result() for one in callers]
print(len(calls) > 0)
"""
    assert ends_with(directory, program) == ["True"]


@pytest.mark.process
def test_a_child_outlives_its_parent_and_a_restart_of_the_service(directory: Path):
    """Its connection is its own: others neither see it end with the parent, nor remove its log."""
    (directory / "program.py").write_text(f"""{BEGIN}
print(client.call(double, n=1))
if os.fork() == 0:
    print(client.call(double, n=2))
    wait_file("restarted")
    print(client.call(double, n=3), flush=True)
    Path("called").touch()
    os._exit(0)
client.stop()
""")
    with running(directory, "-m", "gracekit", "run", "inside:svc") as service:
        service.wait_text("service.serving")
        with running(directory, "program.py") as parent:
            assert parent.process.wait(PATIENCE_S) == 0
            service.stop(signal.SIGTERM)
            with running(directory, "-m", "gracekit", "run", "inside:svc") as second:
                second.wait_text("service.serving")
                (directory / "restarted").touch()
                second.wait_for((directory / "called").exists)


@pytest.mark.process
def test_python_ends_although_nobody_stops_the_client(directory: Path):
    """Threads that wait for an answer are told, and so Python need not wait for them."""
    program = """
import atexit

def wait(name):
    try:
        client.prepare(timeout="1h").call(wait_for, name=name)
    except BaseException as error:
        print(type(error).__name__, len(error.request_id), flush=True)

threading.Thread(target=wait, args=["one"]).start()
ThreadPoolExecutor().submit(wait, "two")
wait_file("one-waits")
wait_file("two-waits")
atexit.register(client.stop)
"""
    assert ends_with(directory, program) == ["RpcError 32"] * 2


@pytest.mark.process
def test_a_call_that_still_connects_when_python_ends_was_not_sent(directory: Path):
    """And its error says so. Here a broker that takes connections and never says a word."""
    program = """
import socket
from gracekit import SyncClient

silent = socket.create_server(("127.0.0.1", 0))
mute = SyncClient(f"amqp://127.0.0.1:{silent.getsockname()[1]}/", "inside")

def call():
    try:
        mute.call("double", n=1)
    except BaseException as error:
        print(repr(error), flush=True)

threading.Thread(target=call).start()
silent.accept()[0].detach()
silent.detach()
"""
    [told] = ends_with(directory, program)
    assert told.startswith("DependencyError('nothing was sent: ")


@pytest.mark.process
def test_ctrl_c_ends_a_call_at_once_and_forgets_it(directory: Path):
    """The client goes on, and nothing of the call is left."""
    program = """
from gracekit.rpc.callers.sync_client import _Loop

def interrupt():
    wait_file("never-waits")
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    client.prepare(timeout="1h").call(wait_for, name="never")
except KeyboardInterrupt:
    print("interrupted")
print(client.call(double, n=1))
(rpc,) = _Loop.here.clients
print(len(rpc._replies._waiting), rpc._replies.ignored)
"""
    assert ends_with(directory, program) == ["interrupted", "2", "0 0"]


@pytest.mark.process
def test_a_call_after_the_end_of_the_main_thread_is_refused(directory: Path):
    """What is closed does not begin again."""
    program = """
def late():
    threading.main_thread().join()
    while _Loop.here is not None:
        time.sleep(0.01)
    try:
        client.call(double, n=1)
    except DependencyError as error:
        print(error)

from gracekit.errors import DependencyError
from gracekit.rpc.callers.sync_client import _Loop
print(client.call(double, n=1))
threading.Thread(target=late).start()
"""
    assert ends_with(directory, program) == ["2", "nothing is sent any more: Python is ending"]
