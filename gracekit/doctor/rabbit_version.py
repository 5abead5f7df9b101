"""Checks that depend on the version of RabbitMQ.

They were tested only with 3.10.8. Statements about later versions come from their documentation,
release notes and source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from gracekit.config.values import format_duration
from gracekit.doctor.declared import declared_ones, named
from gracekit.doctor.finding import Finding, fail, ok, skip, warn
from gracekit.rpc.amqp.profiles import PROFILES, Profile
from gracekit.rpc.methods import Method

Version = tuple[int, ...]
"""`(3, 10, 8)`; empty if it is not known."""

TRIED: Final = "3.10.8"
OLDEST: Final[Version] = (3, 10)
NO_TRANSIENT: Final[Version] = (4, 3)
"""The first version that refuses queues which are neither durable nor exclusive."""
DELIVERY_LIMIT: Final[Version] = (4, 0)
"""The first version whose quorum queues drop or dead-letter a message after 20 deliveries."""
NO_TIMEOUT_ON_CLASSIC: Final[Version] = (4, 3)
CONSUMER_TIMEOUT_S: Final = 1800.0
"""The default; AMQP cannot query a broker's setting."""

PERMIT: Final = "deprecated_features.permit.transient_nonexcl_queues = true"


def read_version(text: str) -> Version:
    """`(4, 3, 0)` of `4.3.0-rc.1`."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found is not None else ()


def is_quorum(profile: Profile) -> bool:
    """Whether the profile's request queues are quorum queues."""
    return profile.topic.arguments.get("x-queue-type") == "quorum"


def is_accepted(profile: Profile, version: Version) -> bool:
    """Whether a broker of that version, with its defaults, accepts all queues of *profile*."""
    return version < NO_TRANSIENT or (profile.topic.durable and profile.own.durable)


def accepted(version: Version) -> list[str]:
    """Names of the profiles that a broker of that version accepts."""
    return [name for name, profile in PROFILES.items() if is_accepted(profile, version)]


def check_version(product: str, said: str) -> Finding:
    """Check product and version of the broker."""
    version = read_version(said)
    if product != "RabbitMQ" or not version:
        return skip(
            "version",
            f"it calls itself {product or 'nothing'} {said}".rstrip(),
            "use RabbitMQ: nothing is known of others here",
        )
    shown = f"RabbitMQ {said}"
    if version < OLDEST:
        return warn("version", f"{shown}, and {TRIED} is the oldest tried", "upgrade the broker")
    if version[:2] > OLDEST:
        shown += f"; tried with {TRIED}, and what is said of later versions was read"
    return ok("version", shown)


def check_transient(
    profile: Profile, said: str, *, fitting: Sequence[str], permitted: bool
) -> Finding:
    """Check for queues that a broker of that version refuses.

    Args:
        profile: Our profile.
        said: The version, as the broker reports it.
        fitting: Names of the profiles that fit the existing entities.
        permitted: Whether our service has such a queue, so that the broker must permit them.
    """
    check, version = "transient queues", read_version(said)
    if is_accepted(profile, NO_TRANSIENT):
        return ok(check, f"profile {profile.name} has none")
    which = "fanout and reply queues" if profile.topic.durable else "queues"
    if is_accepted(profile, version):
        seen = (
            f"{which} of profile {profile.name}; RabbitMQ {said} takes them, 4.3 and later do not"
        )
        return ok(check, seen)
    seen = (
        f"RabbitMQ {said} refuses queues that are neither durable nor exclusive (541, and the "
        f"connection is closed), and profile {profile.name} declares its {which} so"
    )
    known = accepted(version)
    usable = [name for name in known if name in fitting]
    if usable:
        choice = _either(usable) + (", as what exists is declared" if usable != known else "")
    else:
        choice = f"{_either(known)}, and delete what exists otherwise once empty and unused"
    remedy = (
        f"set GRACEKIT_DECLARE_PROFILE to {choice}; for oslo.messaging "
        "amqp_durable_queues=true and rabbit_transient_quorum_queue=true (oslo-quorum-all is what "
        "it declares with rabbit_quorum_queue=true too); or have the broker permit them, while "
        f"it can: {PERMIT}"
    )
    if permitted:
        return warn(check, f"{seen}; this broker permits them, for there are some", remedy)
    return fail(check, seen, remedy)


def check_delivery_limit(profile: Profile, version: Version) -> Iterator[Finding]:
    """Check for quorum queues that drop messages after too many deliveries."""
    if not is_quorum(profile) or version < DELIVERY_LIMIT:
        return
    check = "delivery limit"
    limit = "a quorum queue of RabbitMQ 4 gives up a message after 20 deliveries, unless a policy"
    if profile.dead_letters:
        yield ok(check, f"{limit} says otherwise; it goes to the dead-letter queue then")
    else:
        yield warn(
            check,
            f"{limit} says otherwise, and profile {profile.name} has no dead-letter queue: it is "
            "then lost, without any notice",
            "set a policy with dead-letter-exchange on the topics' queues (rabbitmqctl "
            "set_policy), or use profile quorum where every peer can",
        )


def check_consumer_timeout(
    profile: Profile, version: Version, methods: Iterable[Method[Any, Any]]
) -> Iterator[Finding]:
    """Check methods that are acked at their end against the broker's consumer_timeout."""
    check = "consumer_timeout"
    # Without gracekit's own methods, which are quick and cannot be given a timeout=.
    kept = [m for m in declared_ones(methods) if m.options.on_interrupt == "requeue"]
    if not kept:
        return
    if version >= NO_TIMEOUT_ON_CLASSIC and not is_quorum(profile):
        yield ok(check, "RabbitMQ 4.3 and later have none on classic queues")
        return
    half = CONSUMER_TIMEOUT_S / 2
    slow = [method for method in kept if (method.options.timeout_s or math.inf) > half]
    bound = f"{format_duration(half)}, half of the default of {format_duration(CONSUMER_TIMEOUT_S)}"
    unseen = "this broker's own setting cannot be read over AMQP"
    if slow:
        yield warn(
            check,
            f"{named(slow)}: on_interrupt='requeue', so acked when done, without a timeout= of at "
            f"most {bound} ({unseen}): one that lasts longer loses its channel, and what is "
            "unacked there is delivered again",
            "say timeout=, or another on_interrupt=; the broker's value: rabbitmqctl environment "
            "| grep consumer_timeout",
        )
    else:
        yield ok(check, f"each requeue method ends within {bound}; {unseen}")


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)
