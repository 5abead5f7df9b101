"""The Context of work that is no request: of a periodic job, and of the rules of resources."""

from __future__ import annotations

from gracekit.errors import DeclarationError
from gracekit.request.context import Context, Services
from gracekit.tracker.task import TrackedTask


class WorkContext(Context):
    """Work that answers no request, as its code sees it.

    `fence`, `deadline`, `time_left`, `draining`, `cancelled`, `lease` and `track` are those of
    any work. There is no caller, so the mapping is empty; and nothing of a request: what asks
    for it raises DeclarationError.
    """

    __slots__ = ("_what",)

    def __init__(self, task: TrackedTask, services: Services, *, what: str) -> None:
        """Show *task*; *what* says what it is, as `periodic job refresh`."""
        name = (None, task.method, "1.0")
        super().__init__(task, services, args={}, caller={}, method=name, expires_at=None)
        self._what = what

    def __repr__(self) -> str:
        return f"<Context of {self._what}>"

    @property
    def request_id(self) -> str:
        """Not there: this work has no sender.

        Raises:
            DeclarationError: always; `task_id` is what the log has.
        """
        raise self._no_request("request_id", "ctx.task_id is what the log has")

    @property
    def attempt(self) -> int:
        """Not there: what failed is not repeated as an attempt, its next run comes by itself.

        Raises:
            DeclarationError: always.
        """
        raise self._no_request("attempt", "its next run comes by itself")

    @property
    def version(self) -> str:
        """Not there: nobody has asked for a version.

        Raises:
            DeclarationError: always.
        """
        raise self._no_request("version", "nobody has asked for one")

    # The arguments are those of Context.hold.
    async def hold(self, name: str, key: str, *, at_most: str | float) -> None:  # noqa: ARG002
        """Not there: what is left of a hold is settled by the probe of the method that opened it.

        Raises:
            DeclarationError: always.
        """
        raise self._no_request("hold()", "open the hold in the method whose probe can settle it")

    def _no_request(self, missing: str, remedy: str) -> DeclarationError:
        return DeclarationError(
            f"{self._what} answers no request, so it has no ctx.{missing}: {remedy}"
        )
