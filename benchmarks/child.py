"""A process that prepares something large and measures it whenever it is asked.

Sizes of one question live in processes of their own: they can take turns, and
the garbage of one does not slow the other. A line of numbers in, a line of JSON out.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.plain import be_quiet

ROOT: Final = Path(__file__).resolve().parent.parent
PATIENCE_S: Final = 60.0
"""For a child to end by itself."""
ON_UVLOOP: Final = "-uvloop"
"""The end of the name of a kind that runs on uvloop."""

Measure = Callable[..., Awaitable[list[float]]]
"""Takes the numbers of a line: mostly one, how much is to be done."""
Prepare = Callable[[int, Path], AbstractAsyncContextManager[Measure]]


class Child:
    """One such process, as its parent sees it.

    Args:
        module: In whose `PREPARE` the child looks *kind* up.
        kind: What it prepares.
        size: How much of it.
        directory: For its files.
        python: Of the environment in which it runs; None for this one.
        program: What it runs, if it is not this module.
    """

    def __init__(
        self,
        module: str,
        kind: str,
        size: int,
        directory: Path,
        *,
        python: Path | None = None,
        program: str = "benchmarks.child",
    ) -> None:
        command = [str(python or sys.executable), "-m", program, module, kind, str(size)]
        self._popen = subprocess.Popen(  # noqa: S603 - ourselves
            [*command, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            # Else, when who started the bench logs out, a stopped one's whole group is hung up.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    def ready(self) -> Self:
        """Wait until it has prepared."""
        self.answer()
        return self

    def measure(self, *numbers: int) -> list[float]:
        """Ask it for a measurement of so many steps, or of what else *numbers* mean to it."""
        self.ask(*numbers)
        return self.answer()

    def ask(self, *numbers: int) -> None:
        """Ask, and do not wait; `answer` does."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{' '.join(map(str, numbers))}\n")
        self._popen.stdin.flush()

    def answer(self) -> list[float]:
        """Wait for what it measured."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._popen.args!r} ended with {self._popen.wait()}")
        values: list[float] = json.loads(line)
        return values

    def kill(self) -> None:
        """End it at once, whatever it has in flight."""
        self._popen.kill()
        self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()
        if error is not None:
            self._popen.kill()
        try:
            self._popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()


async def main(module: str, kind: str, size: str, directory: str) -> None:
    """In the child."""
    from importlib import import_module  # noqa: PLC0415 - only the child has a module to find

    be_quiet()
    prepare: Prepare = import_module(f"benchmarks.{module}").PREPARE[kind]
    async with prepare(int(size), Path(directory)) as measure:
        print("[]", flush=True)
        async for line in _lines():
            print(json.dumps(await measure(*map(int, line.split()))), flush=True)


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line


def _loop_of(kind: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the loop for *kind*; None for asyncio's own."""
    if not kind.endswith(ON_UVLOOP):
        return None
    import uvloop  # noqa: PLC0415 - environments of other libraries do not have it

    return uvloop.new_event_loop


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_loop_of(sys.argv[2])) as runner:
        runner.run(main(*sys.argv[1:]))
