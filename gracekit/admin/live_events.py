"""Server-sent events: the run's status, once a second, for a limited number of readers.

Each reader has its own coroutine, so nothing is queued for a slow reader. A connection ends when
sending one event takes longer than `SEND_S`, or when its token is withdrawn. sse-starlette is not
used, because importing it replaces a function of uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from gracekit.admin.api import AdminApi
from gracekit.errors import GracekitError

EVERY_S: Final = 1.0
SEND_S: Final = 5.0
MAX_READERS: Final = 32


class Feed:
    """The event for all readers, made once a second for all of them together.

    Attributes:
        readers: How many readers there are now.
    """

    def __init__(self, find: Callable[[], AdminApi | None]) -> None:
        self._find = find
        self._made_at = -EVERY_S
        self._event = b""
        self._making = asyncio.Lock()
        self.readers = 0

    async def event(self) -> bytes:
        """`event: status` with the run's own status as JSON; a comment while no run is open."""
        async with self._making:
            now = time.monotonic()
            if now - self._made_at >= EVERY_S / 2:
                self._event, self._made_at = await self._make(), now
            return self._event

    async def _make(self) -> bytes:
        api = self._find()
        if api is None:
            return b": no run is open\n\n"
        try:
            status = json.dumps(await api.own_status())
        except GracekitError as error:
            return f": {json.dumps(str(error))}\n\n".encode()
        return f"event: status\ndata: {status}\n\n".encode()


class EventStream(Response):
    """The response to one reader.

    Args:
        may_read: Called before each event; the stream ends when it returns False.
    """

    def __init__(self, feed: Feed, may_read: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._feed = feed
        self._may_read = may_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the reader disconnects, stops reading or loses permission.

        If there are `MAX_READERS` already, answer 503.
        """
        if self._feed.readers >= MAX_READERS:
            refusal = {"class": "RefusedError", "message": f"{MAX_READERS} readers are served now"}
            await JSONResponse({"error": refusal}, status_code=503)(scope, receive, send)
            return
        self._feed.readers += 1
        gone = asyncio.create_task(_wait_gone(receive), name="gracekit-events-reader")
        try:
            with contextlib.suppress(TimeoutError):
                await self._send_all(send, gone)
        finally:
            self._feed.readers -= 1
            gone.cancel()

    async def _send_all(self, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        while not gone.done() and self._may_read():
            event = await self._feed.event()
            await _send(send, {"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait({gone}, timeout=EVERY_S)
        await _send(send, {"type": "http.response.body"})


async def _send(send: Send, message: Message) -> None:
    """Send one message; raises TimeoutError if the reader does not read."""
    async with asyncio.timeout(SEND_S):
        await send(message)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
