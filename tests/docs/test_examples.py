"""docs/examples.md lists every example; tests/examples/ runs them."""

from __future__ import annotations

import re
from typing import Final

from tests.docs.pages import ROOT, Page
from tests.docs.tables import section, tables

PAGE: Final = Page("examples.md")
EXAMPLES: Final = ROOT / "examples"


def test_every_rung_of_the_ladder_is_listed_in_its_order():
    """And each is said to explain something."""
    linked = re.findall(r"\(\.\./examples/(ex\w+\.py)\)", section(PAGE.text, "The ladder"))
    (rows,) = tables(section(PAGE.text, "Which example explains what"))
    explained = re.findall(r"\d\d", " ".join(row[1] for row in rows))

    assert linked == sorted(path.name for path in EXAMPLES.glob("ex*.py"))
    assert sorted(explained) == [name[2:4] for name in linked]


def test_every_larger_example_is_listed_with_its_command():
    """What `python -m` is given can be run."""
    modules = re.findall(r"python -m examples\.([\w.]+)", PAGE.text)

    assert {module.split(".")[0] for module in modules} == {
        path.parent.name for path in EXAMPLES.glob("*/README.md")
    }
    for module in modules:
        path = EXAMPLES.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
