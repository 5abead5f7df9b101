"""The pictures of the pages: drawn from what the code says, and legible on both kinds of page."""

from __future__ import annotations

import ast
import re
from xml.etree import ElementTree as ET

import pytest

from tests.docs.pages import DOCS, ROOT
from tools.pictures.drain import Drained
from tools.pictures.drawn import FOLDER, draw_all
from tools.pictures.svg import DARK, HUES, LIGHT, WIDTH

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = draw_all()
PAGES = sorted(DOCS.glob("*.md"))
SHOWN = re.compile(r'(?:src|srcset)="([^"]+\.svg)"')


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_would_be_drawn_now(name: str):
    """If not, `python3 -m tools.pictures` draws it anew."""
    assert (FOLDER / name).read_text() == DRAWN[name]


def test_no_picture_is_left_over():
    """Each file has a drawing that makes it."""
    assert {path.name for path in FOLDER.iterdir()} == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_says_in_words_what_it_shows(name: str):
    """A reader of screens gets a title and a description, and every text is a text."""
    root = ET.fromstring(DRAWN[name])
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")

    assert root.get("role") == "img"
    assert len(title.text) > 10
    assert len(description.text) > 200
    assert len(root.findall(f"{SVG}text")) > 15
    assert root.get("width") == str(WIDTH)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_each_text_has_contrast_to_what_is_behind_it(palette: dict[str, str]):
    """At least 4.5 to 1, as WCAG 2 asks for (level AA)."""
    on_paper = ["ink", "soft", *HUES]
    pairs = [(name, "paper") for name in on_paper]
    pairs += [("ink", f"{hue}-fill") for hue in HUES] + [("ink", "panel"), ("soft", "panel")]

    low = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in pairs}

    assert {pair: value for pair, value in low.items() if value < 4.5} == {}


def test_the_pictured_drain_ends_each_task_in_its_way():
    """What the rows of the picture say is what the product did."""
    drained = Drained()

    assert {name: how for name, (_, how) in drained.ends.items()} == {
        "short": "succeeded",
        "usual": "succeeded",
        "stepped": "safe_point",
        "endless": "cancelled",
        "is_draining": "succeeded",
    }
    assert drained.exit_code == 75


def picture_of_conf() -> re.Pattern[str]:
    """What docs/conf.py takes for a picture; to import it takes Sphinx."""
    tree = ast.parse((DOCS / "conf.py").read_text())
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PICTURE"
    ]
    return re.compile(ast.literal_eval(value.args[0]))


SNIPPET = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="pictures/drain-dark.svg">
  <img alt="A drain over time" src="pictures/drain.svg">
</picture>
"""


@pytest.mark.parametrize(
    "text",
    [SNIPPET, *(page.read_text() for page in PAGES)],
    ids=["snippet", *(page.name for page in PAGES)],
)
def test_the_site_shows_each_picture_of_a_page(text: str):
    """It is written as GitHub wants it, and the site makes images for its own two colours of it."""
    assert "<picture" not in picture_of_conf().sub("", text)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_a_picture_that_a_page_shows_is_there(page):
    """For light and for dark."""
    shown = SHOWN.findall(page.read_text())

    assert [one for one in shown if not (page.parent / one).is_file()] == []
