"""Workers on RabbitMQ side by side: the bench runs, and sends what their libraries send."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from pamqp.commands import Basic

from benchmarks.caller import Envelope, Replayed, Sent
from benchmarks.judged import GOALS, UNITS
from benchmarks.measure import Goal, against
from benchmarks.plain import SAMPLE_ID
from benchmarks.rabbitmq import main
from benchmarks.standings import OWN, Standing, draw, rate_of_calls, side_by_side
from benchmarks.table import lines
from benchmarks.workers import BARE, KINDS, OURS
from gracekit.rpc.oslo_wire import decode_request
from tests.rabbit import erlang

QUICK = ("--quick", "--rounds", "1")


@pytest.mark.process
@pytest.mark.timeout(300)
def test_workers_take_turns_and_tell_their_figures(tmp_path: Path):
    """With tiny sizes it runs to its end, with a library in another environment among them."""
    told, picture = tmp_path / "told.json", tmp_path / "told.svg"
    names = ("requeue", "retry-defaults", "oslo.messaging")
    files = ("--json", str(told), "--svg", str(picture))

    assert main([*names, *QUICK, "--dir", str(tmp_path), *files]) == 0

    found: dict[str, Any] = json.loads(told.read_text())
    assert set(found["workers"]) == {*names, BARE}
    for worker in found["workers"].values():
        for values in worker["values"].values():
            assert all(math.isfinite(value) for value in values), worker
    judged = {figure["case"] for figure in found["figures"] if figure["goal"] is not None}
    assert {
        "requeue, processor time of a cast",
        "requeue, casts / oslo.messaging",
        "requeue, memory of a request in flight",
        "retry-defaults, processor time of a cast",
        "retry-defaults, p50 of a call, 1, own client",
        "requeue, client's processor time of a call, 32",
        "client's processor time of a cast / an unconfirmed publish",
        "requeue, idle",
        "gracekit run, exec to the first message",
    } <= judged
    assert all(min(worker["values"]["casts"]) > 0 for worker in found["workers"].values())
    assert "oslo.messaging" in found["machine"]
    assert found["machine"]["RabbitMQ"].endswith(", schedulers: 2")
    assert "requeue, cast" in found["stages"]
    own = rate_of_calls(32) + OWN
    assert all(min(worker["values"][own]) > 0 for worker in found["workers"].values())
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_where_no_broker_is_installed_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There is nothing that it could measure."""
    monkeypatch.setattr(erlang, "_DEBIAN", "no/such/place")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SystemExit, match="There is no RabbitMQ"):
        main([BARE, *QUICK, "--dir", str(tmp_path)])


def test_an_unknown_worker_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    """The names that there are stand in the message."""
    with pytest.raises(SystemExit):
        main(["selery"])
    assert "no worker 'selery': there are requeue, requeue-uvloop" in capsys.readouterr().err


def test_goals_name_workers_that_there_are():
    """Else a goal would silently not be judged."""
    for ours, _, other in GOALS:
        assert ours in OURS
        assert other in KINDS


def test_goals_name_cases_that_are_measured():
    """Likewise."""
    assert {case for _, case, _ in GOALS} <= set(UNITS)


# -- what is sent -----------------------------------------------------------------------


def test_a_library_s_message_is_sent_again_with_another_id():
    """Wherever the sample's id stands, in body, headers and properties, and nothing else
    changes.
    """
    headers = {"id": SAMPLE_ID, "lang": "py", "deep": [{"root": f"<{SAMPLE_ID}>"}], "retries": 0}
    properties = Basic.Properties(correlation_id=SAMPLE_ID, headers=headers, delivery_mode=2)
    sample = Sent("tasks", "work", b'{"id": "%s", "n": 1}' % SAMPLE_ID.encode(), properties)

    sent = Replayed(sample, None).cast("other")

    assert (sent.exchange, sent.routing_key, sent.body) == (
        "tasks",
        "work",
        b'{"id": "other", "n": 1}',
    )
    assert sent.properties.correlation_id == "other"
    assert sent.properties.delivery_mode == 2
    deep = [{"root": "<other>"}]
    assert sent.properties.headers == {"id": "other", "lang": "py", "deep": deep, "retries": 0}
    assert sample.properties.correlation_id == SAMPLE_ID


def test_a_library_s_call_is_answered_to_who_sends_it_again():
    """The queue for replies is its own, and not the one that the sample named."""
    sample = Sent("", "work", b"{}", Basic.Properties(reply_to=SAMPLE_ID))

    sent = Replayed(sample, sample).call("one", "mine")

    assert sent.properties.reply_to == "mine"


def test_an_envelope_asks_for_a_reply_only_in_a_call():
    """A cast that did would be a call whose answer nobody reads."""
    wire = Envelope("openstack", "work")

    assert decode_request(wire.cast("one").body).reply is None
    reply = decode_request(wire.call("two", "mine").body).reply
    assert reply is not None
    assert (reply.queue, reply.msg_id) == ("mine", "two")


# -- what is shown ----------------------------------------------------------------------


def standings() -> list[Standing]:
    return [
        Standing("a < b", ours=True, values={"casts": [3.0, 1.0, 2.0], "calls, 32 waiting": [9.0]}),
        Standing("without calls", ours=False, values={"casts": [4.0, 4.0, 4.0]}),
    ]


def test_side_by_side_stand_medians_and_blanks():
    """A worker that takes no calls has empty cells, and as many as the others."""
    head, _, first, second = side_by_side(standings())

    assert first.startswith("| a < b | 2 |")
    assert second.startswith("| without calls | 4 |  |")
    assert len({line.count("|") for line in (head, first, second)}) == 1


def test_the_picture_of_workers_is_well_formed():
    """Markup in a name is text; who has no such figure has no bar."""
    root = ET.fromstring(draw(standings(), {"python": "<3>"}))

    texts = [element.text for element in root.iter() if element.text]
    assert texts.count("a < b") == 2
    assert texts.count("without calls") == 1
    assert "python <3>" in texts


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.4, "beyond"), (0.5, "beyond"), (0.8, "met"), (1.2, "MISSED")]
)
def test_what_is_beyond_a_goal_is_said(ratio: float, verdict: str):
    """The table names both limits."""
    goal = Goal(1.0, beyond=0.5)

    line = lines([against("b", "c", [(ratio, 1.0)], "us", goal)])[-1]

    assert "| <= 1 (0.5) |" in line
    assert verdict in line
