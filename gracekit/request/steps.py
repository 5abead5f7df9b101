"""`ctx.steps()`: a loop over the items of a task, with a safe point after each."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gracekit.errors import DeclarationError

if TYPE_CHECKING:
    from gracekit.request.context import Context


class Steps:
    """The iterator behind `Context.steps`."""

    def __init__(self, ctx: Context, source: Sequence[Any] | Callable[[Any], Any]) -> None:
        self._ctx = ctx
        self._source = source
        self._last: int | None = None  # cursor of the last item: no need to stop after it
        self._said: object = None  # the progress that this loop has said last
        self._is_over = False
        is_sequence = isinstance(source, Sequence) and not isinstance(source, str | bytes)
        if not is_sequence and not callable(source):
            raise TypeError(
                f"ctx.steps() takes a sequence or a callable of the last cursor, not "
                f"{type(source).__name__}: a generator could not be resumed after a restart; "
                "pass the function that makes it"
            )

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Items in order; the step from one item to the next is a safe point."""
        async for entry in _as_async(self._begin()):
            cursor, item = _split(entry)
            yield item
            self._check_alone()
            self._say(cursor)
            await self._ctx.safe_point(cursor, last=cursor == self._last)
        self._is_over = True

    def __iter__(self) -> Iterator[Any]:
        """The same for plain handlers, in their thread."""
        for entry in self._begin():
            cursor, item = _split(entry)
            yield item
            self._check_alone()
            self._say(cursor)
            self._ctx.safe_point_in_thread(cursor, last=cursor == self._last)
        self._is_over = True

    def _begin(self) -> Any:
        """Entries after the cursor; from now on this loop moves it."""
        before = self._ctx._steps  # noqa: SLF001 - Steps is a part of Context
        if before is not None and before._is_over:  # noqa: SLF001 - its own class
            raise self._second()
        self._ctx._steps = self  # noqa: SLF001
        self._ctx._stop_if_asked()  # noqa: SLF001
        cursor, source = self._ctx.cursor, self._source
        if not isinstance(source, Sequence):
            return source(cursor)
        if before is None and self._ctx._task.safe_point_at is not None:  # noqa: SLF001
            raise DeclarationError(
                f"{self._ctx.method}() calls ctx.safe_point({cursor!r}) and then loops over "
                "ctx.steps(sequence), which takes the cursor for an index and would skip items; "
                "give ctx.steps() a callable of the cursor, or leave the safe point out"
            )
        start = 0 if cursor is None else int(cursor) + 1
        self._last = len(source) - 1
        return ((n, source[n]) for n in range(start, len(source)))

    def _say(self, cursor: Any) -> None:
        """Say the progress of a loop over a sequence, unless the handler says it itself."""
        task = self._ctx._task  # noqa: SLF001 - Steps is a part of Context
        if self._last is not None and task.progress is self._said:
            self._ctx.progress(cursor + 1, self._last + 1)
            self._said = task.progress

    def _check_alone(self) -> None:
        if self._ctx._steps is not self:  # noqa: SLF001 - Steps is a part of Context
            raise self._second()

    def _second(self) -> DeclarationError:
        return DeclarationError(
            f"{self._ctx.method}() has two loops over ctx.steps(), but a task has one cursor: the "
            "second loop, and each of them after a restart, would skip items; make one loop "
            "over all items, or two methods"
        )


def _split(entry: Any) -> tuple[Any, Any]:
    """(cursor, item); an entry that is not a pair is both at once."""
    if isinstance(entry, tuple) and len(entry) == 2:  # noqa: PLR2004 - a pair
        return entry[0], entry[1]
    return entry, entry


async def _as_async(items: Any) -> AsyncIterator[Any]:
    if inspect.isawaitable(items):
        items = await items
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
