"""What the tests of played machines say of the journal and of leases holds on PostgreSQL too."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.process.helpers import ROOT

pytestmark = [pytest.mark.server, pytest.mark.process, pytest.mark.timeout(900)]

OF_SQLITE: Final = (
    "test_no_statement_takes_longer_beside_a_long_record",  # counts SQLite's steps
    "test_what_a_query_repeats_is_the_condition_of_the_indexes",  # reads SQLite's schema
)


def test_the_suites_of_journal_and_leases_pass_on_postgresql():
    """In virtual time, with each store in a schema of a real server."""
    words = ("-q", "-p", "no:cacheprovider", "-p", "tests.postgres.on_postgres", "--no-header")
    chosen = ("tests/journal", "tests/leases", "tests/service/test_store_states.py")
    left_out = " and ".join(f"not {name}" for name in OF_SQLITE)
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *words, "-k", left_out, *chosen),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-6000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 150, done.stdout[-300:]
