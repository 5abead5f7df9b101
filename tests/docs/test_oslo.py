"""docs/oslo.md: its tables. Its program and its steps are tried in tests/oslo/test_moving.py."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest

from gracekit.config.oslo import DURABLE_OPTIONS, oslo_profile
from gracekit.errors import ConfigError
from tests.docs.pages import Page
from tests.docs.tables import section, tables

PAGE: Final = Page("oslo.md").text


def test_the_table_of_profiles_says_what_each_combination_of_options_means():
    """Each combination has one row, and its profile is the one that `Settings.from_oslo` takes."""
    (rows,) = tables(section(PAGE, "Which profile"))

    shown = {}
    for *cells, profile in rows:
        means = [{"yes": [True], "no": [False]}.get(c.split(" (")[0], [False, True]) for c in cells]
        for combination in product(*means):
            assert combination not in shown
            shown[combination] = profile
    assert len(shown) == 2 ** len(DURABLE_OPTIONS)
    for combination, profile in shown.items():
        asked = dict(zip(DURABLE_OPTIONS, combination, strict=True))
        if profile.startswith("none"):
            with pytest.raises(ConfigError, match="has no profile here"):
                oslo_profile(asked)
        else:
            assert oslo_profile(asked) == profile
