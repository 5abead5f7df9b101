"""What a broker's words mean: refusals, profiles and versions, without a broker.

MEASURED are answers of RabbitMQ 3.10.8. READ are those of 4.x: read in its source (4.3.5) and in
reports of its users, never heard from a broker here. What the first say is tried in
`test_broker.py` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from gracekit import Context, Service
from gracekit.doctor import rabbit_version
from gracekit.doctor.finding import Level
from gracekit.doctor.rabbit_entities import (
    BrokerAnswer,
    BrokerEntity,
    Fit,
    Fits,
    Topic,
    check_profile,
    entities_of,
    listed,
    read_refusal,
)
from gracekit.rpc.amqp.profiles import PROFILES
from gracekit.rpc.transport import shared_queue

NAME = "'a' in vhost '/'"


def compared(argument: str, received: str, current: str, *, kind: str = "queue") -> str:
    """The refusal of a declare that differs from what exists."""
    return (
        f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {kind} {NAME}: "
        f"received {received} but current is {current}"
    )


def typed(value: str, kind: str = "longstr") -> str:
    return f"the value '{value}' of type '{kind}'"


def differs(argument: str, ours: str, theirs: str) -> BrokerAnswer:
    return BrokerAnswer(fit=Fit.DIFFERS, argument=argument, ours=ours, theirs=theirs)


NOT_A_STREAM = f"PRECONDITION_FAILED - invalid arg 'x-max-age' for queue {NAME} of queue type "

MEASURED = [
    (compared("durable", "'true'", "'false'"), differs("durable", "true", "false")),
    (
        compared("x-queue-type", "none", typed("quorum")),
        differs("x-queue-type", "none", "quorum"),
    ),
    (
        compared("x-dead-letter-exchange", typed(""), "none"),
        differs("x-dead-letter-exchange", "''", "none"),
    ),
    (
        compared("type", "'topic'", "'direct'", kind="exchange"),
        differs("type", "topic", "direct"),
    ),
    (
        compared("alternate-exchange", typed("1", "byte"), "none", kind="exchange"),
        BrokerAnswer(fit=Fit.FITS),
    ),
    (
        compared("alternate-exchange", "'1'", "'other'", kind="exchange"),
        differs("alternate-exchange", "none", "other"),
    ),
    (f"{NOT_A_STREAM}rabbit_classic_queue", BrokerAnswer(fit=Fit.MISSING)),
    (
        "PRECONDITION_FAILED - invalid type 'byte' for arg 'alternate-exchange' in exchange "
        + NAME,
        BrokerAnswer(fit=Fit.MISSING),
    ),
]

REFUSED_BY_DEFAULT = """INTERNAL_ERROR - Feature `transient_nonexcl_queues` is deprecated.
By default, this feature is not permitted anymore.
The feature will be removed from a future major RabbitMQ version, regardless of the configuration; \
actual version to be determined.
To..."""
REFUSED_BY_CHOICE = """INTERNAL_ERROR - Feature `transient_nonexcl_queues` is deprecated.
Its use is not permitted per the configuration (overriding the default, which is permitted):
    "deprecated_features.permit.transient_nonexcl_queues = false"
Its use will not be permit..."""

READ = [
    (compared("x-queue-type", "'classic'", "'quorum'"), Fit.DIFFERS),
    (compared("x-queue-type", typed("classic"), typed("stream")), Fit.DIFFERS),
    (f"{NOT_A_STREAM}rabbit_quorum_queue", Fit.MISSING),
    (f"ACCESS_REFUSED - configure access to queue {NAME} refused for the user", Fit.FORBIDDEN),
    (f"NOT_FOUND - no queue {NAME}", Fit.MISSING),
    (f"NOT_FOUND - no exchange {NAME}", Fit.MISSING),
    (f"NOT_FOUND - home node 'b@two' of durable queue {NAME} is down or inaccessible", Fit.DOWN),
    (f"NOT_FOUND - queue {NAME} has crashed and failed to restart", Fit.DOWN),
    (f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue {NAME}.", Fit.LOCKED),
    (REFUSED_BY_DEFAULT, Fit.DENIED),
    (REFUSED_BY_CHOICE, Fit.DENIED),
    (f"INTERNAL_ERROR - failed to declare queue {NAME}: the operation timed out", Fit.UNCLEAR),
    ("something else", Fit.UNCLEAR),
    ("", Fit.UNCLEAR),
]


@pytest.mark.parametrize(("text", "answer"), MEASURED)
def test_a_comparison_is_read_to_its_values(text, answer):
    """The first difference, with what we say and what is; the guard alone is no difference."""
    assert read_refusal(text) == answer


@pytest.mark.parametrize(("text", "fit"), READ)
def test_answers_of_rabbitmq_4_that_were_read_are_understood(text, fit):
    """None of them was heard from a broker: where one is put differently, it is shown as it is."""
    answer = read_refusal(text)

    assert answer.fit is fit
    if fit in {Fit.DOWN, Fit.LOCKED, Fit.FORBIDDEN, Fit.DENIED}:
        assert answer.said
        assert "\n" not in answer.said


def test_a_text_that_was_cut_still_names_the_argument():
    """A broker's text has 255 bytes: with long names nothing of the values is left."""
    cut = read_refusal(f"{compared('durable', '', '')[:70]}...")
    guard = read_refusal(f"{compared('alternate-exchange', '', '', kind='exchange')[:80]}...")

    assert (cut.fit, cut.difference) == (Fit.DIFFERS, "another durable")
    assert guard.fit is Fit.FITS


# -- profiles -----------------------------------------------------------------------

TOPICS = [Topic(name="compute", hosts=["node-1"], announced=[shared_queue("compute")])]
EXCHANGE, SHARED, DIRECTED, *REST = entities_of(TOPICS, "gracekit", "store")
OTHER = BrokerAnswer(fit=Fit.DIFFERS, argument="durable", ours="true", theirs="false")
ALL = tuple(PROFILES)


def as_declared_by(*names: str) -> dict[str, BrokerAnswer]:
    """Answers for a thing that only these profiles fit."""
    return {name: BrokerAnswer(fit=Fit.FITS) if name in names else OTHER for name in PROFILES}


def judged(
    fits: Fits,
    *,
    accepted: tuple[str, ...] = ALL,
    in_url: bool = False,
    found: Mapping[BrokerEntity, BrokerAnswer] = MappingProxyType({}),
):
    return check_profile("durable", fits, found=found, accepted=accepted, in_url=in_url)


def test_nothing_there_is_told_as_such():
    """The first start makes everything."""
    found = judged({})

    assert (found.level, found.seen) == (
        Level.OK,
        "durable; none of its queues and exchanges exists yet",
    )


def test_the_profile_that_fits_all_is_named_with_what_differs():
    """What fits one thing alone is not proposed; the two ways out are both told."""
    found = judged(
        {
            EXCHANGE: as_declared_by("durable", "oslo-durable", "oslo-quorum"),
            SHARED: as_declared_by("oslo-durable"),
            DIRECTED: as_declared_by("oslo-durable"),
        }
    )

    assert found.level is Level.FAIL
    assert found.seen == (
        "profile durable would be refused (406): queue compute, queue compute.node-1 have "
        "durable = false instead of true; all that exists is as oslo-durable declares it"
    )
    assert found.remedy == (
        "set GRACEKIT_DECLARE_PROFILE=oslo-durable, or delete queue compute, queue compute.node-1 "
        "once empty and unused; the next start declares anew"
    )


def test_a_profile_in_the_url_is_mended_there():
    """The setting counts only where the URL says nothing."""
    fits = {SHARED: as_declared_by("oslo-quorum", "oslo-quorum-all")}

    found = judged(fits, in_url=True)

    assert found.remedy.startswith(
        "write profile=oslo-quorum (or oslo-quorum-all) into the transport URL, in place of"
    )


def test_where_no_profile_fits_all_the_nearest_is_named():
    """With what differs from it first; nothing is named for deletion, as others may use it."""
    found = judged(
        {
            EXCHANGE: as_declared_by("oslo-transient"),
            SHARED: as_declared_by("quorum"),
            DIRECTED: as_declared_by("quorum"),
            REST[0]: as_declared_by(),
            REST[1]: as_declared_by(*ALL[1:]),
            REST[2]: as_declared_by(*ALL),
        }
    )

    assert found.level is Level.FAIL
    assert found.seen.endswith(
        "no profile fits all; nearest is quorum, but exchange gracekit has durable = false instead "
        "of true"
    )
    assert "gracekit" not in found.remedy


def test_a_profile_that_the_version_refuses_is_not_proposed():
    """Setting it would only lead to the next refusal."""
    fits = {SHARED: as_declared_by("oslo-durable")}

    found = judged(fits, accepted=("durable", "quorum", "oslo-quorum-all"))

    assert found.level is Level.FAIL
    assert "as oslo-durable declares it, and that has transient queues" in found.seen
    assert found.remedy.startswith("delete queue compute once empty and unused")


def test_long_lists_end_in_a_number():
    """A finding is a sentence."""
    things = [BrokerEntity("queue", str(number), lambda _: None) for number in range(7)]

    assert listed(things).endswith("queue 4 and 2 more")


# -- versions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "version", "level", "said"),
    [
        ("RabbitMQ", "3.10.8", Level.OK, "RabbitMQ 3.10.8"),
        ("RabbitMQ", "3.9.0", Level.WARN, "3.10.8 is the oldest tried"),
        ("RabbitMQ", "4.3.0-rc.1", Level.OK, "what is said of later versions was read"),
        ("RabbitMQ", "", Level.SKIP, "calls itself RabbitMQ"),
        ("LavinMQ", "2.0.0", Level.SKIP, "calls itself LavinMQ 2.0.0"),
        ("", "", Level.SKIP, "calls itself nothing"),
    ],
)
def test_what_was_tried_is_told_from_what_was_read(product, version, level, said):
    """A finding on a later RabbitMQ rests on its documentation, and says so."""
    found = rabbit_version.check_version(product, version)

    assert found.level is level
    assert said in found.seen


@pytest.mark.parametrize("version", ["4.3.0", "4.3.5", "4.10.0", "5.0"])
@pytest.mark.parametrize(
    ("profile", "level"),
    [
        ("durable", Level.OK),
        ("quorum", Level.OK),
        ("oslo-quorum-all", Level.OK),
        ("oslo-transient", Level.FAIL),
        ("oslo-durable", Level.FAIL),
        ("oslo-quorum", Level.FAIL),
    ],
)
def test_rabbitmq_4_3_refuses_profiles_with_transient_queues(profile, version, level):
    """The remedy names our setting and oslo's, for both sides declare. Read, not measured."""
    found = rabbit_version.check_transient(PROFILES[profile], version, fitting=ALL, permitted=False)

    assert found.level is level
    if level is Level.FAIL:
        for word in (
            "GRACEKIT_DECLARE_PROFILE to durable, quorum, oslo-durable-all or oslo-quorum-all",
            "amqp_durable_queues=true",
            "rabbit_transient_quorum_queue=true",
            "deprecated_features.permit.transient_nonexcl_queues = true",
        ):
            assert word in found.remedy
        assert ("fanout and reply queues" in found.seen) == (profile != "oslo-transient")


@pytest.mark.parametrize("version", ["3.10.8", "3.13.7", "4.0.5", "4.2.1"])
def test_earlier_versions_take_transient_queues(version):
    """And the line says what an upgrade will bring."""
    found = rabbit_version.check_transient(
        PROFILES["oslo-durable"], version, fitting=ALL, permitted=False
    )

    assert found.level is Level.OK
    assert "4.3 and later do not" in found.seen


def test_transient_queues_that_are_there_are_permitted():
    """An operator may let them in, so a service that runs with them is no FAIL."""
    found = rabbit_version.check_transient(
        PROFILES["oslo-transient"], "4.3.5", fitting=ALL, permitted=True
    )

    assert found.level is Level.WARN


def test_the_remedy_for_4_3_is_a_profile_that_also_fits_what_exists():
    """Else the next start would be refused with 406 in place of 541."""
    profile = PROFILES["oslo-quorum"]

    fits = rabbit_version.check_transient(
        profile, "4.3.5", fitting=("oslo-quorum", "oslo-quorum-all"), permitted=False
    )
    none = rabbit_version.check_transient(profile, "4.3.5", fitting=(), permitted=False)

    assert "GRACEKIT_DECLARE_PROFILE to oslo-quorum-all, as what exists is declared" in fits.remedy
    assert "delete what exists otherwise" in none.remedy


@pytest.mark.parametrize(
    ("profile", "version", "level"),
    [
        ("durable", "4.1.0", None),
        ("quorum", "3.13.7", None),
        ("quorum", "4.0.5", Level.OK),
        ("oslo-quorum", "4.0.5", Level.WARN),
        ("oslo-quorum-all", "4.3.5", Level.WARN),
    ],
)
def test_a_delivery_limit_without_dead_letters_is_a_warning(profile, version, level):
    """RabbitMQ 4 drops what a quorum queue has delivered 20 times. Read, not measured."""
    found = list(
        rabbit_version.check_delivery_limit(PROFILES[profile], rabbit_version.read_version(version))
    )

    assert [one.level for one in found] == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("options", "profile", "version", "level"),
    [
        ({"on_interrupt": "error"}, "durable", "3.10.8", None),
        ({"on_interrupt": "requeue"}, "durable", "3.10.8", Level.WARN),
        ({"on_interrupt": "requeue", "timeout": "16m"}, "durable", "3.10.8", Level.WARN),
        ({"on_interrupt": "requeue", "timeout": "15m"}, "durable", "3.10.8", Level.OK),
        ({"on_interrupt": "requeue"}, "durable", "4.3.0", Level.OK),
        ({"on_interrupt": "requeue"}, "quorum", "4.3.0", Level.WARN),
    ],
)
def test_what_is_acked_when_done_must_end_before_the_broker_loses_patience(
    options, profile, version, level
):
    """The broker's own value is not told over AMQP, so its default is the measure."""
    svc = Service("compute")

    @svc.rpc(**options)
    async def peek(ctx: Context) -> None: ...

    found = list(
        rabbit_version.check_consumer_timeout(
            PROFILES[profile], rabbit_version.read_version(version), svc.methods
        )
    )

    assert [one.level for one in found] == ([] if level is None else [level])


def test_the_task_api_is_not_warned_of_the_brokers_patience():
    """Its methods are gracekit's own: nobody can give them a time-out, and none lasts."""
    svc = Service("compute", task_api=True)

    found = rabbit_version.check_consumer_timeout(
        PROFILES["durable"], rabbit_version.read_version("3.10.8"), svc.methods
    )

    assert list(found) == []
