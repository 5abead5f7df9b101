"""A client for code that is not async: its methods block, and any thread may call them.

All such clients of a process share one event loop, in a thread that the first call starts. A forked
child has neither that thread nor a right to the connections, so it begins anew.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # before our `_register_atexit`, so that ours is called first
import functools
import os
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from gracekit.background import LONGEST_END_S
from gracekit.config.urls import file_url
from gracekit.errors import CallTimeoutError, ConfigError, DependencyError, RpcError
from gracekit.process import refuse_patched_threads
from gracekit.rpc.call_options import CallOptions, PrepareOptions
from gracekit.rpc.client import ClientView, RpcClient
from gracekit.rpc.connect import queue_file
from gracekit.rpc.methods import Method

P = ParamSpec("P")
R = TypeVar("R")
_Verb = Callable[[ClientView], Coroutine[Any, Any, R]]


class ClientOptions(TypedDict, total=False):
    """The options of a `SyncClient`, which are those of `RpcClient`."""

    ops_topic: str | None
    exceptions: Mapping[str, type[Exception]]
    max_body_bytes: int
    exchange: str
    declare_profile: str


def _blocking(
    verb: Callable[Concatenate[ClientView, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncView, P], R]:
    @functools.wraps(verb)
    def run(self: SyncView, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(lambda view: verb(view, *args, **kwargs))

    return run


class SyncView:
    """A blocking client with options set; made by `prepare`, immutable.

    Its verbs take, return and raise what those of `ClientView` do. In a thread whose event loop
    they would block they raise ConfigError.
    """

    __slots__ = ("_client", "_options")

    def __init__(self, client: SyncClient, options: CallOptions) -> None:
        self._client = client
        self._options = options

    def prepare(self, **options: Unpack[PrepareOptions]) -> SyncView:
        """See `ClientView.prepare`."""
        return SyncView(self._client, self._options.with_(options))

    def can_send_version(self, version: str | None = None) -> bool:
        """See `ClientView.can_send_version`."""
        return self._options.can_send(version or self._options.version or "1.0")

    @overload
    def call(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, method: str, /, **kwargs: Any) -> Any: ...
    def call(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Send a request and wait for its answer; see `ClientView.call`.

        The prepared `timeout` includes the time to connect. Ctrl-C ends the wait at once; the
        request may run on.
        """
        return self._run(lambda view: view.call(method, *args, **kwargs), self._options.timeout_s)

    @overload
    def cast(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    @overload
    def cast(self, method: str, /, **kwargs: Any) -> str: ...
    def cast(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Send a request without waiting for an answer; see `ClientView.cast`."""
        return self._run(lambda view: view.cast(method, *args, **kwargs))

    @overload
    def fanout(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    def fanout(self, method: str, /, **kwargs: Any) -> None: ...
    def fanout(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Send a request to every instance that runs now; see `ClientView.fanout`."""
        self._run(lambda view: view.fanout(method, *args, **kwargs))

    state = _blocking(ClientView.state)
    states = _blocking(ClientView.states)
    result = _blocking(ClientView.result)
    results = _blocking(ClientView.results)
    cancel = _blocking(ClientView.cancel)

    def _run(self, verb: _Verb[R], within_s: float | None = None) -> R:
        """Await *verb*; connecting is a part of it, and takes *within_s* at most."""
        return _Loop.run(lambda here: self._client._send(here, verb, self._options, within_s))  # noqa: SLF001


class SyncClient(SyncView):
    """A blocking client: `SyncClient(url, "compute").call("resize", vm="vm-1")`.

    Make one when the program starts, also at the top of a module, and use it in all threads. It
    connects at its first request, and again in each forked child. It closes when Python ends.

    Args:
        url: Of the transport.
        topic: The service's topic.
        options: Those of `RpcClient`: `ops_topic`, `exceptions`, `max_body_bytes`, `exchange` and
            `declare_profile`.

    Raises:
        ConfigError: the URL, a topic or *exceptions* is invalid.
    """

    __slots__ = ("_is_open", "_is_stopped", "_made", "_make")

    def __init__(self, url: str, topic: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(self, CallOptions())
        if (file := queue_file(url)) is not None:
            url = file_url(file)  # a server may change the working directory before the first call
        self._make: Callable[[], RpcClient] = lambda: RpcClient(url, topic, **options)
        self._made = self._make()  # another one in each process, and after a stop
        self._is_open = self._is_stopped = False

    def start(self) -> None:
        """Connect, unless that is done; also after a stop.

        Raises:
            ConfigError: the file cannot be used, or an event loop runs in this thread.
            DependencyError: the transport cannot be reached.
            StoreLockedError: another program kept the file of queues locked.
        """
        self._is_stopped = False
        self._run(lambda _: asyncio.sleep(0))

    def stop(self) -> None:
        """End calls that still wait with an RpcError, and disconnect; may be called twice."""
        if _Loop.here is None:
            self._is_stopped = True
        else:
            _Loop.run(self._stop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _send(
        self, here: _Loop, verb: _Verb[R], options: CallOptions, within_s: float | None
    ) -> R:
        self._check_not_stopped()
        if self._made not in here.clients:
            self._made, self._is_open = self._make(), False
            here.clients.add(self._made)
        if not self._is_open:
            try:
                async with asyncio.timeout(within_s) as limit:
                    # In a context of its own, as it outlives the request that needs it first.
                    await asyncio.create_task(self._made.start(), context=Context())
            except TimeoutError as error:
                if not limit.expired():
                    raise
                late = f"nothing was sent: not connected within the time-out of {within_s:g} s"
                raise CallTimeoutError(late) from error
            except asyncio.CancelledError:
                raise DependencyError("nothing was sent: Python is ending") from None
            self._check_not_stopped()
            self._is_open = True
            if (until := limit.when()) is not None:
                options = options.with_({"timeout": until - asyncio.get_running_loop().time()})
        return await verb(ClientView(self._made, options))

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise DependencyError("this client is stopped, so nothing was sent: start() it again")

    async def _stop(self, here: _Loop) -> None:
        self._is_stopped = True
        if self._made in here.clients:
            here.clients.discard(self._made)
            await self._made.stop()


class _Loop:
    """The event loop of this process for all its blocking clients, and the thread that runs it.

    Attributes:
        here: That of this process; None before the first call, in a child too, and at the end.
        clients: Those that were started on it.
    """

    END_S: ClassVar[float] = 5.0  # longest wait for connections to close when Python ends
    here: ClassVar[_Loop | None] = None
    lock: ClassVar[threading.RLock] = threading.RLock()
    inherited: ClassVar[list[_Loop]] = []  # of parents: to finalise them could harm those

    def __init__(self) -> None:
        refuse_patched_threads()
        try:  # `atexit` is too late: Python first joins threads, which may wait for an answer
            threading._register_atexit(self.end)  # type: ignore[attr-defined]  # noqa: SLF001
        except RuntimeError:
            raise DependencyError("nothing is sent any more: Python is ending") from None
        self.clients: set[RpcClient] = set()
        self.selector = selectors.EpollSelector()
        self.loop = asyncio.SelectorEventLoop(self.selector)
        self.thread = threading.Thread(target=self.main, name="gracekit-sync", daemon=True)
        self.thread.start()

    def main(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    @classmethod
    def run(cls, work: Callable[[_Loop], Coroutine[Any, Any, R]]) -> R:
        """Await what *work* makes, in the context of this thread, which is blocked meanwhile."""
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises for none
            raise ConfigError(
                "an event loop runs in this thread, which a blocking client would stop: use the "
                "async client here, `async with svc.client(url) as client`"
            )
        with cls.lock:
            here = cls.here = cls.here or cls()
            future = asyncio.run_coroutine_threadsafe(work(here), here.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RpcError("the client was stopped, and the request may run") from None
        finally:
            future.cancel()  # after Ctrl-C nobody waits for it
            del future  # an error in it refers to this frame

    @classmethod
    def end(cls) -> None:
        """Stop all clients, as Python ends; calls that still wait end with RpcError."""
        with cls.lock:
            here, cls.here = cls.here, None
        if here is not None:
            asyncio.run_coroutine_threadsafe(here.stop_clients(), here.loop).result()
            here.loop.call_soon_threadsafe(here.loop.stop)
            here.thread.join()

    async def stop_clients(self) -> None:
        """Stop them in `END_S`, and cancel what is left."""
        if stops := {asyncio.create_task(client.stop()) for client in self.clients}:
            await asyncio.wait(stops, timeout=self.END_S)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=LONGEST_END_S)

    @classmethod
    def leave_child(cls) -> None:
        """In a forked child, part from the loop of the parent; its thread does not exist here."""
        cls.lock = threading.RLock()
        if (parents := cls.here) is not None:
            cls.here = None
            cls.inherited.append(parents)
            # Copies of sockets would keep connections open after the parent's end, and the epoll is
            # shared. The numbers are not freed, because objects here may still close them.
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            fds = [key.fd for key in parents.selector.get_map().values()]
            for fd in (parents.selector.fileno(), *fds):
                os.dup2(nothing, fd, inheritable=False)
            os.close(nothing)


os.register_at_fork(after_in_child=_Loop.leave_child)
