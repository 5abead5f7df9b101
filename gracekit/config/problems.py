"""Problems of settings, with the settings that cause each.

If a setting could not be read, the rules that compare it with others are skipped. Otherwise they
would check its default, and complain about a value that the user never wrote.
"""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """One problem.

    Attributes:
        text: The values, the rule and the remedy, as one sentence.
        about: The fields of `Settings` whose values cause it.
    """

    text: str
    about: frozenset[str]


def problem(text: str, *about: str) -> Problem:
    """A Problem of the fields *about*."""
    return Problem(text, frozenset(about))
