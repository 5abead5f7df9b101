# ruff: noqa: INP001 - Sphinx executes it, nobody imports it
"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

from gracekit.version import VERSION

project = "gracekit"
author = "the gracekit developers"
version = release = VERSION
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

default_role = "code"  # docstrings write `names` as Markdown does

html_theme = "furo"
html_title = "gracekit"
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_mock_imports = ["oslo_context", "oslo_messaging"]
autodoc_typehints = "signature"
napoleon_numpy_docstring = False


def link_files(_: Sphinx, page: str, source: list[str]) -> None:
    """Make a link to a Markdown file outside of docs/ a download, as one to any other file is."""
    outside = re.escape("../" * (page.count("/") + 1))
    source[0] = re.sub(rf"\]\(({outside}[^)#]*\.md)\)", r"](path:\1)", source[0])


def keep_sentence(_: Sphinx, what: str, *rest: object) -> None:
    """Keep the first sentence of a property whole: napoleon takes what precedes a colon as type."""
    lines = rest[-1]
    if what in {"attribute", "property"} and isinstance(lines, list):
        lines[:0] = ["..", ""]  # a comment without text


# As GitHub wants it: the reader's system chooses. Furo has a button as well, which has to win.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)
IMAGES = """```{{image}} {light}
:alt: {alt}
:class: only-light
```
```{{image}} {dark}
:alt: {alt}
:class: only-dark
```"""


def show_pictures(_: Sphinx, __: str, source: list[str]) -> None:
    """Make two images of a picture that has one for a light and one for a dark page."""
    source[0] = PICTURE.sub(
        lambda found: IMAGES.format(dark=found[1], alt=found[2], light=found[3]), source[0]
    )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_sentence, priority=400)  # before napoleon
    app.connect("source-read", link_files)
    app.connect("source-read", show_pictures)
