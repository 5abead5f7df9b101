"""Mutants of the SQL in journal, claims and leases, where the compare-and-sets are.

Mutation tools change Python; a forgotten `AND owner = ?` is text to them. Here
each comparison of a statement is made true or false, each assignment is left
out, and what is minimal or oldest becomes the opposite. A first run of the tests
learns which test sends which statement; then each mutant has a fork of its own.

    python tools/mutate_sql.py [--every N] [--only WORD] [--tests PATH ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pytest

from gracekit.store.batch import Batch
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.testing.ports import PlayedEngine

MODULES: Final = (
    "gracekit.journal.tasks_sql",
    "gracekit.journal.claims_sql",
    "gracekit.leases.leases_sql",
)
TESTS: Final = ("tests/leases", "tests/journal", "tests/service")
OPTIONS: Final = (
    *("-q", "-x", "-p", "no:xdist", "-p", "no:randomly", "-p", "no:cacheprovider"),
    "--ignore=tests/service/test_machine.py",  # random: the same mutant lives or dies
    "--timeout=30",  # of one test, for a mutant that waits for ever
    "-Wignore::pytest.PytestAssertRewriteWarning",  # a fork has all modules already
)

_INSIDE: Final = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # three parentheses deep
_TERM: Final = (
    rf"(?:(?:coalesce|max|min)\({_INSIDE}\)|\(SELECT {_INSIDE}\)"
    rf"|\?\d*|'[^']*'|\d+|[a-z][\w.]*(?![\w.(]))"
)
_COMPARISON: Final = re.compile(
    rf"{_TERM} (?:IS NOT NULL|IS NULL|IS DISTINCT FROM {_TERM}|IN \((?!\s*SELECT)[^()]*\)"
    rf"|(?:=|<>|<=|>=|<|>) {_TERM})"
)
_SET: Final = re.compile(rf"\bSET\s+((?:(?!\sWHERE\b|\sRETURNING\b)(?:[^()]|\({_INSIDE}\)))*)")
_SWAPS: Final = (
    (r"ORDER BY id(?! DESC)", "ORDER BY id DESC"),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"\b(lver|attempts) \+ 1", r"\1 + 0"),
    (r"\bn \+ excluded\.n", "excluded.n"),
    (r"ON CONFLICT \([^)]*\) DO NOTHING", ""),
)


# -- what is changed --------------------------------------------------------------


def mutants(sql: str) -> Iterator[tuple[str, str]]:
    """(what was done, the changed statement), each with as many placeholders as before."""
    assigned: set[int] = set()
    for region in _SET.finditer(sql):
        for start, end in _pieces(sql, *region.span(1)):
            column, _, value = sql[start:end].partition("=")
            assigned.add(start)
            kept = f"{column.strip()} = iif(1, {column.strip()}, {value.strip()})"
            yield f"{column.strip()} keeps its value", sql[:start] + kept + sql[end:]
    for found in _COMPARISON.finditer(sql):
        start, end = found.span()
        if start in assigned:
            continue
        for word, sign in (("true", "1 OR"), ("false", "0 AND")):
            changed = f"({sign} {found[0]})"
            yield f"always {word}: {' '.join(found[0].split())}", sql[:start] + changed + sql[end:]
    for old, new in _SWAPS:
        for found in re.finditer(old, sql):
            changed = found.expand(new)
            yield f"{found[0]} -> {changed}", sql[: found.start()] + changed + sql[found.end() :]


def _pieces(sql: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The spans between the commas that are in no parenthesis."""
    depth, begun = 0, start
    for at in range(start, end):
        depth += {"(": 1, ")": -1}.get(sql[at], 0)
        if sql[at] == "," and depth == 0:
            yield begun, at
            begun = at + 1 + len(sql[at + 1 : end]) - len(sql[at + 1 : end].lstrip())
    yield begun, end


# -- where it passes ----------------------------------------------------------------


class Wire:
    """Every statement on its way to the store: seen, and one of them changed."""

    def __init__(self) -> None:
        self.changed: tuple[str, str] | None = None
        self.test = ""
        self.tests: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.homes: dict[str, str] = {}
        self.took: defaultdict[str, float] = defaultdict(float)

    def pass_(self, sql: str) -> str:
        """*sql*, or what it was changed into; remembers who sends it in which test."""
        if self.changed is not None:
            return self.changed[1] if sql == self.changed[0] else sql
        home = sys._getframe(2).f_globals["__name__"]  # noqa: SLF001 - the only way to know
        if home in MODULES:
            self.homes[sql] = home
            self.tests[sql][self.test] = None
        return sql

    def tap(self) -> None:
        """Come between the rooms and the store."""
        for name in ("add", "ask", "insert", "add_up"):
            setattr(Batch, name, self._through(getattr(Batch, name)))
        for engine in (MemoryEngine, PlayedEngine):
            setattr(engine, "query", self._through(engine.query))  # noqa: B010 - as above

    def _through(self, method: Any) -> Any:
        def tapped(target: Any, sql: str, *params: Any, **more: Any) -> Any:
            return method(target, self.pass_(sql), *params, **more)

        return tapped

    # -- as a plugin of pytest ------------------------------------------------------

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test that begins."""
        self.test = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took."""
        self.took[report.nodeid] += report.duration


# -- one after the other ------------------------------------------------------------


class Mutant(NamedTuple):
    """A statement of *home*, *what* was done to it, and what became of it."""

    home: str
    what: str
    sql: str
    changed: str


def try_out(wire: Wire, mutant: Mutant) -> str:
    """Killed, survived or timeout, as the tests that send the statement say."""
    tests = sorted(wire.tests[mutant.sql], key=lambda test: wire.took[test])
    limit = 10 + 3 * sum(wire.took[test] for test in tests)
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit)
        wire.changed = (mutant.sql, mutant.changed)
        os._exit(int(pytest.main([*OPTIONS, *tests])))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "survived", 1: "killed"}.get(status, "timeout" if status < 0 else f"exit {status}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all mutants, or every Nth; survivors are printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="try one of so many")
    parser.add_argument("--only", default="", help="of statements that contain this text")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args(arguments)
    wire = Wire()
    wire.tap()
    with contextlib.redirect_stdout(sys.stderr):
        if pytest.main([*OPTIONS, *options.tests], plugins=[wire]) != 0:
            sys.exit("the tests fail without a mutant")
    chosen = [
        Mutant(home, what, sql, changed)
        for sql, home in sorted(wire.homes.items(), key=lambda item: (item[1], item[0]))
        for what, changed in mutants(sql)
        if options.only in sql
    ][:: options.every]
    results: Counter[tuple[str, str]] = Counter()
    begun = time.monotonic()
    for mutant in chosen:
        result = try_out(wire, mutant)
        results[mutant.home, result] += 1
        if result != "killed":
            words = textwrap.shorten(mutant.sql, 100)
            print(f"{result}: {mutant.home}: {mutant.what}\n    {words}", flush=True)
    for (home, result), number in sorted(results.items()):
        print(f"{home}: {number} {result}")
    print(f"{len(chosen)} mutants in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
