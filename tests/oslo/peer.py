"""The real oslo.messaging as a process of its own, led by JSON lines: server, client, or both.

    python -m tests.oslo.peer --config-file peer.conf

Runs where `requirements/oslo.lock` is installed; `kit.py` is its other side. A line of its input
is a command, `{"id": 1, "do": "call", …}`, carried out in a thread of its own; lines of its output
are answers, `{"id": 1, "ok": …}` or `{"id": 1, "error": {"class": …, …}}`, and what happens on the
servers, `{"event": "begun", …}`. It ends with its input.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)  # else oslo_messaging wants eventlet

import oslo_messaging  # noqa: E402
from oslo_config import cfg  # noqa: E402
from oslo_context.context import RequestContext  # noqa: E402
from oslo_messaging.rpc.server import RPCServer  # noqa: E402

from tests.oslo import faults, objects  # noqa: E402

Data = Mapping[str, Any]

OPTIONS: Final = [
    cfg.ListOpt("peer_exception_modules", default=[], help="Modules that a client may import."),
    cfg.StrOpt("peer_serializer", default="none", choices=["none", "labels", "objects"]),
    cfg.BoolOpt("peer_spans", default=False, help="Keep spans, for the command 'spans'."),
]
POLICIES: Final = {
    "legacy": oslo_messaging.LegacyRPCAccessPolicy,
    "default": oslo_messaging.DefaultRPCAccessPolicy,
    "explicit": oslo_messaging.ExplicitRPCAccessPolicy,
}


class Mouth:
    """Says one line at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, **message: Any) -> None:
        line = json.dumps(message, default=repr)
        with self._lock:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def described(error: BaseException) -> dict[str, Any]:
    """An exception as a caller meets it."""
    kind = type(error)
    return {
        "class": kind.__name__,
        "module": kind.__module__,
        "bases": [f"{base.__module__}.{base.__name__}" for base in kind.__mro__[1:]],
        "message": str(error),
        "args": list(error.args),
        "attributes": dict(vars(error)),
    }


# -- the server's side ------------------------------------------------------------------


class Gates:
    """Where endpoints wait until they are let on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._all_open = False

    def wait(self, name: str) -> None:
        with self._lock:
            gate = self._gates[name]
            if self._all_open:
                gate.set()
        gate.wait()

    def open(self, name: str) -> None:
        with self._lock:
            self._gates[name].set()

    def open_all(self) -> None:
        with self._lock:
            self._all_open = True
            for gate in self._gates.values():
                gate.set()


class Endpoint:
    """What the servers serve: the same methods at whatever place they are told."""

    def __init__(self, name: str, peer: Peer, place: Data) -> None:
        self.name = name
        self._peer = peer
        if place:
            self.target = oslo_messaging.Target(**place)

    def echo(self, ctxt: Any, **args: Any) -> dict[str, Any]:
        """Its arguments."""
        return args

    def shape(self, ctxt: Any, first: Any, second: Any = None) -> list[Any]:
        """Two arguments, one of which may be left out."""
        return [first, second]

    def who(self, ctxt: Any) -> str:
        """Which endpoint answers."""
        return self.name

    @oslo_messaging.expose
    def context(self, ctxt: Any) -> Any:
        """What the handler is given as context."""
        return ctxt

    def fail(self, ctxt: Any, fault: str) -> None:
        """Raise one of the known faults."""
        raise faults.fault(fault)

    @oslo_messaging.expected_exceptions(faults.NotFound)
    def fail_as_expected(self, ctxt: Any, fault: str = "app_with_kwargs") -> None:
        """The same, where one class is expected."""
        raise faults.fault(fault)

    def odd_result(self, ctxt: Any) -> object:
        """Return what cannot be sent."""
        return object()

    def block(self, ctxt: Any, gate: str) -> str:
        """Wait at a gate."""
        self._peer.gates.wait(gate)
        return f"through {gate}"

    def forward(self, ctxt: Any, topic: str, name: str, arguments: dict[str, Any]) -> Any:
        """Call on: what comes back, or is raised, is passed on."""
        return self._peer.call({"topic": topic}, {"timeout": 5}, ctxt, name, arguments)

    def _private(self, ctxt: Any) -> str:
        return "private"

    not_callable = "an attribute"


class RecordingServer(RPCServer):
    """Tells what it is about to do, and that it has done it, with the ids of the wire."""

    mouth: Mouth

    def _process_incoming(self, incoming: Any) -> None:
        (message,) = incoming
        what = {
            "server": self._target.server,
            "topic": self._target.topic,
            "unique_id": message.unique_id,
            "msg_id": message.orig_msg_id,  # `msg_id` is made up where there is none
            "reply_q": message.reply_q,
            "client_timeout": message.client_timeout,
            "ctxt": message.ctxt,
            "message": message.message,
        }
        self.mouth.say(event="begun", **what)
        super()._process_incoming(incoming)
        self.mouth.say(event="ended", **what)


# -- the listener's side ----------------------------------------------------------------


class Told:
    """Takes notifications of the priorities that oslo.messaging lets an endpoint have."""

    def __init__(self, mouth: Mouth) -> None:
        for priority in ("audit", "debug", "info", "warn", "error", "critical", "sample"):
            setattr(self, priority, self._taker(mouth, priority))

    def _taker(self, mouth: Mouth, priority: str) -> Callable[..., None]:
        def take(
            ctxt: Any, publisher_id: str, event_type: str, payload: Any, metadata: Data
        ) -> None:
            mouth.say(
                event="notified",
                priority=priority,
                ctxt=ctxt,
                publisher_id=publisher_id,
                event_type=event_type,
                payload=payload,
                metadata=metadata,
            )

        return take


# -- serializers ------------------------------------------------------------------------


class Labels(oslo_messaging.Serializer):
    """Shows each of its four steps in what it returns."""

    def serialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return {"sent by": _who(ctxt), "entity": entity}

    def deserialize_entity(self, ctxt: Any, entity: Any) -> Any:
        return {"read for": _who(ctxt), **entity}

    def serialize_context(self, ctxt: Any) -> Any:
        return {**ctxt, "serialized": True}

    def deserialize_context(self, ctxt: Any) -> Any:
        return {**ctxt, "deserialized": True}


class ContextAsData(oslo_messaging.NoOpSerializer):
    """For contexts that are objects, as those of OpenStack's services."""

    def serialize_context(self, ctxt: Any) -> Any:
        return ctxt.to_dict()


def _who(ctxt: Any) -> Any:
    return ctxt.get("user")


SERIALIZERS: Final[Mapping[str, Callable[[], Any]]] = {
    "none": oslo_messaging.NoOpSerializer,
    "labels": Labels,
    "objects": objects.Objects,
}


# -- commands ---------------------------------------------------------------------------


class Peer:
    """One transport, its servers and its clients."""

    def __init__(self, conf: Any, mouth: Mouth) -> None:
        self.gates = Gates()
        self._mouth = mouth
        self._transport = oslo_messaging.get_rpc_transport(
            conf, allowed_remote_exmods=conf.peer_exception_modules
        )
        self._serializer = SERIALIZERS[conf.peer_serializer]()
        self._servers: dict[str, RPCServer] = {}
        self._notifications: Any = None  # a transport of its own, made when it is used
        self._listeners: list[Any] = []
        self._conf = conf
        self._spans = _kept_spans() if conf.peer_spans else None

    def serve(
        self,
        server: str,
        topic: str,
        exchange: str | None = None,
        endpoints: Mapping[str, Data] | None = None,
        policy: str | None = None,
    ) -> None:
        """Serve endpoints, by their name the place of each; ready when it returns."""
        recording = type("Server", (RecordingServer,), {"mouth": self._mouth})
        places = {"endpoint": {}} if endpoints is None else endpoints
        self._servers[server] = oslo_messaging.get_rpc_server(
            self._transport,
            oslo_messaging.Target(topic=topic, server=server, exchange=exchange),
            [Endpoint(name, self, place) for name, place in places.items()],
            serializer=self._serializer,
            access_policy=POLICIES[policy] if policy else None,
            server_cls=recording,
        )
        self._servers[server].start()

    def stop(self, server: str) -> None:
        """`stop()` of a server: its poll loop ends."""
        self._servers[server].stop()

    def wait(self, server: str) -> None:
        """`wait()` of a server: its threads end, then its connection."""
        self._servers[server].wait()

    def open(self, gate: str) -> None:
        """Let those on that wait at a gate, and those that will."""
        self.gates.open(gate)

    def call(self, target: Data, options: Data, ctxt: Data, method: str, args: Data) -> Any:
        """Call; the answer, or what the client raises."""
        return self._client(target, options).call(ctxt, method, **objects.meant(args))

    def cast(self, target: Data, options: Data, ctxt: Data, method: str, args: Data) -> None:
        """Cast, or with `fanout` in the options send to all."""
        self._client(target, options).cast(ctxt, method, **objects.meant(args))

    def can_send(self, target: Data, options: Data, version: str) -> bool:
        """`can_send_version`."""
        return bool(self._client(target, options).can_send_version(version))

    def listen(self, topic: str) -> None:
        """Read the notifications of a topic; ready when it returns."""
        listener = oslo_messaging.get_notification_listener(
            self._notification_transport(),
            [oslo_messaging.Target(topic=topic)],
            [Told(self._mouth)],
        )
        listener.start()
        self._listeners.append(listener)

    def notify(
        self, topic: str, driver: str, publisher_id: str | None, priority: str, ctxt: Data,
        event_type: str, payload: Any,
    ) -> None:  # fmt: skip
        """Send one notification by a notifier of that driver: `messaging` or `messagingv2`."""
        notifier = oslo_messaging.Notifier(
            self._notification_transport(),
            publisher_id=publisher_id,
            driver=driver,
            topics=[topic],
            serializer=ContextAsData(),
        )
        # Of a context that is a dictionary a notifier sends nothing.
        getattr(notifier, priority)(RequestContext(**ctxt), event_type, payload)

    def _notification_transport(self) -> Any:
        if self._notifications is None:
            self._notifications = oslo_messaging.get_notification_transport(self._conf)
        return self._notifications

    def spans(self) -> list[dict[str, Any]]:
        """Spans that have ended."""
        assert self._spans is not None, "set peer_spans"
        return [json.loads(span.to_json()) for span in self._spans.get_finished_spans()]

    def _client(self, target: Data, options: Data) -> Any:
        client = oslo_messaging.get_rpc_client(
            self._transport, oslo_messaging.Target(**target), serializer=self._serializer
        )
        prepared = dict(options)
        if prepared.pop("at_least_once", False):
            prepared["transport_options"] = oslo_messaging.TransportOptions(at_least_once=True)
        return client.prepare(**prepared)

    def close(self) -> None:
        self.gates.open_all()
        for listener in self._listeners:
            listener.stop()
            listener.wait()
        if self._notifications is not None:
            self._notifications.cleanup()
        for server in self._servers.values():
            server.stop()
        for server in self._servers.values():
            server.wait()
        self._transport.cleanup()


def _kept_spans() -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


COMMANDS: Final = (
    *("serve", "stop", "wait", "open", "call", "cast", "can_send", "spans"),
    *("listen", "notify"),
)


def obey(peer: Peer, mouth: Mouth, command: dict[str, Any]) -> None:
    """Carry out one command and answer it."""
    number, do = command.pop("id"), command.pop("do")
    try:
        assert do in COMMANDS, do
        mouth.say(id=number, ok=getattr(peer, do)(**command))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        mouth.say(id=number, error=described(error))


def main() -> None:
    conf = cfg.CONF
    conf.register_opts(OPTIONS)
    conf(sys.argv[1:], project="peer", default_config_files=[])
    mouth = Mouth()
    peer = Peer(conf, mouth)
    mouth.say(event="ready")
    for line in sys.stdin:
        threading.Thread(target=obey, args=(peer, mouth, json.loads(line)), daemon=True).start()
    peer.close()


if __name__ == "__main__":
    main()
