"""The operations of the HTTP endpoint, in one table from which routes and OpenAPI are made.

Parameters are also parsed here, so that descriptions and checks are in one place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.admin.access import Need
from gracekit.admin.api import AdminApi
from gracekit.config.values import did_you_mean
from gracekit.control.health import Probe
from gracekit.errors import InvalidArgumentsError
from gracekit.leases.declarations import LONGEST_PAYLOAD
from gracekit.listings.run_list import GONE_SHOWN
from gracekit.listings.task_list import ALL_STATES, TaskQuery
from gracekit.tracker.task import TaskState

MOST_LISTED: Final = 1000
LONGEST_TEXT: Final = 500
LONGEST_ID: Final = 255


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One value that a request may carry.

    Attributes:
        schema: The value's JSON Schema.
        needed: Whether a request must have it.
    """

    name: str
    meaning: str
    schema: Mapping[str, Any]
    needed: bool = False


Values = Mapping[str, Any]
"""Values by name, from path, query and body, checked against their schemas."""
Answer = Awaitable[Mapping[str, Any]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: a method and a path.

    Attributes:
        path: The path, with `{task_id}` in the place of a task's id.
        do: Called with the values; returns the body of the response.
        query: Parameters of the query string.
        body: Fields of the JSON object that an action needs.
    """

    method: str
    path: str
    summary: str
    need: Need
    do: Callable[[AdminApi, Values], Answer]
    query: tuple[Parameter, ...] = ()
    body: tuple[Parameter, ...] = ()

    @property
    def takes_id(self) -> bool:
        """Whether the path contains a task's id."""
        return "{task_id}" in self.path


def read_query(operation: Operation, given: Mapping[str, list[str]]) -> dict[str, Any]:
    """Check the values of a query string.

    Raises:
        InvalidArgumentsError: one is unknown, repeated, or does not fit its schema.
    """
    known = {parameter.name: parameter for parameter in operation.query}
    _refuse_unknown(given, known, "parameter")
    found: dict[str, Any] = {}
    for name, texts in given.items():
        schema = known[name].schema
        if schema["type"] == "array":
            found[name] = [_one(name, text, schema["items"]) for text in texts]
        elif len(texts) > 1:
            raise InvalidArgumentsError(f"parameter {name!r} comes {len(texts)} times; write one")
        else:
            found[name] = _one(name, texts[0], schema)
    return found


def read_body(operation: Operation, given: object) -> dict[str, Any]:
    """Check the values of an action's JSON object.

    Raises:
        InvalidArgumentsError: as `read_query`; or a required one is missing.
    """
    if not isinstance(given, dict):
        raise InvalidArgumentsError("the body must be a JSON object")
    known = {parameter.name: parameter for parameter in operation.body}
    _refuse_unknown(given, known, "field")
    for name, parameter in known.items():
        if name not in given:
            if parameter.needed:
                raise InvalidArgumentsError(f"field {name!r} is missing: {parameter.meaning}")
            continue
        if not isinstance(given[name], str):
            raise InvalidArgumentsError(f"field {name!r} must be a text: {parameter.meaning}")
        _one(name, given[name], parameter.schema)
    return given


def _refuse_unknown(given: Mapping[str, object], known: Mapping[str, Parameter], what: str) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known) or 'none'}"
            raise InvalidArgumentsError(f"no {what} {name[:LONGEST_ID]!r}{hint}")


def _one(name: str, text: str, schema: Mapping[str, Any]) -> str | int:
    """Convert one value from text."""
    check_unicode(name, text)
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(high))):
            raise InvalidArgumentsError(f"{name} must be a whole number from {low} to {high}")
        if not low <= int(text) <= high:
            raise InvalidArgumentsError(f"{name} = {int(text)} must be from {low} to {high}")
        return int(text)
    if "enum" in schema and text not in schema["enum"]:
        words = ", ".join(schema["enum"])
        raise InvalidArgumentsError(f"{name} must be one of {words}")
    longest = schema.get("maxLength", LONGEST_TEXT)
    if len(text) > longest:
        raise InvalidArgumentsError(f"{name} has {len(text)} characters; at most {longest} fit")
    if not text and schema.get("minLength"):
        raise InvalidArgumentsError(f"{name} is empty")
    return text


def check_unicode(name: str, text: str) -> None:
    """Refuse a lone surrogate, which JSON can carry, but a store and an answer cannot.

    Raises:
        InvalidArgumentsError: *text* has a surrogate.
    """
    if any("\ud800" <= one <= "\udfff" for one in text):
        raise InvalidArgumentsError(
            f"{name} has a lone surrogate, which is half of a character: send whole ones"
        )


# -- the table --------------------------------------------------------------------------


def _text(longest: int = LONGEST_TEXT, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType({"type": "string", "maxLength": longest, **more})


def _limit(default: int, meaning: str = "How many at most.") -> Parameter:
    schema = {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": default}
    return Parameter(name="limit", meaning=meaning, schema=schema)


_KEY: Final = Parameter(
    name="key",
    meaning="An action key, from GET /api/v1/action-key; it works once, for a minute.",
    schema=_text(),
    needed=True,
)
_RUN: Final = Parameter(
    name="run_id",
    meaning="The run to act on, from GET /api/v1/action-key; no later run of its instance acts.",
    schema=_text(LONGEST_ID),
    needed=True,
)
_REASON: Final = Parameter(name="reason", meaning="Why; it is recorded.", schema=_text())
# Stricter than `parse_duration`, so that a value that fits the pattern is never refused later.
_DURATION: Final = _text(
    40,
    pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s)?$|^[0-9]{1,4}(\.[0-9]{1,6})?(m|h|d)$",
)
_SECONDS: Final = Parameter(
    name="timeout",
    meaning="How long running tasks may take, as `60s` or `5m`.",
    schema=_DURATION,
)
_MORE: Final = Parameter(
    name="more",
    meaning="How much more, as `60s` or `5m`.",
    schema=_DURATION,
    needed=True,
)
_RECIPIENT: Final = Parameter(
    name="recipient",
    meaning="The receiver whose copy of a fanout is meant.",
    schema=_text(LONGEST_ID),
)
_WHAT: Final = Parameter(
    name="what",
    meaning="Kinds that begin so: `operator` for what operators have ordered.",
    schema=_text(LONGEST_ID, minLength=1),
)
_SERVICE: Final = Parameter(
    name="service", meaning="Tasks of this one.", schema=_text(LONGEST_ID, minLength=1)
)
_OF_GONE: Final = "How many instances at most that ended within an hour and left no task."
_STATES: Final = [ALL_STATES, *(state.value for state in TaskState)]
_LISTING: Final = (
    Parameter(name="instance", meaning="Tasks of this one.", schema=_text(LONGEST_ID, minLength=1)),
    Parameter(
        name="resource", meaning="`kind:id`, or the id.", schema=_text(LONGEST_TEXT, minLength=1)
    ),
    Parameter(
        name="state",
        meaning="Tasks in this state; may be repeated. Default: those that have not ended.",
        schema={"type": "array", "items": {"type": "string", "enum": _STATES}},
    ),
    _limit(50),
)


_PAYLOAD: Final = Parameter(
    name="payload", meaning="A text to read beside it.", schema=_text(LONGEST_PAYLOAD)
)


def _of_lease(*, needed: bool) -> tuple[Parameter, Parameter]:
    one = _text(LONGEST_ID, minLength=1)
    return (
        Parameter(name="kind", meaning="Kind of the lease, as `vm`.", schema=one, needed=needed),
        Parameter(name="id", meaning="Its id, as `vm-1`.", schema=one, needed=needed),
    )


async def _tasks(api: AdminApi, values: Values) -> Mapping[str, Any]:
    query = TaskQuery(
        name=values.get("instance"),
        resource=values.get("resource"),
        states=values.get("state", ()),
        limit=values.get("limit", 50),
    )
    return await api.tasks(query)


def _probe(probe: Probe) -> Callable[[AdminApi, Values], Answer]:
    async def ask(api: AdminApi, _: Values) -> Mapping[str, Any]:
        return (await api.probe(probe)).as_json()

    return ask


def _verb(name: str, summary: str, *more: Parameter) -> Operation:
    return _action(f"/api/v1/{name}", summary, name, AdminApi.act, more)


def _order(name: str, summary: str) -> Operation:
    path = f"/api/v1/tasks/{{task_id}}/{name}"
    return _action(path, summary, name, AdminApi.order, (_RECIPIENT,))


def _action(
    path: str, summary: str, name: str, do: Callable[..., Answer], more: tuple[Parameter, ...]
) -> Operation:
    async def act(api: AdminApi, values: Values) -> Mapping[str, Any]:
        args = {key: value for key, value in values.items() if key not in {"key", "run_id"}}
        return await do(api, name, values["run_id"], args)

    body = (_RUN, _KEY, _REASON, *more)
    return Operation(method="POST", path=path, summary=summary, need=Need.ACT, do=act, body=body)


def _show(
    path: str,
    summary: str,
    do: Callable[[AdminApi, Values], Answer],
    *query: Parameter,
    need: Need = Need.READ,
) -> Operation:
    return Operation(method="GET", path=path, summary=summary, need=need, do=do, query=query)


PROBES: Final = (
    _show("/livez", "Whether the process is alive.", _probe(Probe.LIVE), need=Need.PROBE),
    _show("/readyz", "Whether it takes new requests.", _probe(Probe.READY), need=Need.PROBE),
    _show("/startupz", "Whether its start is over.", _probe(Probe.STARTED), need=Need.PROBE),
)
LISTINGS: Final = (
    _show(
        "/api/v1/status",
        "The runs of the store, with this run's own status.",
        lambda api, values: api.status(values.get("limit", GONE_SHOWN)),
        _limit(GONE_SHOWN, _OF_GONE),
    ),
    _show("/api/v1/tasks", "Tasks of the store, newest first.", _tasks, *_LISTING),
    _show(
        "/api/v1/tasks/{task_id}",
        "All that is on record of one task.",
        lambda api, values: api.task(values["task_id"]),
    ),
    _show(
        "/api/v1/pending",
        "Tasks that wait for capacity, the oldest deadline first.",
        lambda api, values: api.pending(values.get("service"), values.get("limit", 50)),
        *(_SERVICE, _limit(50)),
    ),
    _show(
        "/api/v1/hosts",
        "The newest run of each instance, and whether others may act in its place.",
        lambda api, _: api.hosts(),
    ),
    _show(
        "/api/v1/leases",
        "Declared leases in the order of kind and id; with an id, one lease, declared or not.",
        lambda api, values: api.leases(
            values.get("kind", ""), values.get("id", ""), values.get("limit", 50)
        ),
        *(*_of_lease(needed=False), _limit(50)),
    ),
    _show(
        "/api/v1/exits",
        "The last runs that ended, newest first.",
        lambda api, values: api.exits(values.get("limit", 20)),
        _limit(20),
    ),
    _show(
        "/api/v1/incidents",
        "The last incidents, newest first.",
        lambda api, values: api.incidents(values.get("what", ""), values.get("limit", 50)),
        *(_WHAT, _limit(50)),
    ),
    _show(
        "/api/v1/accounts",
        "Whether every accepted request is accounted for.",
        lambda api, _: api.accounts(),
    ),
    _show(
        "/api/v1/dump",
        "Tasks in flight, and the stacks of the process.",
        lambda api, _: api.dump(),
    ),
    _show(
        "/api/v1/config", "Every setting with its origin; no secrets.", lambda api, _: api.config()
    ),
)
ACTIONS: Final = (
    _verb("drain", "Drain the run; `resume` undoes it until a task has stopped.", _SECONDS),
    _verb("extend", "Move the deadline of a drain that a command asked for.", _MORE),
    _verb("quiet", "Close the intake; running tasks go on."),
    _verb("resume", "Undo quiet, or a drain that a command asked for."),
    *(
        _action(f"/api/v1/leases/{verb}", summary, verb, AdminApi.lease, more)
        for verb, summary, more in (
            ("create", "Declare a lease.", (*_of_lease(needed=True), _PAYLOAD)),
            ("delete", "Remove a lease that nobody holds.", _of_lease(needed=True)),
        )
    ),
    _order("cancel", "Cancel a task."),
    _order("fail", "End a task as failed."),
    _order("retry", "Let a task run again at once."),
    _order("give_up", "End a task that waits for capacity."),
)
