"""Every exception that gracekit raises on purpose, in one tree.

Each class's docstring says what happened and what to do; messages add the
values. Their names end in `Error`, but for three that are named for a state
of the world, in which nothing has failed: `Draining`, `LeaseHeld` and
`Undeliverable`. Callers expect them, and do something else then.
"""

from __future__ import annotations


class GracekitError(Exception):
    """Root of everything gracekit raises on purpose."""


# -- configuration and declaration: exit 78 -----------------------------------


class ConfigError(GracekitError):
    """A setting is wrong, or two settings contradict each other."""


class DeclarationError(GracekitError):
    """A method, hook or argument of a service is declared in a way that cannot work."""


class SchemaTooNewError(ConfigError):
    """The store was written by a newer gracekit; upgrade this process or use another store."""


# -- the store ----------------------------------------------------------------


class StoreError(GracekitError):
    """The store did not do what was asked."""


class ConflictError(StoreError):
    """A compare-and-set found another value; the whole batch was rolled back.

    Attributes:
        statement: Index of the statement whose row count differed.
    """

    def __init__(self, message: str, *, statement: int) -> None:
        super().__init__(message)
        self.statement = statement


class UnknownCommitError(StoreError):
    """A commit neither succeeded nor failed visibly; read the rows again before acting."""


class StoreLockedError(StoreError):
    """Another program kept the database locked for as long as we wait; nothing was done."""


class StoreUnreachableError(StoreError):
    """The store cannot be reached for now; nothing was done."""


class StoreFinalError(StoreError):
    """This process commits nothing to its store any more; start it again."""


class StoreBrokenError(StoreFinalError):
    """An I/O error, a full or read-only disk, or corruption: final for this process."""


class StoreFencedError(StoreFinalError):
    """Others have declared this run dead and act in its place; its commits are refused for good."""


class StoreClosedError(StoreError):
    """The store is not open: it was not started yet, or is stopped."""


class DependencyError(GracekitError):
    """A broker or store cannot be reached at start: exit 69."""


# -- tracker and leases -------------------------------------------------------


class IllegalTransitionError(GracekitError):
    """A state may not follow the present one; see the table beside the enum."""


class LeaseHeld(GracekitError):  # noqa: N818 - named for a state
    """Another task or run holds the lease; it was not waited for.

    No `Error` in its name: the resource is in use, as it may be at any time, and who
    takes a lease by `ctx.lease` decides what to do then.
    """


class AlreadyRunningError(GracekitError):
    """A run of this instance is alive; give the second one another GRACEKIT_INSTANCE."""


# -- rpc ----------------------------------------------------------------------


class RpcError(GracekitError):
    """A request or its reply went wrong."""


class BadMessageError(RpcError):
    """Bytes that are no request: unreadable, too deep, or of another protocol version."""


class MessageTooLargeError(BadMessageError):
    """A body above `max_body_bytes`; nothing of it was parsed."""


class InvalidArgumentsError(RpcError, TypeError):
    """The arguments do not fit the method's signature."""


class NoSuchMethodError(RpcError):
    """No method of that name is served in that namespace."""


class UnsupportedVersionError(RpcError):
    """The service does not serve that version or namespace."""


class VersionCapError(RpcError):
    """The request needs a newer interface than `version_cap` allows; nothing was sent."""


class ConflictingRequestError(RpcError):
    """The request id is known with other content, or from another caller; draw new ids."""


class Undeliverable(RpcError):  # noqa: N818 - named for a state
    """No queue takes this message; nothing was kept.

    No `Error` in its name: the service or host is not there, or not yet, and the sender
    decides whether to try later.
    """


class UnconfirmedError(RpcError, TimeoutError):
    """The broker did not confirm a message in time; it may be in the queue, or not."""


class Draining(RpcError):  # noqa: N818 - named for a state
    """The service is draining and does not take this request; ask another host or later.

    No `Error` in its name: each service drains whenever it is stopped, and a client that
    may ask somebody else does.
    """


class CallTimeoutError(RpcError, TimeoutError):
    """No reply in time; the request may still run, now or after a restart."""


class HeartbeatTimeoutError(CallTimeoutError):
    """No heartbeat within `monitor_timeout`; the request may still run, as after any time-out."""


class MethodTimeoutError(RpcError, TimeoutError):
    """The method exceeded its own `timeout=`; its handler was cancelled."""


class RunEndedError(RpcError):
    """A control verb is meant for a run that has ended; its instance has another run now."""


class ControlOffError(RpcError):
    """Control verbs are not taken by this transport, whose senders are not known."""


class TaskInterruptedError(RpcError):
    """The task was started and its end is not known; recovery marked it ERRORED."""


class TaskCancelledError(RpcError):
    """The task was cancelled by an operator or its caller."""


class UnserialisableError(RpcError, TypeError):
    """A value cannot be written as JSON; return plain data."""


class RemoteError(RpcError):
    """The handler raised, and its class is not one this client was told to rebuild.

    Attributes:
        exc_class: Class name as sent, for example `"NotFound"`.
        exc_module: Module as sent, for example `"myapp.errors"`; never imported.
        traceback: The remote traceback as text, possibly empty.
    """

    def __init__(
        self, message: str, *, exc_class: str = "", exc_module: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.exc_class = exc_class
        self.exc_module = exc_module
        self.traceback = traceback
