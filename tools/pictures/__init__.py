"""The pictures of the documentation: `python3 -m tools.pictures` draws them into docs/pictures."""
