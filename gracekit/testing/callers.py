"""Callers in a test: they run outside of the simulated process, and go on after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from gracekit.clock import Clock
from gracekit.rpc.call_options import CallOptions, PrepareOptions
from gracekit.rpc.client import ClientView, RpcClient
from gracekit.rpc.methods import Method

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Pending(Awaitable[R_co], Generic[R_co]):
    """A call in the background. Await it for its answer; cancelling the wait does not end it.

    Attributes:
        request_id: The request id, by which to inspect the task meanwhile.
        name: Used in messages.
        was_awaited: Whether it was ever awaited.
    """

    def __init__(self, call: Coroutine[Any, Any, R_co], *, request_id: str, name: str) -> None:
        self.request_id = request_id
        self.name = name
        self.was_awaited = False
        self._task = asyncio.ensure_future(call)

    def __repr__(self) -> str:
        return f"<Pending {self.name}, request {self.request_id}>"

    def __await__(self) -> Generator[Any, None, R_co]:
        self.was_awaited = True
        return asyncio.shield(self._task).__await__()

    def done(self) -> bool:
        """Whether it was answered, or has failed."""
        return self._task.done()

    def unseen_error(self) -> BaseException | None:
        """The exception that it failed with, if it was never awaited."""
        if self.was_awaited or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def cancel(self) -> None:
        """End the call as a caller that gives up; the request may run on."""
        self._task.cancel()
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())


class Line(Protocol):
    """The part of the test kit that `Caller` uses."""

    calls: list[Pending[Any]]

    @property
    def clock(self) -> Clock:
        """Makes the ids of requests."""
        ...

    @property
    def client(self) -> RpcClient:
        """Sends the requests."""
        ...


class Caller(ClientView):
    """Sends requests to the service, with the options of `RpcClient.prepare`."""

    def __init__(self, options: CallOptions) -> None:
        self._options = options

    def _line(self) -> Line:
        raise NotImplementedError

    @property
    def _client(self) -> RpcClient:  # type: ignore[override] # the kit opens it later
        return self._line().client

    def prepare(self, **options: Unpack[PrepareOptions]) -> Caller:
        """A caller with options: `host`, `ops`, `timeout`, `context`, `request_id`, ...

        Raises:
            TypeError: there is no such option.
        """
        return _Prepared(self._options.with_(options), self._line())

    @overload
    def start_call(
        self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]: ...
    @overload
    def start_call(self, method: str, /, **kwargs: Any) -> Pending[Any]: ...
    def start_call(self, method: Any, /, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Call in the background; the call goes on when the service stops or crashes."""
        line = self._line()
        request_id = self._options.request_id or line.clock.new_request_id()
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        pending = Pending(
            self.prepare(request_id=request_id).call(method, *args, **kwargs),
            request_id=request_id,
            name=f"{method if isinstance(method, str) else method.name}({given})",
        )
        line.calls.append(pending)
        return pending


class _Prepared(Caller):
    """A caller with options set."""

    def __init__(self, options: CallOptions, line: Line) -> None:
        super().__init__(options)
        self._to = line

    def _line(self) -> Line:
        return self._to
