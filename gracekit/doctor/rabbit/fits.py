"""Decides which declare profile fits the existing entities on a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gracekit.doctor.finding import Finding, fail, ok, skip
from gracekit.doctor.rabbit.answers import BrokerAnswer, Fit
from gracekit.doctor.rabbit.entities import SHOWN, BrokerEntity, listed
from gracekit.rpc.amqp.profiles import PROFILES

CHECK: Final = "profile"

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
    delete = (
        f"delete {listed(wrong, len(wrong))} once empty and unused; the next start declares anew"
    )
    fit = fitting(fits)
    usable = [name for name in fit if name in accepted]
    if usable:
        exists = f"{seen}; all that exists is as {_or(usable)} declares it"
        return fail(CHECK, exists, f"{_choose(usable, in_url=in_url)}, or {delete}")
    if fit:
        exists = (
            f"{seen}; all that exists is as {_or(fit)} declares it, and that has transient queues"
        )
        return fail(CHECK, f"{exists}, which this broker's version refuses", delete)
    return fail(
        CHECK, f"{seen}; no profile fits all: {_each(fits)}", _mend_one(fits, found, accepted)
    )


def fitting(fits: Fits) -> list[str]:
    """Names of the profiles that fit all existing entities."""
    compared = [name for name in PROFILES if all(name in answers for answers in fits.values())]
    return [name for name in compared if not _wrong(fits, name)]


def _wrong(fits: Fits, profile: str) -> list[BrokerEntity]:
    return [entity for entity, answers in fits.items() if answers[profile].fit is Fit.DIFFERS]


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

    def cost(profile: str) -> tuple[int, int, int]:
        """How many entities to delete: those in use, those that carry messages, and all."""
        wrong = _wrong(fits, profile)
        in_use = [entity for entity in wrong if entity in found and found[entity].is_in_use]
        return len(in_use), sum(entity.carries for entity in wrong), len(wrong)

    nearest = min(accepted, key=cost)
    wrong = _wrong(fits, nearest)
    return (
        f"choose the profile that the peers have; nearest is {nearest}, and then: delete "
        f"{listed(wrong, len(wrong))} once empty and unused"
    )


def _choose(profiles: Sequence[str], *, in_url: bool) -> str:
    first, *others = profiles
    rest = f" (or {_or(others)})" if others else ""
    if in_url:
        return f"write profile={first}{rest} into the transport URL, in place of what it says"
    return f"set GRACEKIT_DECLARE_PROFILE={first}{rest}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
