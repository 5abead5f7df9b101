"""`StopRequest`: who asks for a drain, and why. `DrainReport`: what the drain leaves behind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gracekit.config.choices import StopSource
from gracekit.exits import ExitCode

LISTED_HOLDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Who wants a stop, and how much.

    Attributes:
        source: What the record tells stops apart by.
        by: A signal's name, or who asked.
        reason: A sentence for the record.
        final: Whether it cannot be resumed; signals and errors are final.
        at: Loop time at which it was asked for; deadlines count from here.
        timeout_s: Seconds of this drain; None for the setting.
    """

    source: StopSource
    by: str
    reason: str
    final: bool
    at: float
    timeout_s: float | None = None


@dataclass(slots=True, kw_only=True)
class DrainReport:
    """What a drain leaves behind.

    Attributes:
        waited_s: Seconds from the request to the end of the wait.
        finished: Tasks that held the drain and ended by themselves.
        handed_over: Request ids handed over: at a safe point, or cut at the deadline.
        not_started: Request ids accepted and never started; anyone may claim them.
        unclean: Request ids whose handler had not returned.
        given_back: Deliveries and `requeue` tasks given back to the transport.
        open_holds: Holds that were still open at the deadline.
        holds: The oldest of them, `name key` each, `LISTED_HOLDS` at most.
        leases_kept: Leases that only the death of this process frees.
        left_behind: Requests that were still in gracekit's own hands, in a commit or a reply.
        hooks_left: Hooks that ignored their cancellation and still ran; they hold no request.
        unfinished: Rows and holds in the store that this run could have settled, those of earlier
            runs among them; None if the store did not say.
        forced: Whether a second signal cut the wait short.
        failure: Why the end was not in order; None if it was.
        failed_as: What the process tells its supervisor then.
    """

    waited_s: float = 0.0
    finished: int = 0
    handed_over: list[str] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    given_back: int = 0
    open_holds: int = 0
    holds: list[str] = field(default_factory=list)
    leases_kept: int = 0
    left_behind: int = 0
    hooks_left: int = 0
    unfinished: int | None = 0
    forced: bool = False
    failure: str | None = None
    failed_as: ExitCode = ExitCode.INTERNAL

    @property
    def named_holds(self) -> str | None:
        """`migration vm-1, migration vm-2 and 3 more`; None without holds."""
        more = self.open_holds - len(self.holds)
        return ", ".join(self.holds) + (f" and {more} more" if more > 0 else "") or None

    @property
    def can_still_act(self) -> bool:
        """Whether something still runs that holds a request: only its death proves its end."""
        return bool(self.unclean or self.leases_kept or self.left_behind)

    @property
    def must_die(self) -> bool:
        """Whether the process has to leave by `os._exit`, as something in it does not end."""
        return self.can_still_act or self.hooks_left > 0

    @property
    def exit_code(self) -> ExitCode:
        """What the process tells its supervisor."""
        if self.failure is not None:
            return self.failed_as
        if self.handed_over or self.not_started or self.unclean or self.open_holds:
            return ExitCode.HANDED_OVER
        if self.unfinished != 0:  # unknown is not nothing
            return ExitCode.HANDED_OVER
        return ExitCode.DRAINED

    def as_json(self) -> dict[str, Any]:
        """Plain data, as the stop record keeps it; `left` says that nothing can act any more."""
        return asdict(self) | {"exit_code": int(self.exit_code), "left": not self.can_still_act}
