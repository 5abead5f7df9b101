"""docs/rabbitmq.md: its table of profiles. Its permissions are tried in tests/rabbit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gracekit.config.oslo import DURABLE_OPTIONS, oslo_profile
from gracekit.rpc.amqp.profiles import PROFILES, Profile, QueueFlags, dead_letter_queue
from tests.docs.pages import Page
from tests.docs.tables import section, tables

PAGE: Final = Page("rabbitmq.md").text


def words(flags: QueueFlags) -> str:
    """`classic, durable, expire`; quorum queues are always durable."""
    kind = flags.arguments.get("x-queue-type", "classic")
    durable = "durable" if flags.durable else "transient"
    parts = [kind] if kind == "quorum" else [kind, durable]
    return ", ".join([*parts, *(["expire"] if "x-expires" in flags.arguments else [])])


def row_of(profile: Profile) -> list[str]:
    durable = {True: "durable", False: "transient"}
    dead = dead_letter_queue("<topic>") if profile.dead_letters else "no"
    exchanges = [durable[profile.exchange_durable], durable[profile.fanout_durable]]
    return [profile.name, *exchanges, words(profile.topic), words(profile.own), dead]


def options_of(cell: str) -> Mapping[str, bool]:
    return {name: name in re.split(r"\W+", cell) for name in DURABLE_OPTIONS}


def test_the_table_of_profiles_says_what_each_declares():
    """The flags of its exchanges and queues, and which options of oslo.messaging mean it."""
    (found,) = tables(section(PAGE, "Declare profiles").partition("### ")[0])

    shown = [[cell.replace(" after 30 min", "") for cell in row] for row in found]
    assert [[row[0].split()[0], *row[1:]] for row in shown] == list(map(row_of, PROFILES.values()))
    for name, *_ in found:
        if name.startswith("oslo"):
            assert oslo_profile(options_of(name)) == name.split()[0]
