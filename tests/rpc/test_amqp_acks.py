"""Which frames acks leave as: as few as are right, and never one for a tag that is not settled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gracekit.rpc.amqp.intake import grouped


def test_a_run_without_a_gap_is_one_frame():
    """Everything below the lowest unsettled tag may go together."""
    assert grouped([3, 4, 5], 6) == [(5, True)]
    assert grouped([3, 4, 5], None) == [(5, True)]
    assert grouped([3], 4) == [(3, False)]


def test_what_lies_beyond_a_gap_goes_alone():
    """`multiple` would settle the gap too, and lose it."""
    assert grouped([1, 2, 4, 5], 3) == [(2, True), (4, False), (5, False)]
    assert grouped([4, 5], 3) == [(4, False), (5, False)]


class Broker:
    """What RabbitMQ 3.10 does with acks: all up to the tag, which it must still hold."""

    def __init__(self, number: int) -> None:
        self.held = set(range(1, number + 1))

    def ack(self, tag: int, *, multiple: bool) -> set[int]:
        assert tag in self.held, "406: unknown delivery tag"
        acked = {held for held in self.held if held <= tag} if multiple else {tag}
        self.held -= acked
        return acked


@given(st.lists(st.lists(st.integers(1, 30), max_size=8), max_size=12), st.data())
def test_any_order_of_settling_acks_what_was_acked_and_nothing_else(rounds, data):
    """Turns of the loop, each with its acks and nacks in any order: the broker ends with what is
    open.
    """
    broker = Broker(30)
    unsettled = dict.fromkeys(range(1, 31))
    for tags in rounds:
        acked = []
        for tag in tags:
            if tag not in unsettled:
                continue
            del unsettled[tag]
            if data.draw(st.booleans()):
                broker.held.discard(tag)  # a nack leaves at once
            else:
                acked.append(tag)
        told: set[int] = set()
        for tag, multiple in grouped(sorted(acked), next(iter(unsettled), None)):
            told |= broker.ack(tag, multiple=multiple)
        assert told == set(acked)
    assert broker.held == set(unsettled)
