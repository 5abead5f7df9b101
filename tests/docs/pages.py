"""What the tests of the pages in docs/ begin with: blocks of code, as files that can be run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
_NAMED: Final = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OUTPUT: Final = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Page:
    """One page.

    Attributes:
        text: As it stands.
        files: Its named blocks: a block of Python or TOML begins with a line `# thumbs.py`.
        outputs: Its blocks of text, in their order: what the programs print.
    """

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text()
        self.files = dict(_NAMED.findall(self.text))
        self.outputs = _OUTPUT.findall(self.text)

    def write_to(self, directory: Path) -> None:
        """Write the named blocks as files."""
        for name, text in self.files.items():
            (directory / name).write_text(text)


def environment(**more: str) -> dict[str, str]:
    """For a process that a reader would start: no setting but *more*."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def run(directory: Path, *arguments: str, **env: str) -> str:
    """Run Python with *arguments* in *directory* to its end; what it printed."""
    done = subprocess.run(
        (sys.executable, *arguments),
        cwd=directory,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
