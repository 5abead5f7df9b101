"""The Context of a kind's functions: of its `find`, its `write`, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gracekit.errors import DeclarationError
from gracekit.request.steps import Steps
from gracekit.request.work_context import WorkContext


class NoCallerError(DeclarationError, KeyError):
    """A rule has no request whose context could be read; a KeyError, as the mapping is empty."""


class RuleContext(WorkContext):
    """As `WorkContext`, and without safe points: a rule is always called from its beginning."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        raise NoCallerError(
            f"{self._what} answers no request, so it has no caller and no ctx[{key!r}]: take what "
            "it needs from the application's own record"
        )

    # The arguments are those of Context.safe_point.
    async def safe_point(self, cursor: Any, *, last: bool = False) -> None:  # noqa: ARG002
        """Not available: a rule has no safe points.

        Raises:
            DeclarationError: always.
        """
        raise self._no_safe_point("safe_point()")

    def safe_point_in_thread(self, cursor: Any, *, last: bool = False) -> None:  # noqa: ARG002
        """Not available: a rule has no safe points.

        Raises:
            DeclarationError: always.
        """
        raise self._no_safe_point("safe_point_in_thread()")

    def steps(self, source: Sequence[Any] | Callable[[Any], Any]) -> Steps:  # noqa: ARG002
        """Not available: a rule has no safe points.

        Raises:
            DeclarationError: always.
        """
        raise self._no_safe_point("steps()")

    def _no_safe_point(self, missing: str) -> DeclarationError:
        return self._no_request(missing, "after a stop it is called again from its beginning")
