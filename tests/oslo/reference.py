"""One request, asked of both: oslo's own server, and gracekit with the endpoints included.

Both get the same bytes, and give back what they would put on the wire; no broker is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging._drivers import amqp, common
from oslo_messaging.rpc.server import RPCServer

from gracekit import Service
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.oslo_adapter import include_endpoints
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import Delivery, Message, reply_queue, shared_queue
from tests.service.kit import PlayedProcess, World

REPLIES = "reply_" + 32 * "a"


@dataclass(frozen=True)
class Answer:
    """What a caller gets.

    Attributes:
        result: Beside a failure None.
        failure: Class, module, message, args and kwargs; None if there is none.
    """

    result: Any = None
    failure: dict[str, Any] | None = None

    @property
    def kind(self) -> tuple[str, str] | None:
        """The failure's class and module, which callers go by."""
        return None if self.failure is None else (self.failure["class"], self.failure["module"])


def a_request(method: str, args: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A call on the wire."""
    reply = ReplyAddress(queue=REPLIES, msg_id=32 * "b")
    request = Request(request_id=32 * "c", method=method, args=args or {}, reply=reply, **fields)
    return encode_request(request)


def read(body: str | bytes) -> Answer:
    """A reply, without the traceback's lines, which name files."""
    message = json.loads(json.loads(body)["oslo.message"])
    failure = message["failure"] and json.loads(message["failure"])
    if failure is not None:
        assert failure.pop("tb")
    return Answer(message["result"], failure)


# -- oslo -------------------------------------------------------------------------------


class _Incoming:
    """A message as oslo's driver hands it on."""

    def __init__(self, body: bytes) -> None:
        message = common.deserialize_msg(json.loads(body))
        ctxt = amqp.unpack_context(message)
        self.ctxt = ctxt.to_dict()
        self.message = message
        self.msg_id = ctxt.msg_id
        self.client_timeout = ctxt.client_timeout
        self.answer: Answer | None = None

    def acknowledge(self) -> None: ...

    def reply(self, reply: Any = None, failure: Any = None) -> None:
        text = common.serialize_remote_exception(failure) if failure else None
        message = common.serialize_msg({"result": reply, "failure": text})
        self.answer = read(json.dumps(message))


def ask_oslo(
    endpoints: Sequence[object], body: bytes, *, serializer: Any = None, access_policy: Any = None
) -> Answer | None:
    """What its server replies; None if that comes to nothing, and the caller waits in vain."""
    transport = oslo_messaging.get_rpc_transport(cfg.CONF, "fake:/")
    dispatcher = oslo_messaging.RPCDispatcher(list(endpoints), serializer, access_policy)
    server = RPCServer(transport, oslo_messaging.Target(topic="shop", server="a"), dispatcher)
    incoming = _Incoming(body)
    try:
        server._process_incoming([incoming])
    except SystemExit:
        pass  # it ends in the future of a thread that nobody reads
    finally:
        transport.cleanup()
    return incoming.answer


# -- gracekit ---------------------------------------------------------------------------


async def ask_gracekit(
    world: World, endpoints: Sequence[object], body: bytes, **options: Any
) -> Answer:
    """What a service replies, in virtual time."""
    svc = Service("shop")
    include_endpoints(svc, endpoints, **options)
    life = await world.start(svc)
    replies: list[Delivery] = []
    transport = MemoryTransport(world.broker, PlayedProcess(set(), 2))
    await transport.start()
    await transport.consume([reply_queue(REPLIES)], replies.append, prefetch=10)
    await transport.publish(shared_queue("shop"), Message(body=body))
    await world.until(lambda: bool(replies))
    await life.drain()
    (reply,) = replies
    await reply.ack()
    await transport.stop()
    return read(reply.body)
