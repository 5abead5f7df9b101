"""One frame of a broker, changed on its way to a client: what a faulty broker or a bad line does.

All is drawn from a seed. A `Mutator` stands in the stream of one connection, cuts it into frames,
passes them on, and changes one.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

METHOD, HEADER, BODY = 1, 2, 3
DELIVER: Final = b"\x00\x3c\x00\x3c"
_HEAD: Final = struct.Struct(">BHI")
_OVERHEAD: Final = 8
_SIZE_AT: Final = 3
_PAYLOAD_AT: Final = 7
_BODY_SIZE_AT: Final = 11


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, whole."""

    data: bytes

    @property
    def kind(self) -> str:
        """As tables of findings name it."""
        if self.data[1:3] == b"\x00\x00":
            return "connection"
        match self.data[0]:
            case 1:
                is_deliver = self.data[_PAYLOAD_AT : _PAYLOAD_AT + 4] == DELIVER
                return "deliver" if is_deliver else "answer"
            case 2:
                return "header"
            case 3:
                return "body"
        return "other"

    @property
    def tag_at(self) -> int:
        """Where a delivery tag begins."""
        return _PAYLOAD_AT + 5 + self.data[_PAYLOAD_AT + 4]


Change = Callable[[random.Random, bytearray, Frame], bytes]
ChangeFrame = Callable[[object, Frame], bytes]
"""Of one connection, whichever it is, one frame: what goes on in its place."""


def _bit(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    at = dice.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    return bytes(data)


def _byte(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def _envelope_bit(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    """In the first bytes, where types, numbers and sizes stand."""
    at = dice.randrange(8 * min(len(data), 32))
    data[at // 8] ^= 1 << at % 8
    return bytes(data)


def _drop(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    return b""


def _double(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    return bytes(data * 2)


def _cut(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    return bytes(data[: dice.randrange(len(data))])


def _shorten(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    """Some bytes fewer, and otherwise a good frame."""
    payload = data[_PAYLOAD_AT:-1]
    payload = payload[: dice.randrange(len(payload) + 1)]
    return _HEAD.pack(*_HEAD.unpack_from(data)[:2], len(payload)) + bytes(payload) + b"\xce"


def _size(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    (size,) = struct.unpack_from(">I", data, _SIZE_AT)
    wrong = dice.choice([0, size - 1, size + 1, size + 8, dice.randrange(1 << 17), 1 << 31])
    struct.pack_into(">I", data, _SIZE_AT, max(0, wrong))
    return bytes(data)


def _channel(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    struct.pack_into(">H", data, 1, dice.choice([*range(8), dice.randrange(1 << 16)]))
    return bytes(data)


def _type(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    data[0] = dice.choice([0, 1, 2, 3, 4, 8, dice.randrange(256)])
    return bytes(data)


def _tag(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    (tag,) = struct.unpack_from(">Q", data, frame.tag_at)
    wrong = dice.choice([0, 1, tag - 1, tag + 1, tag + 2, tag + 100, dice.randrange(1 << 64)])
    struct.pack_into(">Q", data, frame.tag_at, max(0, wrong))
    return bytes(data)


def _body_size(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    (size,) = struct.unpack_from(">Q", data, _BODY_SIZE_AT)
    wrong = dice.choice([0, 1, size - 1, size + 1, 2 * size, 1 << 30, dice.randrange(1 << 64)])
    struct.pack_into(">Q", data, _BODY_SIZE_AT, wrong)
    return bytes(data)


def _method(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    """A method that a broker may send, with the fields of this one."""
    ids = [(20, 40), (20, 41), (60, 30), (60, 31), (60, 50), (60, 60), (60, 80), (60, 120)]
    struct.pack_into(">HH", data, _PAYLOAD_AT, *dice.choice(ids))
    return bytes(data)


def _stray(dice: random.Random, data: bytearray, frame: Frame) -> bytes:
    """A frame of the broker's own beside it, for which nobody has asked."""
    payloads = [
        b"\x00\x14\x00\x29",  # Channel.CloseOk
        b"\x00\x3c\x00\x0b",  # Basic.QosOk
        b"\x00\x3c\x00\x1f\x011",  # Basic.CancelOk
        b"\x00\x3c\x00\x50" + struct.pack(">QB", dice.randrange(9), dice.randrange(2)),
    ]
    payload = dice.choice(payloads)
    stray = _HEAD.pack(METHOD, _HEAD.unpack_from(data)[1], len(payload)) + payload + b"\xce"
    return stray + bytes(data) if dice.randrange(2) else bytes(data) + stray


SWAP: Final = "swap"
_ANY: Final[Mapping[str, Change]] = {
    "bit": _bit,
    "byte": _byte,
    "envelope bit": _envelope_bit,
    "drop": _drop,
    "double": _double,
    "cut": _cut,
    "shorten": _shorten,
    "size": _size,
    "channel": _channel,
    "type": _type,
    "stray": _stray,
}
_CHANGES: Final[Mapping[str, Mapping[str, Change]]] = {
    "deliver": _ANY | {"tag": _tag, "method": _method},
    "header": _ANY | {"body size": _body_size},
    "body": _ANY,
    "answer": _ANY | {"method": _method},
}


class Mutator:
    """Changes one frame of one connection, and passes all others.

    Args:
        seed: Of what is drawn.

    Attributes:
        target: The kind of frame that is changed.
        name: What is done to it.
        done: What has been done, for people; empty as long as nothing has.
        alters: A message that the client cannot tell from a good one may have other contents.
    """

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self.target = self._dice.choices([*_CHANGES], weights=[4, 3, 3, 1])[0]
        self.name = self._dice.choice([*_CHANGES[self.target], SWAP])
        self._skip = self._dice.randrange(2 if self.target == "answer" else 6)
        self._holder: object = None
        self._held = b""
        self.done = ""
        self.alters = False

    def change(self, connection: object, frame: Frame) -> bytes:
        """What goes on in the place of *frame*."""
        if connection is self._holder:
            self._holder = None
            # Two pieces of one body: which comes first nobody can tell.
            self.alters = self.target == frame.kind == "body"
            return frame.data + self._held
        if self.done or frame.kind != self.target:
            return frame.data
        if self._skip:
            self._skip -= 1
            return frame.data
        self.done = f"{self.name} of {frame.kind}"
        if self.name == SWAP:
            self._holder, self._held = connection, frame.data
            return b""
        change = _CHANGES[self.target][self.name]
        changed = change(self._dice, bytearray(frame.data), frame)
        # Of a body that ends too early, heartbeats may be taken for the rest: they end alike.
        is_cut_body = self.name == "cut" and frame.kind == "body"
        self.alters = is_cut_body or _alters(frame.data, changed)
        return changed


def _alters(before: bytes, after: bytes) -> bool:
    """Whether both are good frames that differ in what the sender wrote, or seem to."""
    if len(after) < _OVERHEAD or after[-1] != before[-1] or after[:_SIZE_AT] != before[:_SIZE_AT]:
        return False
    if _HEAD.unpack_from(after)[2] != len(after) - _OVERHEAD:
        return False
    if before[0] == BODY:
        return len(before) == len(after)
    if Frame(before).kind == "deliver":
        key_at = _key_at(Frame(before))
        return before[:key_at] == after[:key_at] and before[key_at:] != after[key_at:]
    at = _BODY_SIZE_AT
    size = after[at : at + 8]
    return before[0] == HEADER and size in {before[at : at + 8], bytes(8)}


def _key_at(deliver: Frame) -> int:
    """Where the routing key begins: behind delivery tag, `redelivered` and exchange."""
    exchange_at = deliver.tag_at + 9
    return exchange_at + 2 + deliver.data[exchange_at]


class Splitter:
    """Cuts one connection's stream into frames, and has each changed."""

    def __init__(self, change: ChangeFrame) -> None:
        self._change = change
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What goes on of the whole frames so far."""
        self._rest += piece
        found: list[bytes] = []
        while len(self._rest) >= _OVERHEAD:
            end = _HEAD.unpack_from(self._rest)[2] + _OVERHEAD
            if len(self._rest) < end:
                break
            found.append(self._change(self, Frame(self._rest[:end])))
            self._rest = self._rest[end:]
        return b"".join(found)
