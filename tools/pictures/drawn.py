"""The names of the files and what stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.pictures.custody import custody
from tools.pictures.drain import drain
from tools.pictures.start import start
from tools.pictures.svg import DARK, LIGHT

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def draw_all() -> dict[str, str]:
    """SVG texts by the name of their file."""
    found = {}
    for name, picture in (("drain", drain()), ("custody", custody()), ("start", start())):
        found[f"{name}.svg"] = picture.as_svg(LIGHT)
        found[f"{name}-dark.svg"] = picture.as_svg(DARK)
    return found
