"""Arguments that an operator replaces before a parked task runs again.

Those on record are a secret of the caller: they are merged and checked, and no message shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from gracekit.cli.call import arguments
from gracekit.cli.text import safe
from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError, UnserialisableError
from gracekit.journal.order_rows import OrderTarget
from gracekit.journal.pending import ParkedCall, call_of
from gracekit.listings import listings_sql as sql
from gracekit.rpc.argument_paths import resource_id_of, value_of
from gracekit.rpc.offer import Offer
from gracekit.rpc.plain import dumps, plain
from gracekit.rpc.versions import serves
from gracekit.store.engine import Queries


def read_set(words: tuple[str, ...]) -> Mapping[str, Any]:
    """The values of `--set name=value`, each JSON or text as `gracekit call` reads it.

    Raises:
        click.UsageError: a word is no `name=value`, or no message could carry it.
    """
    try:
        given: dict[str, Any] = plain(arguments(words, None, option="--set"), "--set")
    except UnserialisableError as error:
        raise click.UsageError(safe(error)) from None
    if _has_nul(given):
        raise click.UsageError("--set has a NUL character, which no store takes")
    return given


def _has_nul(value: object) -> bool:
    match value:
        case str():
            return "\0" in value
        case Mapping():
            return any(_has_nul(part) for pair in value.items() for part in pair)
        case list():
            return any(map(_has_nul, value))
    return False


async def replaced(
    engine: Queries, target: OrderTarget, given: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """All arguments of a parked task, with *given* in the place of some.

    None if it is not parked any more.

    Raises:
        GracekitError: they do not fit its method, or name another resource.
    """
    call = await call_of(engine, target.id)
    if call is None:
        return None
    args = {**call.args, **given}
    dumps(args, "the arguments of the task")
    # The run that has parked the task, or a later one, is on record.
    ((instance, text),) = await engine.query(sql.NEWEST_OFFER, target.service)
    offers = msgspec.json.decode(str(text), type=list[Offer])
    offer = _offer_of(target, call, offers, str(instance))
    _check_names(target, offer, args, given)
    _check_resource(target, offer, args, given)
    return args


def _offer_of(
    target: OrderTarget, call: ParkedCall, offers: Sequence[Offer], instance: str
) -> Offer:
    for offer in offers:
        if (offer.namespace, offer.name) == (call.namespace, call.method) and serves(
            offer.version, call.version
        ):
            return offer
    raise GracekitError(
        f"{target}: its arguments cannot be checked, as {safe(instance)}, the newest run of "
        f"{safe(target.service)}, does not serve {safe(call.method)} version {safe(call.version)}; "
        "retry it without --set, or start a version that serves it"
    )


def _check_names(
    target: OrderTarget, offer: Offer, args: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    known = [*offer.required, *offer.optional]
    unknown = [name for name in given if name not in known and not offer.more]
    listed = safe(", ".join(known)) if known else "no argument"
    if unknown:
        raise GracekitError(
            f"{target} takes {listed}, and not {safe(unknown[0])}{did_you_mean(unknown[0], known)}"
        )
    if missing := [name for name in offer.required if name not in args]:
        raise GracekitError(
            f"{target} needs {safe(missing[0])}, which is not on record; add --set "
            f"{safe(missing[0])}=VALUE"
        )
    if not offer.more and not args.keys() <= set(known):
        raise GracekitError(
            f"{target} has an argument on record that its method does not take any more: it takes "
            f"{listed}. Give it up, or cancel it, and send a new request"
        )


def _check_resource(
    target: OrderTarget, offer: Offer, args: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    if offer.resource is None and target.shown_resource is not None:
        raise _other_resource(target, ", ".join(given), "may name")  # only a run can read it
    if offer.resource is None or offer.resource.partition(".")[0] not in given:
        return
    named = resource_id_of(value_of(offer.resource, args))
    if target.shown_resource is None or named != target.shown_resource[1]:
        raise _other_resource(target, offer.resource)


def _other_resource(target: OrderTarget, name: str, names: str = "names") -> GracekitError:
    resource = target.shown_resource
    acts_on = "no resource" if resource is None else safe(":".join(resource))
    return GracekitError(
        f"{target} acts on {acts_on}, and --set {safe(name)} {names} another resource: a retry "
        "keeps its resource; send a new request for another"
    )
