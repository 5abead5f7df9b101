"""The parts of pages that repeat the code say what it says now; `make docs` writes them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest

import gracekit
from gracekit import errors, testing
from gracekit.exits import explained
from gracekit.rpc.failures import failure_of, rebuild
from tests.docs.pages import DOCS
from tools import pages

LISTED = re.compile(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", re.MULTILINE)


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_generated_page_says_what_the_code_says(name: str):
    """Whoever changes a setting, an option or an event writes its page again."""
    assert (DOCS / name).read_text() == pages.made(name), "run: make docs, or python -m tools.pages"


def test_a_page_without_a_place_for_a_part_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a page whose marks were deleted would never be written again."""
    (tmp_path / "events.md").write_text("# Events\n")
    monkeypatch.setattr(pages, "DOCS", tmp_path)

    with pytest.raises(ValueError, match="should have"):
        pages.made("events.md")


def anchors(name: str) -> list[str]:
    """The anchors of a page's headings that have one word."""
    headings = re.findall(r"^#+ `?(\w+)`?$", (DOCS / name).read_text(), re.MULTILINE)
    return [heading.lower() for heading in headings]


@pytest.mark.parametrize("name", pages.error_classes())
def test_a_refused_start_points_to_an_anchor_of_the_page_of_errors(name: str):
    """Each class has exactly one."""
    anchor = explained(pages.an_error(name)).rpartition("see docs/errors.md#")[2]

    assert anchors("errors.md").count(anchor) == 1


def test_a_subclass_that_is_not_public_is_explained_by_its_base():
    """Its own name has no place on the page."""

    class OwnError(gracekit.ConfigError):
        pass

    assert explained(OwnError("x is wrong")) == "x is wrong; see docs/errors.md#configerror"
    assert explained(OwnError()) == "OwnError; see docs/errors.md#configerror"


@pytest.mark.parametrize("name", pages.error_classes())
def test_a_caller_gets_the_class_that_a_handler_has_raised(name: str):
    """But for those that the page names."""
    of_a_sender = (
        *(errors.VersionCapError, errors.DependencyError, errors.Undeliverable),
        *(errors.UnconfirmedError, errors.CallTimeoutError, errors.NoAnswerError),
    )
    expected: type[Exception] = pages.error_classes()[name]
    if issubclass(expected, (errors.ConflictError, *of_a_sender)):
        expected = gracekit.RemoteError
    elif expected is errors.InvalidArgumentsError:
        expected = TypeError

    got = rebuild(failure_of(pages.an_error(name)), {})

    assert type(got) is expected


def documented() -> Iterator[str]:
    """The names on the page of the API; those of errors are on their own page."""
    yield from LISTED.findall((DOCS / "api.md").read_text())
    yield from (f"gracekit.{name}" for name in pages.error_classes())


def test_every_public_name_is_on_the_page_of_the_api():
    """Of `gracekit`, and of what tests import."""
    public = {f"gracekit.{name}" for name in gracekit.__all__}
    public |= {f"gracekit.testing.{name}" for name in testing.__all__}
    again = {"gracekit.testing.TaskState"}  # the one of gracekit

    assert public - set(documented()) == again


def test_the_page_of_the_api_names_what_there_is():
    """Also those parts of a name that Sphinx does not import."""
    for name in LISTED.findall((DOCS / "api.md").read_text()):
        if "oslo" not in name:  # which needs the library
            parts = name.split(".")
            found = importlib.import_module(parts[0])
            for number, part in enumerate(parts[1:], 2):
                if not hasattr(found, part):
                    importlib.import_module(".".join(parts[:number]))
                found = getattr(found, part)


def test_the_page_of_metrics_lists_each_alert():
    """The rule file is the other place that names them."""
    rules = (DOCS.parent / "dashboards" / "alerts.yml").read_text()
    page = (DOCS / "observability.md").read_text()

    named = re.findall(r"^ *- alert: (\w+)$", rules, re.MULTILINE)

    assert len(named) > 10
    assert re.findall(r"^\| `(Gracekit\w+)` \|", page, re.MULTILINE) == named
