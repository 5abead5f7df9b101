"""Serves the HTTP endpoint with uvicorn, on a socket that is bound here; handles no signals.

It is the first part of a run to start and the last to stop: it answers probes before the run is
recorded in the store, and until the stop is recorded. Its TLS certificate is loaded again when its
files change, so that it can be renewed while the service runs; later handshakes use the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from gracekit.admin.access import Access, access_of
from gracekit.admin.application import BY_SOCKET, AdminApplication, Find
from gracekit.admin.binding import bind, name_of
from gracekit.config.admin import admin_address, files_of
from gracekit.config.settings import Settings
from gracekit.control.door import Asker
from gracekit.errors import ConfigError
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.safe_text import Sentence
from gracekit.telemetry.telemetry import Telemetry


class Certificate:
    """A certificate and its key, used by an SSL context.

    Args:
        context: The context, which has loaded them.
        files: PEM files of certificate and key.
        report: Called with None after new files were loaded. Called with the error if the changed
            files cannot be used, once for each change; the old certificate stays in use.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        files: Sequence[str],
        report: Callable[[Exception | None], object],
    ) -> None:
        self._context = context
        self._files = files
        self._report = report
        self._seen = self._state()

    def read_changed(self) -> None:
        """Load the files if they have changed."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            # Try them in a separate context first: if only the certificate was new, the load would
            # fail but leave it in our context.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self._context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            self._report(error)
        else:
            self._report(None)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: str) -> tuple[int, int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


MAX_CONNECTIONS: Final = 512
"""Upper limit of connections; see `_most_connections`."""
DESCRIPTORS_PART: Final = 4
"""Connections may use at most the process's descriptors divided by this."""
MAX_TLS_CONNECTIONS: Final = 64
"""Most connections with TLS whose client has sent data, as asyncio then allocates 256 KiB each."""
CLOSING_PART: Final = 2
"""No connection is accepted while at least the limit divided by this many are being closed."""
REPORT_EVERY_S: Final = 60.0
"""Seconds between two reports that no descriptor is free."""
CLIENT_TIMEOUT_S: Final = 10.0
"""Seconds for a client to finish its TLS handshake, send a whole request, or read an answer."""
STOP_S: Final = 0.2
"""Seconds that requests in progress get when the endpoint stops."""
_ACCEPTED_AT_ONCE: Final = 32
_SILENT: Final = logging.getLogger("gracekit.admin.uvicorn")
_SILENT.disabled = True  # it would log a line for each request that is no HTTP


class AdminServer:
    """The endpoint of one run, as a part of it.

    Args:
        find: Returns the run's API.
        telemetry: Receives events about starts, refusals and faults.
        counted: See `AdminApplication`.
        keeps_listening: Whether the process ends with the run. If so, the socket keeps listening
            after the stop, without answering, so that no connection is refused before the process
            is gone. The file of a unix socket stays; the next start replaces it.

    Raises:
        ConfigError: a token file, certificate or address cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        find: Find,
        telemetry: Telemetry,
        counted: RunMetrics | None,
        *,
        keeps_listening: bool,
    ) -> None:
        self._settings = settings
        self._find = find
        self._telemetry = telemetry
        self._counted = counted
        self._keeps_listening = keeps_listening
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the socket, and begin to answer."""
        if self._serving is not None:
            return
        address = admin_address(self._settings.admin)
        assert address is not None
        access = access_of(self._settings, address, self._telemetry)
        self._listener = listener = bind(address)
        try:
            config = self._config(access)
            look = self._watch_certificate(config)
            self._server = _Server(config, listener.dup(), self._telemetry, look)
            self._serving = asyncio.create_task(self._serve(), name="gracekit-admin")
        except BaseException:
            listener.close()
            raise
        name = address if address.path else name_of(listener)
        self._telemetry.emit("admin.opened", address=str(name))

    def _config(self, access: Access) -> Config:
        application = AdminApplication(self._find, access, self._telemetry, self._counted).build()
        certificate = self._settings.admin_tls
        files = files_of(certificate) if certificate else (None, None)
        config = Config(
            application,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=files[0],
            ssl_keyfile=files[1],
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"admin_tls {certificate} cannot be used: {error}; it must name a certificate and "
                "its key, as PEM files that this user may read"
            ) from error
        return config

    def _watch_certificate(self, config: Config) -> Callable[[], object]:
        """Return a function that checks for a renewed certificate; without TLS it does nothing."""
        certificate = self._settings.admin_tls
        if certificate is None or config.ssl is None:
            return lambda: None
        return Certificate(config.ssl, files_of(certificate), self._report_renewal).read_changed

    def _report_renewal(self, error: Exception | None) -> None:
        if error is None:
            self._telemetry.emit("admin.certificate_renewed")
            return
        text = (
            f"admin_tls {self._settings.admin_tls} cannot be used any more: {error}; the one that "
            "was read before stays in use until both files are a certificate and its key again"
        )
        self._telemetry.emit("admin.certificate_unusable", error=Sentence(text))

    async def _serve(self) -> None:
        """Serve until `stop`. An error of the server is reported, and the run goes on."""
        assert self._server is not None
        try:
            await self._server.answer()
        except Exception as error:  # noqa: BLE001 - the service can run without its endpoint
            self._telemetry.emit("admin.failed", cause=error, path="", error=repr(error))

    async def stop(self) -> None:
        """Let requests in progress end within `STOP_S`, then cut all connections."""
        serving, self._serving = self._serving, None
        if serving is not None and self._server is not None:
            self._server.leave()
            await asyncio.wait({serving}, timeout=3 * STOP_S)
            serving.cancel()
            await asyncio.wait({serving}, timeout=STOP_S)
            self._server.abort()
        self._close_socket()

    def _close_socket(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if self._keeps_listening:
            listener.detach()  # the kernel closes it with the process
            return
        address = admin_address(self._settings.admin)
        if address is not None and address.path is not None:
            with contextlib.suppress(OSError):
                address.path.unlink()
        listener.close()


class _Server(Server):
    """Uvicorn's server, without its signal handlers, and with a quick stop.

    It accepts connections itself, and counts each from that moment. asyncio's server would report
    a connection with TLS only after its handshake, and others only after all waiting ones are
    accepted.

    Args:
        listener: The listening socket; this object closes it.
        telemetry: Is told when the limit is reached, and again only after it was not; and if
            accepting fails, at most once every `REPORT_EVERY_S`.
        look: Called once a second.
    """

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        telemetry: Telemetry,
        look: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._telemetry = telemetry
        self._reported_at = -math.inf
        self._look = look
        self._limit = self._begun_limit = _most_connections()
        if config.ssl is not None:
            self._begun_limit = min(MAX_TLS_CONNECTIONS, self._limit)
        self._is_full = False
        self._leaving = asyncio.Event()
        # The loop time at which each was accepted; the oldest first.
        self._silent: dict[socket.socket, float] = {}  # for TLS, but has sent nothing yet
        self._opening: dict[asyncio.Task[None], tuple[float, _Protocol]] = {}
        self._numbers = count()

    def leave(self) -> None:
        """Ask the main loop to end."""
        self.should_exit = True
        self._leaving.set()

    def abort(self) -> None:
        """Cut every connection."""
        for silent in list(self._silent):
            self._drop(silent)
        for *_, opening in self._being_opened():
            opening.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def answer(self) -> None:
        """Like `serve`, which would also take over the process's signals and write its own log."""
        with self._listener:
            try:
                await self.main_loop()
            finally:
                asyncio.get_running_loop().remove_reader(self._listener)
            await self.shutdown()

    async def main_loop(self) -> None:
        """Once a second update the Date header, and abort connections of stalled clients."""
        closing: set[Any] = set()
        while not await self.on_tick(0):
            # Repeated, because `_pause` removes the reader when no descriptor is free.
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._look()
            connections: set[Any] = self.server_state.connections  # each a _Protocol
            stuck = {c for c in connections if c.transport.is_closing()}
            late = {c for c in connections if c.is_late()}
            self._drop_late()
            for connection in late | (stuck & closing):  # its peer does not read
                connection.transport.abort()
            closing = stuck
            self._is_full = self._is_full and self._reached() is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()

    def _accept(self) -> None:
        """Accept waiting connections; at the limit, each new one replaces an idle one."""
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._closes_many():
                return  # the others wait in the kernel, and the loop calls this again
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            if self._reached() == self._limit and not self._make_room(self._silent):
                connection.close()
            elif self.config.ssl is None:
                self._begin(connection)
            else:
                connection.setblocking(False)
                loop = asyncio.get_running_loop()
                self._silent[connection] = loop.time()
                loop.add_reader(connection, self._hear, connection)

    def _closes_many(self) -> bool:
        """Whether so many connections are being closed that none must be accepted now.

        The loop closes their descriptors only in a later iteration. If there are so many, those
        that wait for their client to read are aborted, as they could hold descriptors for long.
        """
        connections: set[Any] = self.server_state.connections  # each a _Protocol
        closing = [one for one in connections if one.transport.is_closing()]
        cut = sum(bool(opening.cancelling()) for opening in self._opening)
        if len(closing) + cut < max(1, self._limit // CLOSING_PART):
            return False
        for one in closing:
            one.transport.abort()
        return True

    def _pause(self, error: OSError) -> None:
        """Stop accepting until the next round of `main_loop`; otherwise the loop would spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        if loop.time() - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = loop.time()
            self._telemetry.emit("admin.no_descriptor", error=str(error))

    def _hear(self, connection: socket.socket) -> None:
        """Begin TLS now that the client has sent data, as asyncio allocates its buffer then."""
        self._forget_silent(connection)
        try:
            has_gone = not connection.recv(1, socket.MSG_PEEK)
        except OSError:
            has_gone = True
        if has_gone or (self._begun >= self._begun_limit and not self._make_room({})):
            connection.close()
        else:
            self._begin(connection)

    def _drop(self, silent: socket.socket) -> None:
        self._forget_silent(silent)
        silent.close()

    def _forget_silent(self, silent: socket.socket) -> None:
        del self._silent[silent]
        asyncio.get_running_loop().remove_reader(silent)

    def _drop_late(self) -> None:
        """Close connections whose client has sent nothing for `CLIENT_TIMEOUT_S`."""
        now = asyncio.get_running_loop().time()
        for silent, since in list(self._silent.items()):
            if now - since > CLIENT_TIMEOUT_S:
                self._drop(silent)

    def _begin(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        protocol = _Protocol(self.config, self.server_state, {}, loop, number=number)
        opening = loop.create_task(self._open(connection, protocol), name="gracekit-admin-opening")
        self._opening[opening] = loop.time(), protocol
        opening.add_done_callback(partial(self._forget, connection))

    @property
    def _begun(self) -> int:
        """How many connections are open, without TLS ones whose client has sent nothing."""
        connections: set[Any] = self.server_state.connections  # each a _Protocol
        return len(self._being_opened()) + sum(not c.transport.is_closing() for c in connections)

    def _being_opened(self) -> list[tuple[float, int, asyncio.Task[None]]]:
        """Start, number and task of each opening whose protocol has not begun."""
        return [
            (since, protocol.number, opening)
            for opening, (since, protocol) in self._opening.items()
            if not (protocol.has_begun or opening.done() or opening.cancelling())
        ]

    def _reached(self) -> int | None:
        """The limit that is reached; None if none is."""
        begun = self._begun
        if begun + len(self._silent) >= self._limit:
            return self._limit
        return self._begun_limit if begun >= self._begun_limit else None

    def _make_room(self, silent: Mapping[socket.socket, float]) -> bool:
        """Disconnect the client that has been idle for longest; return whether there was one.

        So idle clients cannot keep probes from connecting.

        Args:
            silent: Clients of `_silent` that may be disconnected too.
        """
        if not self._is_full:
            self._is_full = True
            self._telemetry.emit("admin.full", limit=self._reached() or self._limit)
        connections: set[Any] = self.server_state.connections  # each a _Protocol
        idle: list[tuple[float, int, Callable[[], object]]] = [
            (one.free_since, one.number, one.transport.abort)
            for one in connections
            if one.is_free and not one.transport.is_closing()
        ]
        idle += [(since, number, one.cancel) for since, number, one in self._being_opened()]
        idle += [(since, 0, partial(self._drop, one)) for one, since in islice(silent.items(), 1)]
        if not idle:
            return False
        *_, cut = min(idle, key=itemgetter(0, 1))  # uvloop's clock has steps of 1 ms
        cut()
        return True

    async def _open(self, connection: socket.socket, protocol: _Protocol) -> None:
        """Begin to serve *connection*; with TLS, after the handshake."""
        context = self.config.ssl
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=CLIENT_TIMEOUT_S if context else None,
            )
        except OSError as error:  # the client disconnected, is too slow, or speaks no TLS
            # The traceback is part of a reference cycle, by which the buffer of this connection
            # would stay in memory until the next garbage collection.
            error.__traceback__ = None
        except asyncio.CancelledError:
            # The protocol may have begun after the cancellation. asyncio is about to tell it that
            # its connection is lost; uvloop has closed the socket and does not.
            if protocol.has_begun and not protocol.transport.is_closing():
                protocol.connection_lost(None)
            raise

    def _forget(self, connection: socket.socket, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)
        if opening.cancelled():
            connection.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Let requests in progress end."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=STOP_S)
        for task in set(self.server_state.tasks):
            task.cancel()
        self.abort()


class _Protocol(H11Protocol):
    """One connection.

    Uvicorn's own timer runs only between a response and the next byte. The times kept here also
    catch a client that sends a single byte to keep its connection, and a descriptor.

    Attributes:
        number: Those that were accepted later have higher ones.
        has_begun: Whether it has a transport, or has had one.
        free_since: Loop time of its begin, or of the end of the last response.
    """

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = number
        self.logger = _SILENT
        self.has_begun = False
        self.free_since = self.loop.time()
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn does; for a unix socket also ask the kernel for the client's uid."""
        self.has_begun = True
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            self.client = (BY_SOCKET, Asker.of(connection).uid)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn does, and stop its timer, which would keep a reset connection for 5 s more."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        """As uvicorn does; from now on the connection counts as idle."""
        self.free_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """As uvicorn does; from now on the client is expected to read."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """As uvicorn does."""
        self._unread_since = None
        super().resume_writing()

    @property
    def is_free(self) -> bool:
        """Whether no request is in progress."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or bool(cycle.response_complete)

    def is_late(self) -> bool:
        """Whether the client has sent no request, or read nothing, for `CLIENT_TIMEOUT_S`."""
        moments = (self._unread_since, self.free_since if self.is_free else None)
        began = [moment for moment in moments if moment is not None]
        return bool(began) and self.loop.time() - min(began) > CLIENT_TIMEOUT_S


def _most_connections() -> int:
    """The limit of connections, which leaves descriptors for the service itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max(1, soft // DESCRIPTORS_PART))
