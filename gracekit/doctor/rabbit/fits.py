"""Decides which declare profile fits the existing entities on a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gracekit.doctor.finding import Finding, fail, ok, skip
from gracekit.doctor.rabbit.answers import BrokerAnswer, Fit
from gracekit.doctor.rabbit.entities import SHOWN, BrokerEntity, listed
from gracekit.doctor.rabbit.versions import is_quorum
from gracekit.rpc.amqp.profiles import PROFILES

CHECK: Final = "profile"

_OSLO_OPTIONS: Final = MappingProxyType(
    {
        "x-delivery-limit": "rabbit_quorum_delivery_limit",
        "x-max-in-memory-length": "rabbit_quorum_max_memory_length",
        "x-max-in-memory-bytes": "rabbit_quorum_max_memory_bytes",
    }
)
"""Arguments that no profile declares, and the options of oslo.messaging that do."""

Fits = Mapping[BrokerEntity, Mapping[str, BrokerAnswer]]
"""For each existing entity, by profile: how it compares with what the profile declares."""


def check_profile(
    ours: str,
    fits: Fits,
    *,
    found: Mapping[BrokerEntity, BrokerAnswer],
    accepted: Sequence[str],
    in_url: bool = False,
) -> Finding:
    """Check whether a start will be refused (406), and which profile would not be.

    Args:
        ours: Name of our profile.
        fits: Must contain *ours*, and all other profiles if *ours* differs anywhere.
        found: For each existing entity, its numbers of messages and consumers.
        accepted: Names of the profiles that the broker's version accepts.
        in_url: Whether the transport URL, and not the setting, names the profile.
    """
    if not fits:
        return ok(CHECK, f"{ours}; none of its queues and exchanges exists yet")
    wrong = _wrong(fits, ours)
    if not wrong:
        known = [entity for entity, answers in fits.items() if answers[ours].fit is Fit.FITS]
        if not known:
            return skip(CHECK, "nothing of what exists could be compared, see above")
        return ok(CHECK, f"{ours} fits what exists: {listed(known)}")
    seen = f"profile {ours} would be refused (406): {_different(fits, ours, wrong)}"
    fit = fitting(fits)
    usable = [name for name in fit if name in accepted]
    if usable:
        exists = f"{seen}; all that exists is as {_or(usable)} declares it"
        choose = _choose(usable, in_url=in_url)
        free = not _used_by_others(wrong, found)
        return fail(CHECK, exists, f"{choose}, or {_delete(wrong)}" if free else choose)
    if fit:
        exists = (
            f"{seen}; all that exists is as {_or(fit)} declares it, and that has transient queues"
        )
        stop = "stop everything that uses them, and " if _used_by_others(wrong, found) else ""
        seen = f"{exists}, which this broker's version refuses"
        return fail(CHECK, seen, f"{stop}{_delete(wrong)}")
    return fail(
        CHECK, f"{seen}; no profile fits all: {_each(fits)}", _mend_one(fits, found, accepted)
    )


def fitting(fits: Fits) -> list[str]:
    """Names of the profiles that fit all existing entities."""
    compared = [name for name in PROFILES if all(name in answers for answers in fits.values())]
    return [name for name in compared if not _wrong(fits, name)]


def _wrong(fits: Fits, profile: str) -> list[BrokerEntity]:
    return [entity for entity, answers in fits.items() if answers[profile].fit is Fit.DIFFERS]


def _limited(fits: Fits, profile: str) -> Mapping[BrokerEntity, str]:
    """The queues that differ from *profile* only by an option of oslo.messaging that none has.

    RabbitMQ names the first difference, so a queue may have more than one of these arguments.
    """
    if not is_quorum(PROFILES[profile]):
        return {}
    differing = {entity: fits[entity][profile].argument for entity in _wrong(fits, profile)}
    return {entity: name for entity, name in differing.items() if name in _OSLO_OPTIONS}


def _used_by_others(
    entities: Sequence[BrokerEntity], found: Mapping[BrokerEntity, BrokerAnswer]
) -> list[BrokerEntity]:
    """Those that must not be deleted while others run: the control exchange, queues with readers.

    If the control exchange is deleted, all services of the deployment lose their bindings.
    """
    return [one for one in entities if one.is_common or (one in found and found[one].consumers)]


def _delete(entities: Sequence[BrokerEntity]) -> str:
    listing = listed(entities, len(entities))
    return f"delete {listing} once empty and unused; the next start declares anew"


def _different(fits: Fits, ours: str, wrong: Sequence[BrokerEntity]) -> str:
    """`queue a, queue b have durable = false instead of true, exchange c has …`."""
    alike: dict[str, list[BrokerEntity]] = {}
    for entity in wrong:
        alike.setdefault(fits[entity][ours].difference, []).append(entity)
    return ", ".join(
        f"{listed(entities)} {'has' if len(entities) == 1 else 'have'} {difference}"
        for difference, entities in alike.items()
    )


def _each(fits: Fits) -> str:
    """`queue a is as durable declares it, …`, without entities that fit all profiles."""
    said = []
    for entity, answers in fits.items():
        unfit = [name for name, answer in answers.items() if answer.fit is Fit.DIFFERS]
        fit = [name for name in answers if name not in unfit]
        if 0 < len(unfit) < len(fit):
            said.append(f"{entity} is as all but {_or(unfit)} declare it")
        elif unfit:
            said.append(f"{entity} is as {_or(fit) or 'none'} declares it")
    more = f" and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return ", ".join(said[:SHOWN]) + more


def _mend_one(
    fits: Fits, found: Mapping[BrokerEntity, BrokerAnswer], accepted: Sequence[str]
) -> str:
    """A remedy: the profile for which the least must be deleted, and what that is."""

    def cost(profile: str) -> tuple[int, ...]:
        """How much must be deleted, the dearest first."""
        wrong = _wrong(fits, profile)
        return (
            sum(entity.is_common for entity in wrong),
            sum(entity in found and found[entity].is_in_use for entity in wrong),
            -len(_limited(fits, profile)),
            sum(not entity.only_ours for entity in wrong),
            sum(entity.carries for entity in wrong),
            len(wrong),
        )

    nearest = min(accepted, key=cost)
    wrong = _wrong(fits, nearest)
    used = _used_by_others(wrong, found)
    idle = [entity for entity in wrong if entity not in used]
    if limited := _limited(fits, nearest):
        arguments = sorted(set(limited.values()))
        options = [_OSLO_OPTIONS[argument] for argument in arguments]
        return (
            f"{' and '.join(arguments)} comes from {' and '.join(options)} of oslo.messaging, and "
            "no profile has it: stop its workers, delete "
            f"{listed(wrong, len(wrong))}, and start them without that option; then {nearest} fits"
        )
    remedy = f"choose the profile that the peers have; nearest is {nearest}"
    if idle:
        remedy += f", and then: delete {listed(idle, len(idle))} once empty and unused"
    if used:
        remedy += (
            f"; {listed(used, len(used))} will not do with it, and others use it: take another "
            "vhost, or first stop everything that uses it"
        )
    return remedy


def _choose(profiles: Sequence[str], *, in_url: bool) -> str:
    first, *others = profiles
    rest = f" (or {_or(others)})" if others else ""
    if in_url:
        return f"write profile={first}{rest} into the transport URL, in place of what it says"
    return f"set GRACEKIT_DECLARE_PROFILE={first}{rest}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
