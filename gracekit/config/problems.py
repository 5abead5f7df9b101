"""What is wrong with settings, and which of them it follows from.

If a setting could not be read, rules that compare it with others are not judged: they would judge
its default, and name a value that stands nowhere in the settings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        text: The values, the rule and the remedy, as one sentence.
        about: The fields of `Settings` whose values it follows from.
    """

    text: str
    about: frozenset[str]


def problem(text: str, *about: str) -> Problem:
    """What is wrong with the fields *about*, together."""
    return Problem(text, frozenset(about))
