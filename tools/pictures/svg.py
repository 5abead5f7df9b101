"""A picture as SVG text: shapes and texts by class, and two palettes that say what a class is.

Written as text: a drawing library would be the largest thing installed. The text stays text, in
the reader's own font, so every place has room for a font that is wider than most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 800
"""Pages show a picture at this width or a little less, so no text is smaller than 12 px."""

LIGHT: Final = {
    "paper": "#ffffff",
    "panel": "#f2f4f7",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#c4ccd6",
    "blue": "#0969da",
    "blue-fill": "#d6ebff",
    "green": "#1a7f37",
    "green-fill": "#d2f5da",
    "amber": "#8a5a00",
    "amber-fill": "#ffefbf",
    "red": "#cf222e",
    "red-fill": "#ffe0dd",
}
DARK: Final = {
    "paper": "#0d1117",
    "panel": "#1b222c",
    "ink": "#e9eef4",
    "soft": "#a2acb8",
    "line": "#465160",
    "blue": "#58a6ff",
    "blue-fill": "#143a66",
    "green": "#4cc761",
    "green-fill": "#15442a",
    "amber": "#e3ab3a",
    "amber-fill": "#4c3a0b",
    "red": "#ff7b72",
    "red-fill": "#5a2023",
}
HUES: Final = ("blue", "green", "amber", "red")

_FONT: Final = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'


class Picture:
    """Shapes in the order in which they were drawn.

    Args:
        title: Names the picture, also to who cannot see it.
        description: Says in sentences what it shows, to who cannot see it.
        height: In pixels, at `WIDTH`.
    """

    def __init__(self, title: str, description: str, height: int) -> None:
        self._title = title
        self._description = description
        self._height = height
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "") -> None:
        """One line, from *x* on or around it, on the base line *y*."""
        self._add("text", {"x": x, "y": y, "class": kind, "text-anchor": anchor}, escape(words))

    def texts(self, x: float, y: float, lines: Sequence[str], kind: str = "small") -> None:
        """Several lines, the first one on *y*."""
        for number, line in enumerate(lines):
            self.text(x, y + 16 * number, line, kind)

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle with round corners."""
        sizes = {"x": x, "y": y, "width": width, "height": height, "rx": 4}
        self._add("rect", {**sizes, "class": kind})

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        """A straight line."""
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})

    def dot(self, x: float, y: float, kind: str) -> None:
        """A small disc around a point."""
        self._add("circle", {"cx": x, "cy": y, "r": 4, "class": kind})

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        """A line that ends with a head; to the right, up or down."""
        self.line(x1, y1, x2, y2, kind)
        if x1 != x2:
            points = f"{x2 - 6:g},{y2 - 4:g} {x2:g},{y2:g} {x2 - 6:g},{y2 + 4:g}"
        else:
            back = -6 if y2 > y1 else 6
            points = f"{x2 - 4:g},{y2 + back:g} {x2:g},{y2:g} {x2 + 4:g},{y2 + back:g}"
        self._add("polyline", {"points": points, "class": kind})

    def as_svg(self, palette: Mapping[str, str]) -> str:
        """The whole file, in the colours of *palette*."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        told = 'role="img" aria-labelledby="title desc"'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {told}>',
                f'<title id="title">{escape(self._title)}</title>',
                f'<desc id="desc">{escape(self._description)}</desc>',
                f"<style>{_style(palette)}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{self._height}" rx="6"/>',
                f'<text class="head" x="20" y="32">{escape(self._title)}</text>',
                *self._shapes,
                "</svg>\n",
            )
        )

    def _add(self, name: str, attributes: Mapping[str, object], content: str = "") -> None:
        given = [(key, value) for key, value in attributes.items() if value != ""]
        told = " ".join(f'{key}="{_number(value)}"' for key, value in given)
        end = f">{content}</{name}>" if content else "/>"
        self._shapes.append(f"<{name} {told}{end}")


def _number(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def _style(palette: Mapping[str, str]) -> str:
    rules = [
        f"text{{font:14px {_FONT};fill:{palette['ink']}}}",
        ".head{font-size:17px;font-weight:600}.strong{font-weight:600}.small{font-size:12.5px}",
        f".soft{{font-size:12.5px;fill:{palette['soft']}}}",
        f".paper{{fill:{palette['paper']}}}.panel{{fill:{palette['panel']}}}",
        f".grey{{fill:{palette['panel']};stroke:{palette['soft']};stroke-width:1.2}}",
        f"line,polyline{{stroke:{palette['line']};fill:none;stroke-width:1}}",
        f".flow{{stroke:{palette['soft']};stroke-width:1.5}}",
        ".dashed{stroke-dasharray:4 4}",
    ]
    for hue in HUES:
        strong, fill = palette[hue], palette[f"{hue}-fill"]
        rules += [
            f"rect.{hue}{{fill:{fill};stroke:{strong};stroke-width:1.2}}",
            f"line.{hue},polyline.{hue}{{stroke:{strong};stroke-width:1.5}}",
            f"circle.{hue}{{fill:{strong}}}text.{hue}{{fill:{strong};font-weight:600}}",
        ]
    return "".join(rules)
