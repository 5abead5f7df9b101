"""Decides which declare profile fits the existing entities on a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gracekit.doctor.finding import Finding, fail, ok, skip
from gracekit.doctor.rabbit.answers import BrokerAnswer, Fit
from gracekit.doctor.rabbit.entities import BrokerEntity, listed
from gracekit.rpc.amqp.profiles import PROFILES

CHECK: Final = "profile"
_ALIKE: Final = (
    "have all programs declare alike (docs/oslo.md, Which profile), and delete what differs once "
    "it is empty and unused; or take another vhost"
)

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
        found: For each existing entity, its number of consumers.
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
    # In a tie it is one of oslo.messaging, whose workers were there before.
    nearest = min(reversed(accepted), key=lambda profile: len(_wrong(fits, profile)))
    first = _different(fits, nearest, _wrong(fits, nearest)[:1])
    return fail(CHECK, f"{seen}; no profile fits all; nearest is {nearest}, but {first}", _ALIKE)


def fitting(fits: Fits) -> list[str]:
    """Names of the profiles that fit all existing entities."""
    compared = [name for name in PROFILES if all(name in answers for answers in fits.values())]
    return [name for name in compared if not _wrong(fits, name)]


def _wrong(fits: Fits, profile: str) -> list[BrokerEntity]:
    return [entity for entity, answers in fits.items() if answers[profile].fit is Fit.DIFFERS]


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


def _choose(profiles: Sequence[str], *, in_url: bool) -> str:
    first, *others = profiles
    rest = f" (or {_or(others)})" if others else ""
    if in_url:
        return f"write profile={first}{rest} into the transport URL, in place of what it says"
    return f"set GRACEKIT_DECLARE_PROFILE={first}{rest}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
