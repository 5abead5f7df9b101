"""Draws all pictures, each for a light and for a dark page.

Run it by the Python of `make check`, as `.deps/<digest>/bin/python3 -m tools.pictures`;
`tests/docs/test_pictures.py` fails if a file is not what would be drawn now.
"""

from __future__ import annotations

from tools.pictures.drawn import FOLDER, draw_all


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in draw_all().items():
        (FOLDER / name).write_text(text)
        print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
