"""One cell of the crash matrix: a directory, a service in it that is killed, and its caller.

The caller lives in the test's process and outlives every kill. It sends to
queues that exist from the beginning, so it may send while nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from gracekit.errors import GracekitError
from gracekit.process import FAILPOINT_VARIABLE, FAILPOINTS_ON
from gracekit.rpc.callers.task_lookups import TaskInfo
from gracekit.rpc.client import RpcClient
from gracekit.rpc.transport import Message, directed_queue, shared_queue
from tests.crash.queues import PATIENCE_S, Queues, until
from tests.crash.service import TOPIC, effects
from tests.crash.stores import FileStore, Store
from tests.process.doors import ask_by_door
from tests.process.volumes import RECORDS, VolumeRecords

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICE: Final = Path(__file__).with_name("service.py")
CALLER: Final = Path(__file__).with_name("caller.py")
SIGKILLED: Final = -signal.SIGKILL

SETTINGS: Final = {
    "HOST": "node",
    "STARTUP_RECONCILIATION_WAIT_SECONDS": "50ms",
    "RECONCILE_EVERY": "200ms",
    "DRAIN_TIMEOUT": "20s",
    "OPS_QUIET_TIMEOUT": "100ms",
    "USE_PENDING_STATE": "true",
    "MAX_ATTEMPTS": "9",  # how often a killer is run again is another test's affair
}


class Cell:
    """See the module.

    Args:
        directory: Of the store and the effects.
        queues: Through which its messages go.
        store: A file in there, if None.

    Attributes:
        sent: Request ids whose publish was confirmed, and the method of each.
        calls: Those whose caller waits for an answer, by id and a number.
        cancels: What callers have asked to cancel; each may be answered or not.
        child: The service, or None.
    """

    def __init__(self, directory: Path, queues: Queues, store: Store | None = None) -> None:
        self.directory = directory
        self.queues = queues
        self.transport = queues.transport
        self.client = RpcClient(self.transport, TOPIC)
        self.sent: dict[str, tuple[str, dict[str, Any]]] = {}
        self.calls: list[tuple[str, asyncio.Task[Any]]] = []
        self.cancels: list[tuple[str, asyncio.Task[TaskInfo]]] = []
        self.garbage: list[bytes] = []
        self.child: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._store = store or FileStore(directory)
        self._records = VolumeRecords(directory / RECORDS)

    # -- the service --------------------------------------------------------------

    async def start(self, failpoint: str = "", **settings: str) -> None:
        """Start the service, to be killed at *failpoint*."""
        await self._spawn(SERVICE, failpoint, settings)

    async def start_caller(self, failpoint: str, method: str, request_id: str) -> None:
        """Let a process of its own cast a request, to be killed at *failpoint*."""
        await self._spawn(CALLER, failpoint, {}, method, request_id)

    async def _spawn(
        self, script: Path, failpoint: str, settings: dict[str, str], *arguments: str
    ) -> None:
        self._starts += 1
        given = {**SETTINGS, **self._store.settings, **settings}
        with (self.directory / f"log-{self._starts}").open("wb") as log:
            self.child = await asyncio.create_subprocess_exec(
                sys.executable,
                script,
                *arguments,
                cwd=self.directory,
                env={
                    "PYTHONPATH": str(ROOT),
                    FAILPOINT_VARIABLE: failpoint,
                    **FAILPOINTS_ON,
                    "GRACEKIT_TRANSPORT_URL": self.queues.url,
                    **{f"GRACEKIT_{name}": value for name, value in given.items()},
                },
                stdout=log,
                stderr=log,
            )

    async def ended(self) -> int:
        """Wait for the end of the service; its return code."""
        assert self.child is not None
        async with asyncio.timeout(PATIENCE_S):
            return await self.child.wait()

    def terminate(self) -> None:
        """Ask the service to drain."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the service wherever it is."""
        assert self.child is not None
        self.child.kill()

    def open_gate(self) -> None:
        """From now on nothing waits."""
        (self.directory / "gate").touch()

    @property
    def logs(self) -> str:
        """What the services said."""
        paths = sorted(self.directory.glob("log-*"))
        return "\n".join(f"-- {path.name}\n{path.read_text()}" for path in paths)

    # -- the caller ---------------------------------------------------------------

    async def open(self) -> None:
        """Let the queues exist."""
        await self.transport.start()
        names = (TOPIC, f"{TOPIC}-ops")
        await self.transport.declare(
            [
                *(shared_queue(name) for name in names),
                *(directed_queue(name, "node") for name in names),
            ]
        )

    async def close(self) -> None:
        """Whatever happened: nothing of the cell goes on."""
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            await self.child.wait()
        asked = [call for _, call in (*self.calls, *self.cancels)]
        for call in asked:
            call.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self.client.stop()
        await self.transport.stop()
        self.queues.close()
        self._store.close()

    async def cast(self, method: str, *, delay: str | None = None, **args: Any) -> str:
        """Send a request that nobody waits for; its id."""
        request_id = await self.client.prepare(delay=delay).cast(method, **args)
        self.sent[request_id] = (method, args)
        return request_id

    async def call(self, method: str, request_id: str | None = None, **args: Any) -> str:
        """Send a call and go on as soon as it was confirmed; its id."""
        request_id = request_id or os.urandom(16).hex()
        before = self.transport.confirmed
        view = self.client.prepare(request_id=request_id, timeout=PATIENCE_S)
        task = asyncio.create_task(view.call(method, **args))
        self.calls.append((request_id, task))
        await self.until(lambda: self.transport.confirmed > before)
        self.sent[request_id] = (method, args)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ask once to cancel a request, and go on."""
        self.cancels.append((request_id, asyncio.create_task(self.client.cancel(request_id))))

    async def send_garbage(self) -> None:
        """Send what is no request."""
        body = b"no request " + os.urandom(8).hex().encode()
        await self.transport.publish(shared_queue(TOPIC), Message(body=body))
        self.garbage.append(body)

    def add_volumes(self, status: str, *names: str) -> None:
        """Write records in a transient status; from the next start on there are rules for them."""
        self._records.make()
        self._records.add(names, status)

    async def control(self, verb: str) -> Any:
        """Ask the living run for a control verb."""
        await self.until(lambda: bool(self.rows("SELECT 1 FROM run WHERE phase <> 'starting'")))
        ((run_id,),) = self.rows("SELECT run_id FROM run ORDER BY started_at DESC LIMIT 1")
        try:
            return await ask_by_door(self.directory / "store.db", run_id, verb)
        except ConnectionError:  # it was killed meanwhile, which ends this wait
            await asyncio.sleep(PATIENCE_S)
            raise

    async def retry_parked(self) -> None:
        """Order as a resolver would; what the order meets is seen in the record."""
        sql = "SELECT request_id, parkings FROM task WHERE state = 'pending'"
        view = self.client.prepare(
            ops=True, namespace="gracekit.tasks", version="1.1", timeout=PATIENCE_S
        )
        for request_id, version in self.rows(sql):
            with contextlib.suppress(GracekitError):
                await view.call("retry", task_id=request_id, version=version)

    # -- looking ------------------------------------------------------------------

    def effects(self, what: str | None = None) -> list[dict[str, Any]]:
        """What handlers and hooks did, in order."""
        found = effects(self.directory / "effects")
        return [one for one in found if what is None or one["what"] == what]

    def volumes(self) -> dict[str, str]:
        """The status of each record of the application."""
        return self._records.by_name() if (self.directory / RECORDS).exists() else {}

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Ask the journal; nothing if there is no such table yet."""
        return self._store.rows(sql, *params)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what must happen in another process, which cannot ring here."""
        await until(condition)

    async def until_told(self, what: str, number: int = 1) -> None:
        """Wait for the *number*-th effect of that kind."""
        await self.until(lambda: len(self.effects(what)) >= number)

    async def until_state(self, request_id: str, *states: str) -> None:
        """Wait until the journal shows a request in one of *states*."""
        marks = ",".join("?" * len(states))
        sql = f"SELECT 1 FROM task WHERE request_id = ? AND state IN ({marks})"
        await self.until(lambda: bool(self.rows(sql, request_id, *states)))


@contextlib.asynccontextmanager
async def cell_in(
    directory: Path, queues: Queues, store: Store | None = None
) -> AsyncIterator[Cell]:
    """A cell that is cleared away at the end."""
    cell = Cell(directory, queues, store)
    await cell.open()
    try:
        yield cell
    except BaseException as error:
        error.add_note(f"{directory}\n{cell.logs}\n{cell.effects()}")
        raise
    finally:
        await cell.close()
