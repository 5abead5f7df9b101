"""What periodic jobs and the rules of resources get in place of a handler's Context."""

from __future__ import annotations

from gracekit.errors import DeclarationError
from gracekit.request.context import Context, Services
from gracekit.tracker.task import TrackedTask


class WorkContext(Context):
    """The Context of work that answers no request.

    `fence`, `deadline`, `time_left`, `draining`, `cancelled`, `lease` and `track` work as in a
    handler. There is no caller, so the mapping is empty. Attributes that belong to a request
    raise DeclarationError.
    """

    __slots__ = ("_what",)

    def __init__(self, task: TrackedTask, services: Services, *, what: str) -> None:
        """Show *task*; *what* names the work in errors, such as `periodic job refresh`."""
        name = (None, task.method, "1.0")
        super().__init__(task, services, args={}, caller={}, method=name, expires_at=None)
        self._what = what

    def __repr__(self) -> str:
        return f"<Context of {self._what}>"

    @property
    def request_id(self) -> str:
        """Not available: this work has no sender.

        Raises:
            DeclarationError: always; use `task_id`, the id in the log.
        """
        raise self._no_request("request_id", "ctx.task_id is what the log has")

    @property
    def attempt(self) -> int:
        """Not available: after a failure the work is not tried again; its next run is a new one.

        Raises:
            DeclarationError: always.
        """
        raise self._no_request("attempt", "its next run comes by itself")

    # The arguments are those of Context.hold.
    async def hold(self, name: str, key: str, *, at_most: str | float) -> None:  # noqa: ARG002
        """Not available: a hold that is left open is settled by the probe of a method.

        Raises:
            DeclarationError: always.
        """
        raise self._no_request("hold()", "open the hold in the method whose probe can settle it")

    def _no_request(self, missing: str, remedy: str) -> DeclarationError:
        return DeclarationError(
            f"{self._what} answers no request, so it has no ctx.{missing}: {remedy}"
        )
