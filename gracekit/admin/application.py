"""The HTTP endpoint as an ASGI application: access checks and errors for what `routes` lists."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from gracekit.admin.access import KEY_LIFE_S, Access, Asking, Need, RefusedError
from gracekit.admin.api import AdminApi, NoSuchTaskError
from gracekit.admin.live_events import EventStream, Feed
from gracekit.admin.openapi import describe
from gracekit.admin.routes import (
    ACTIONS,
    LISTINGS,
    LONGEST_ID,
    PROBES,
    Operation,
    check_unicode,
    read_body,
    read_query,
)
from gracekit.config.values import format_duration
from gracekit.errors import (
    ConfigError,
    DependencyError,
    GracekitError,
    InvalidArgumentsError,
    NoSuchLease,
    NoSuchMethodError,
    StoreError,
)
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from gracekit.telemetry.prometheus import Exposition

LONGEST_BODY: Final = 16_384
LONGEST_ASK_S: Final = 5.0
"""Timeout of every request, in seconds."""
_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_STARTING: Final = {"status": "fail", "phase": "starting", "why": ["it is starting"]}
_BEARER: Final = "bearer "
_ONCE: Final = ("host", "authorization", "origin", "content-type")
"""Headers of which a request has one at most."""
_ROUTE: Final = "gracekit.route"
"""Key in a request's scope for the path template of its route, which is logged."""
BY_SOCKET: Final = "unix"
"""The `host` of a client on a unix socket; its `port` is then the uid."""

Endpoint = Callable[[Request], Awaitable[Response]]
Find = Callable[[], AdminApi | None]
"""Returns the API of the present run; None if no run is open."""


class _NotOpenError(GracekitError):
    """No run is open yet."""


class _SlowError(GracekitError):
    """The run did not answer a request in time."""

    def __init__(self) -> None:
        limit = format_duration(LONGEST_ASK_S)
        super().__init__(
            f"no answer within {limit}: the store, or what was asked, takes longer; an action that "
            "was accepted goes on"
        )


class _RequestError(GracekitError):
    """A request that cannot be served, with its HTTP status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminApplication:
    """Builds the application of one run.

    Args:
        find: Returns the run's API.
        access: The access rules.
        telemetry: Receives events about refusals and faults.
        counted: The counters of `/metrics`; None if `prometheus_client` is not installed.
    """

    def __init__(
        self, find: Find, access: Access, telemetry: Telemetry, counted: RunMetrics | None
    ) -> None:
        self._find = find
        self._access = access
        self._telemetry = telemetry
        self._feed = Feed(find)
        self._exposition = None if counted is None else _exposition_of(counted)
        self._acting: set[asyncio.Future[Any]] = set()

    def build(self) -> Starlette:
        """The ASGI application."""
        act = self._refuse_to_act if self._access.read_only else self._act
        routes = [self._probe(operation) for operation in PROBES]
        # Before the listings: a task's id may be any text, so the listing of one task would also
        # match these paths.
        routes += [act(operation) for operation in ACTIONS]
        routes += [self._show(operation) for operation in LISTINGS]
        routes += [
            self._route("/metrics", self._metrics, Need.METRICS),
            self._route("/api/v1/action-key", self._key, Need.ACT),
            self._route("/api/v1/events", self._events, Need.READ),
            self._route("/api/v1/openapi.json", self._openapi, Need.READ),
        ]
        handlers = {HTTPException: self._answer_http_error}
        application = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
        # A redirect of `/livez/` would send the client to the Host header's name, unchecked.
        application.router.redirect_slashes = False
        return application

    # -- one route of each kind -----------------------------------------------------------

    def _probe(self, operation: Operation) -> Route:
        async def answer(_: Request, who: str) -> Response:  # noqa: ARG001 - as every handler
            api = self._find()
            if api is None:
                is_live = operation.path == "/livez"
                body = {**_STARTING, "status": "pass", "why": []} if is_live else _STARTING
            else:
                body = dict(await operation.do(api, {}))
            status = HTTPStatus.SERVICE_UNAVAILABLE if body["status"] == "fail" else HTTPStatus.OK
            return _json(body, status)

        return self._route(operation.path, answer, operation.need)

    def _show(self, operation: Operation) -> Route:
        async def answer(request: Request, who: str) -> Response:  # noqa: ARG001
            query = {name: request.query_params.getlist(name) for name in request.query_params}
            values = read_query(operation, query) | _id_of(request)
            return _json(await operation.do(self._api(), values))

        return self._route(operation.path, answer, operation.need)

    def _act(self, operation: Operation) -> Route:
        async def answer(request: Request, who: str) -> Response:
            read_query(operation, {name: [] for name in request.query_params})
            values = read_body(operation, await _body(request)) | _id_of(request)
            api = self._api()
            self._access.keys.use(values["key"])
            acting = asyncio.ensure_future(operation.do(api, {**values, "by": who}))
            self._acting.add(acting)
            acting.add_done_callback(self._acting.discard)
            return _json(await asyncio.shield(acting))  # it goes on if the client disconnects

        return self._route(operation.path, answer, operation.need, method=operation.method)

    def _refuse_to_act(self, operation: Operation) -> Route:
        async def answer(_: Request, who: str) -> Response:  # noqa: ARG001
            message = "this endpoint is read-only: GRACEKIT_ADMIN_READ_ONLY is set"
            raise _RequestError(HTTPStatus.NOT_FOUND, message)

        return self._route(operation.path, answer, Need.PROBE, method=operation.method)

    async def _metrics(self, request: Request, who: str) -> Response:  # noqa: ARG002
        if self._exposition is None:
            raise _RequestError(
                HTTPStatus.NOT_IMPLEMENTED,
                "metrics for Prometheus need a package that is missing: "
                "pip install 'gracekit[prometheus]'",
            )
        readings = await self._api().readings()
        body, kind = self._exposition.write(readings, accept=request.headers.get("accept", ""))
        return Response(body, media_type=kind, headers=_HEADERS)

    async def _key(self, _: Request, who: str) -> Response:  # noqa: ARG002
        api = self._api()
        key = self._access.keys.issue()
        return _json({"run_id": api.run_id, "key": key, "expires_s": KEY_LIFE_S})

    async def _events(self, request: Request, who: str) -> Response:  # noqa: ARG002
        def may_read() -> bool:
            try:
                self._access.admit(asking, Need.READ)
            except RefusedError as refusal:
                self._refuse(refusal, "/api/v1/events")
                return False
            return True

        self._api()
        asking = _asking(request)
        return EventStream(self._feed, may_read)

    async def _openapi(self, _: Request, who: str) -> Response:  # noqa: ARG002
        return _json(describe(read_only=self._access.read_only))

    # -- wrapped around each route --------------------------------------------------------

    def _route(
        self,
        path: str,
        answer: Callable[[Request, str], Awaitable[Response]],
        need: Need,
        *,
        method: str = "GET",
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                who = self._access.admit(_asking(request), need)
                async with asyncio.timeout(LONGEST_ASK_S):
                    return await answer(request, who)
            except TimeoutError:
                return _error(_SlowError(), HTTPStatus.SERVICE_UNAVAILABLE)
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)
            except GracekitError as error:
                return self._refuse(error, path)
            except Exception as error:  # noqa: BLE001 - a fault of gracekit; the service goes on
                self._telemetry.emit("admin.failed", cause=error, path=path, error=repr(error))
                return _error(error, HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of gracekit")

        return _Route(path, endpoint, methods=[method])

    def _refuse(self, error: GracekitError, path: str) -> Response:
        status = _status_of(error)
        if isinstance(error, RefusedError):
            self._telemetry.emit("admin.refused", path=path, why=error.why, error=str(error))
        answer = _error(error, status)
        if status is HTTPStatus.UNAUTHORIZED:
            answer.headers["www-authenticate"] = "Bearer"
        if isinstance(error, RefusedError) and status is HTTPStatus.BAD_REQUEST:
            answer.headers["connection"] = "close"  # where it ends is not known either
        return answer

    def _api(self) -> AdminApi:
        api = self._find()
        if api is None:
            raise _NotOpenError("the run is not open yet; see /startupz")
        return api

    def _answer_http_error(self, request: Request, error: HTTPException) -> Response:
        """Answer 404 or 405, after the same check of host name and token as for other paths."""
        path = request.scope.get(_ROUTE, "")
        try:
            self._access.admit(_asking(request), Need.PROBE)
        except RefusedError as refusal:
            return self._refuse(refusal, path)
        status = HTTPStatus(error.status_code)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:  # such as a link meant to trigger an action
            self._telemetry.emit("admin.refused", path=path, why="method", error=error.detail)
        answer = _error(error, status, error.detail)
        answer.headers.update(error.headers or {})
        return answer


class _Route(Route):
    """A route that answers its path for every method, and matches ids with any text.

    An id may contain slashes, because servers decode `%2F` before routing.
    """

    def __init__(self, path: str, endpoint: Endpoint, *, methods: list[str]) -> None:
        super().__init__(path.replace("{task_id}", "{task_id:path}"), endpoint, methods=methods)
        self._described = path
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As in Starlette, but a wrong method ends with 405: no later route is tried."""
        match, found = super().matches(scope)
        found[_ROUTE] = self._described
        return (Match.FULL if match is Match.PARTIAL else match), found


def _asking(request: Request) -> Asking:
    """What access depends on. If a proxy may read the request in another way, it is refused."""
    headers = request.headers
    twice = [name for name in _ONCE if len(headers.getlist(name)) > 1]
    if {"content-length", "transfer-encoding"} <= set(headers.keys()):
        twice.append("Content-Length beside Transfer-Encoding")
    if twice:
        raise RefusedError(400, "headers", f"send this once: {', '.join(twice)}")
    words = headers.get("authorization", "")
    has_token = words[: len(_BEARER)].lower() == _BEARER
    return Asking(
        host=headers.get("host", ""),
        origin=headers.get("origin"),
        token=words[len(_BEARER) :].strip() if has_token else None,
        uid=request.client.port if request.client and request.client.host == BY_SOCKET else None,
    )


def _id_of(request: Request) -> dict[str, str]:
    if "task_id" not in request.path_params:
        return {}
    task_id: str = request.path_params["task_id"]
    if not task_id:
        raise NoSuchTaskError("the path ends without a task's id")
    if len(task_id) > LONGEST_ID:
        raise NoSuchTaskError(f"no task has an id of {len(task_id)} characters")
    check_unicode("task_id", task_id)
    return {"task_id": task_id}


async def _body(request: Request) -> object:
    """The JSON of the body.

    The required content type makes a browser ask us first (CORS) before it sends a request of
    another site's page.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "an action sends a JSON object: use `Content-Type: application/json`",
        )
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_BODY:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is longer than {LONGEST_BODY:,} bytes",
            )
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentsError(f"the body is no JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _status_of(error: GracekitError) -> HTTPStatus:
    match error:
        case RefusedError():
            return HTTPStatus(error.status)
        case _RequestError():
            return error.status
        case InvalidArgumentsError() | ConfigError():
            return HTTPStatus.BAD_REQUEST
        case NoSuchTaskError() | NoSuchMethodError() | NoSuchLease():
            return HTTPStatus.NOT_FOUND
        case StoreError() | DependencyError() | _NotOpenError():
            return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.CONFLICT  # the run cannot do it now, or another run owns the task


def _error(error: Exception, status: HTTPStatus, message: str = "") -> Response:
    kind = type(error).__name__.removeprefix("_")
    return _json({"error": {"class": kind, "message": message or str(error)}}, status)


def _json(body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return JSONResponse(dict(body), status_code=status, headers=_HEADERS)


def _exposition_of(counted: RunMetrics) -> Exposition | None:
    """None without a package that can be used; each scrape is then told so.

    Loaded at the start, not by the first scrape: by then an upgrade may have removed it.
    """
    try:
        from gracekit.telemetry.prometheus import Exposition  # noqa: PLC0415 - an extra
    except ConfigError:
        return None
    return Exposition(counted)
