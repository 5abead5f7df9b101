"""What the tests of played machines say of journal, leases and service holds on PostgreSQL too."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.process.helpers import ROOT
from tests.scale import scale

pytestmark = [pytest.mark.server, pytest.mark.process, pytest.mark.timeout(scale(900, 7200))]

SERVICE: Final = "tests/service"
SOME: Final = (
    f"{SERVICE}/test_store_states.py",
    f"{SERVICE}/test_tries.py",
    f"{SERVICE}/test_lookups.py",
    f"{SERVICE}/test_pending_crashes.py::test_a_crash_while_it_is_parked",
    f"{SERVICE}/test_resource_crashes.py::test_a_crash_at_any_step_leads_to_one_end",
)
CHOSEN: Final = ("tests/journal", "tests/leases", *scale(SOME, (SERVICE,)))
OF_SQLITE: Final = (
    "test_no_statement_takes_longer_beside_a_long_record",  # counts SQLite's steps
    "test_what_a_query_repeats_is_the_condition_of_the_indexes",  # reads SQLite's schema
)


def test_the_suites_of_journal_leases_and_service_pass_on_postgresql():
    """In virtual time, with each store in a schema of a real server."""
    words = ("-q", "-p", "no:cacheprovider", "-p", "tests.postgres.on_postgres", "--no-header")
    left_out = " and ".join(f"not {name}" for name in OF_SQLITE)
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *words, "-k", left_out, *CHOSEN),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-6000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 150, done.stdout[-300:]
