"""`StopRequest`: who asks for a drain, and why. `DrainReport`: how the drain ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from gracekit.config.choices import StopSource
from gracekit.exits import ExitCode
from gracekit.journal.holds import Hold

LISTED_HOLDS: Final = 5


def list_first(titles: Sequence[str], number: int) -> str | None:
    """`migration vm-1, migration vm-2 and 3 more`, of *number* in all; None without holds."""
    named = titles[:LISTED_HOLDS]
    more = number - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "") or None


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for a drain, why, and how long it may take.

    Attributes:
        source: Kind of the sender, such as `signal` or `operator`, for the record.
        by: Name of the signal, or of the sender.
        reason: A sentence for the record.
        final: Whether the drain cannot be resumed; signals and errors are final.
        at: Loop time of the request; deadlines count from here.
        timeout_s: Seconds until the deadline; None for the setting `drain_timeout`.
        stays_down: Whether the instance is to stay down, as a user of the service wishes it.
        final_by: Which later request made it final, in words; empty if none did.
    """

    source: StopSource
    by: str
    reason: str
    final: bool
    at: float
    timeout_s: float | None = None
    stays_down: bool = False
    final_by: str = ""

    @property
    def why_final(self) -> str:
        """Who made it final: `signal SIGTERM asked for it`."""
        return self.final_by or self._who()

    def _who(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        match self.source:
            case "signal":
                return f"signal {self.by} asked for it"
            case "operator" | "rollout":
                return f"{self.source} {self.by} asked for it{why}"
            case "user":
                return f"the program asked for it{why}"
            case "error":
                return f"a fault asked for it{why}"

    def ending_at(self, deadline: float, *, final: StopRequest | None = None) -> StopRequest:
        """This request with another deadline, in loop time; *final* has made it final."""
        timeout_s = deadline - self.at
        if final is None:
            return msgspec.structs.replace(self, timeout_s=timeout_s)
        return msgspec.structs.replace(
            self, timeout_s=timeout_s, final=True, final_by=final.why_final
        )


@dataclass(slots=True, kw_only=True)
class DrainReport:
    """How a drain ended, and what it could not finish.

    Attributes:
        waited_s: Seconds from the request to the end of the wait.
        finished: Number of tasks that ended by themselves in the drain.
        handed_over: Request ids handed over: at a safe point, or cut at the deadline.
        not_started: Request ids accepted and not started; any run may claim them.
        unclean: Request ids whose handlers had not returned.
        given_back: Number of deliveries, also of `requeue` tasks, given back to the transport.
        open_holds: Number of holds still open at the deadline.
        holds: The oldest of them, each as `name key`, at most `LISTED_HOLDS`.
        leases_kept: Number of leases that only the death of this process frees.
        left_behind: Number of requests with a commit or reply of gracekit still under way.
        hooks_left: Number of hooks that ignored their cancellation and still ran.
        unfinished: Number of rows, holds and due errored hooks in the store that this run could
            have settled, also those of earlier runs; None if the store did not say.
        forced: Whether a second signal cut the wait short.
        failure: Why the end was not in order; None if it was.
        failed_as: The exit code in that case.
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

    def __repr__(self) -> str:
        """With what it means first; `failed_as` means nothing without a failure."""
        shown = {"exit_code": int(self.exit_code), "must_die": self.must_die} | asdict(self)
        if self.failure is None:
            del shown["failed_as"]
        return f"DrainReport({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def named_holds(self) -> str | None:
        """`migration vm-1, migration vm-2 and 3 more`; None without holds."""
        return list_first(self.holds, self.open_holds)

    def note_holds(self, holds: Sequence[Hold]) -> None:
        """Note which holds are open now."""
        self.open_holds = len(holds)
        self.holds = [hold.title for hold in holds[:LISTED_HOLDS]]

    @property
    def can_still_act(self) -> bool:
        """Whether something that works on a request still runs; only its death ends that."""
        return bool(self.unclean or self.leases_kept or self.left_behind)

    @property
    def must_die(self) -> bool:
        """Whether the process must exit by `os._exit`, because something in it does not end."""
        return self.can_still_act or self.hooks_left > 0

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the process."""
        if self.failure is not None:
            return self.failed_as
        if self.handed_over or self.not_started or self.unclean or self.open_holds:
            return ExitCode.HANDED_OVER
        if self.unfinished != 0:  # also if it is not known
            return ExitCode.HANDED_OVER
        return ExitCode.DRAINED

    def as_json(self, *, dies_by: float | None = None) -> dict[str, Any]:
        """Plain data for the stop record; `left` is true if nothing of the run can act any more.

        *dies_by* is the wall time at which the kernel's alarm ends the process at the latest; None
        without an alarm.
        """
        more = {"exit_code": int(self.exit_code), "left": not self.can_still_act}
        return asdict(self) | more | {"dies_by": dies_by}
