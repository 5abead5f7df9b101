"""Kinds that are declared wrongly are refused when they are registered, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import Context, DeclarationError, Found, ResourceKind, Service, Settled


async def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
    return []


async def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
    return True


async def ask(ctx: Context, found: Found) -> Settled:
    return Settled("available")


async def delete(ctx: Context, found: Found) -> None:
    pass


async def too_few(ctx: Context) -> Any:
    return None


async def swapped(found, ctx) -> Any:  # type: ignore[no-untyped-def]
    return None


async def typed(resource: Found, context: Context) -> None:
    pass


async def generator(ctx: Context, found: Found) -> Any:
    yield found


def complete(kind: ResourceKind) -> ResourceKind:
    kind.find(find)
    kind.write(write)
    return kind


class Manager:
    """Its class's methods are found by name."""

    async def find(self, ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return []


Declare = Callable[[Service, ResourceKind], object]

WRONG: list[tuple[Declare, str]] = [
    (
        lambda svc, _: svc.kind("my share"),
        (
            "a kind is named like an argument of its methods, and not 'my share': letters, digits, "
            "'_', '-' and '.'"
        ),
    ),
    (lambda svc, _: svc.kind(""), "a kind is named like an argument of its methods, and not ''"),
    (lambda svc, _: svc.kind("share"), "kind share is declared twice: keep one"),
    (lambda svc, _: svc.kind("other", stuck_after="soon"), "kind other: "),
    (lambda svc, _: svc.kind("other", max_wait=-1), "kind other: "),
    (lambda svc, _: svc.kind("other", statuses=["x", ""]), "kind other: a status is text of 1 to"),
    (
        lambda _, share: (share.find(find), share.find(find)),
        "kind share has a find already, find()",
    ),
    (
        lambda _, share: (share.write(write), share.write(write)),
        "kind share has a write already, write()",
    ),
    (
        lambda _, share: share.find(too_few),
        (
            "the find of kind share, too_few() is called with (ctx, *, after, limit), and its "
            "arguments do not fit (got an unexpected keyword argument 'after'): write "
            "def too_few(ctx, *, after, limit)"
        ),
    ),
    (
        lambda _, share: share.write(too_few),
        (
            "the write of kind share, too_few() is called with (ctx, found, status, facts), and "
            "its arguments do not fit (too many positional arguments): write "
            "def too_few(ctx, found, status, facts)"
        ),
    ),
    (
        lambda _, share: share.probe("creating", failed="error")(too_few),
        "the probe of kind share, too_few() is called with (ctx, found)",
    ),
    (
        lambda _, share: share.delete("deleting", done="deleted", failed="error")(too_few),
        "the delete of kind share, too_few() is called with (ctx, found)",
    ),
    (lambda svc, _: svc.kind("other", max_wait=0), "kind other: max_wait=0 leaves no time to ask"),
    (
        lambda svc, _: svc.rpc(Manager.find),
        "Manager.find() has self, so it is a method of a class: mark it with @rpc_method or",
    ),
    (lambda _, share: share.find("find"), "the find of kind share, 'find' is no function"),
    (lambda _, share: share.probe("creating", failed="error")(generator), "generator"),
    (
        lambda _, share: share.probe(failed="error"),
        (
            "@share.probe needs the statuses that it settles: write @share.probe('creating', "
            "failed='...')"
        ),
    ),
    (
        lambda _, share: share.probe(ask),
        "@share.probe needs the statuses that it settles: write @share.probe('creating', ",
    ),
    (
        lambda _, share: share.probe(["creating", "extending"], failed="error"),
        "@share.probe needs the statuses that it settles: write @share.probe('creating', ",
    ),
    (
        lambda _, share: share.probe("creating", failed="error")(swapped),
        (
            "the probe of kind share, swapped() is called with (ctx, found), and has found in "
            "another place: write def swapped(ctx, found)"
        ),
    ),
    (
        lambda _, share: share.delete("deleting", done="deleted", failed="error")(typed),
        "and has resource: 'Found' in another place: write def typed(ctx, found)",
    ),
    (
        lambda _, share: share.probe("creating"),
        "@share.probe('creating') needs failed=, the status that is written then",
    ),
    (
        lambda _, share: share.delete("deleting", failed="error"),
        "@share.delete('deleting') needs done=, the status that is written then",
    ),
    (
        lambda _, share: share.delete("deleting", done="deleted"),
        "@share.delete('deleting') needs failed=, the status that is written then",
    ),
    (
        lambda _, share: share.delete(delete),
        (
            "@share.delete needs the statuses that it settles: write @share.delete('creating', "
            "done='...', failed='...')"
        ),
    ),
    (
        lambda _, share: share.mark(),
        (
            "share.mark() needs statuses, each with the one that is written in its place: write "
            "share.mark(restoring='error'), or a mapping"
        ),
    ),
    (lambda _, share: share.mark("deleting"), "share.mark() needs statuses, each with the one"),
    (lambda _, share: share.mark(["deleting"]), "share.mark() needs statuses, each with the one"),
    (lambda _, share: share.mark(restoring=7), "kind share: a status is text of 1 to 100"),
    (lambda _, share: share.mark({"x" * 101: "error"}), "kind share: a status is text of 1 to 100"),
    (
        lambda _, share: share.leave("migrating"),
        (
            "share.leave('migrating') needs its statuses, and why=: say who goes on with such a "
            "resource"
        ),
    ),
    (lambda _, share: share.leave(why="so"), "share.leave() needs its statuses, and why="),
    (
        lambda _, share: (share.probe("creating", failed="error")(ask), share.mark(creating="x")),
        "status 'creating' of kind share has two rules, ask and mark: keep one",
    ),
    (
        lambda _, share: share.probe("creating", "creating", failed="error")(ask),
        "status 'creating' of kind share has two rules, ask and ask: keep one",
    ),
    (
        lambda _, share: (share.mark(x="y"), share.leave("x", why="so")),
        "status 'x' of kind share has two rules, mark and leave: keep one",
    ),
    (
        lambda _, share: share.mark(error="error"),
        (
            "the rule mark of kind share would write status 'error' over itself: name the status "
            "that it becomes"
        ),
    ),
    (
        lambda _, share: (
            share.probe("creating", failed="deleting")(ask),
            share.delete("deleting", done="creating", failed="error")(delete),
        ),
        (
            "rules of kind share go round for ever: delete writes 'creating' for 'deleting', then "
            "ask writes 'deleting' for 'creating': let one of them write a status that has no rule"
        ),
    ),
    (
        lambda _, share: share.mark(a="b", b="c", c="a"),
        "mark writes 'a' for 'c', then mark writes 'b' for 'a', then mark writes 'c' for 'b'",
    ),
]


@pytest.mark.parametrize(("declare", "sentence"), WRONG)
def test_a_wrong_declaration_is_refused_at_once(svc: Service, declare: Declare, sentence: str):
    """The sentence says what was written and what to write."""
    share = svc.kind("share")

    with pytest.raises(DeclarationError, match=re.escape(sentence)):
        declare(svc, share)


def _with_statuses(svc: Service, *statuses: str) -> None:
    kind = complete(svc.kind("other", statuses=statuses))
    kind.probe("creating", failed="error")(ask)


INCOMPLETE: list[tuple[Callable[[Service], object], str]] = [
    (
        lambda svc: svc.kind("other").write(write),
        (
            "kind other has no find: mark a function with @other.find that takes (ctx, *, after, "
            "limit)"
        ),
    ),
    (
        lambda svc: svc.kind("other").find(find),
        (
            "kind other has no write: mark a function with @other.write that takes (ctx, found, "
            "status, facts)"
        ),
    ),
    (
        lambda svc: complete(svc.kind("other", after="shrae")),
        "kind other comes after 'shrae', which is not declared; did you mean share?",
    ),
    (
        lambda svc: _with_statuses(svc, "creating", "deleting", "extending"),
        (
            "kind other has no rule for status 'deleting', 'extending', so resources would get "
            "stuck in it: give it a rule, or `leave` it and say why"
        ),
    ),
    (
        lambda svc: _with_statuses(svc, "deleting"),
        "kind other has no rule for status 'deleting'",
    ),
    (
        _with_statuses,
        "kind other has a rule for status 'creating', which is none of its statuses",
    ),
    (
        lambda svc: svc.kind("other").find(Manager.find),
        "kind other has no write",
    ),
]


@pytest.mark.parametrize(("declare", "sentence"), INCOMPLETE)
def test_what_is_not_complete_is_refused_by_each_start(
    svc: Service, declare: Callable[[Service], object], sentence: str
):
    """And by doctor: only then is all declared."""
    complete(svc.kind("share"))
    declare(svc)

    with pytest.raises(DeclarationError, match=re.escape(sentence)):
        svc.check()


def test_a_rule_may_lead_to_another_one_that_ends(svc: Service):
    """What could not be made is deleted again: that ends, so it is no round."""
    share = complete(svc.kind("share"))
    share.delete("deleting", done="deleted", failed="error_deleting")(delete)
    share.probe("creating", failed="deleting")(ask)
    share.leave("left", why="so")
    share.mark(restoring="left", reverting="left")

    svc.check()


def test_a_kind_without_a_rule_is_logged_at_the_start(svc: Service):
    """It may be meant to be so for a while, and settles nothing meanwhile."""
    share = complete(svc.kind("share"))

    assert [seen for seen, _ in svc.doubts()] == [
        "kind share has no rule, so no pass settles any of its resources"
    ]
    share.mark(restoring="error")
    assert list(svc.doubts()) == []


def test_a_cycle_is_shown(svc: Service):
    """The kind that closes it is refused; without it the others are fine."""
    a = complete(svc.kind("a", after="c"))
    complete(svc.kind("b", after=a))

    with pytest.raises(
        DeclarationError, match="kinds wait for each other: c after b after a after c"
    ):
        svc.kind("c", after="b")
    with pytest.raises(DeclarationError, match="d after d: remove one `after`"):
        svc.kind("d", after="d")
    complete(svc.kind("c"))
    svc.check()


def test_methods_of_a_class_need_an_object(svc: Service):
    """One that is served by `include`, and only one."""

    class Shares:
        share = svc.kind("share")

        @share.find
        async def find(self, ctx: Context, *, after: str | None, limit: int) -> list[Found]:
            return []

        @share.write
        async def write(self, ctx: Context, found: Found, status: str, facts: object) -> bool:
            return True

    with pytest.raises(DeclarationError, match=r"no Shares is served: call svc.include\(Shares"):
        svc.check()
    svc.include(Shares())
    svc.check()
    with pytest.raises(DeclarationError, match="kind share is served by another Shares already"):
        svc.include(Shares())


def test_a_kind_says_what_it_is(svc: Service):
    """Its ids for `needs`, its repr, and the statuses that mean failure."""
    share = complete(svc.kind("share"))
    share.probe("creating", failed="error")(ask)
    share.delete("deleting", done="deleted", failed="error_deleting")(delete)
    share.mark({"in-restore": "lost"}, reverting="error", deleted="purged")
    share.leave("migrating", why="so")

    assert share.of(7) == ("share", "7")
    assert share.of(None) is None
    assert repr(share) == "<ResourceKind share>"
    assert share.failed_statuses == {"error", "error_deleting", "lost", "purged"}
    assert share.end_statuses == {"error", "error_deleting", "lost", "purged"}  # no "deleted"
    svc.check()
