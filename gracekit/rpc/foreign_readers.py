"""Readers of a shared queue that keep what they take in another store.

Dedupe, one task at a time for a resource, and recovery hold within one store.
Two services that read one shared queue into two stores would each believe
that a request, or a resource, is theirs alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gracekit.config.choices import NOT_TWICE
from gracekit.errors import ConfigError
from gracekit.rpc.methods import Method
from gracekit.telemetry.telemetry import Telemetry

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReader:
    """A process that reads a shared queue.

    Attributes:
        queue: Its wire name.
        store: Identity of the store in which it keeps what it takes.
        label: `service@instance`, as it said; for display.
        pid: In its own pid namespace; for display. None where the transport does not know.
    """

    queue: str
    store: str
    label: str
    pid: int | None


def need_one_store(methods: Iterable[Method[Any, Any]]) -> list[str]:
    """Names of the methods whose promises end where a second store begins, sorted."""
    return sorted(
        {
            method.name
            for method in methods
            if method.options.on_interrupt in NOT_TWICE or method.options.resource
        }
    )


def foreign_seen(readers: Sequence[QueueReader], store: str, methods: Sequence[str]) -> str:
    """What is wrong where *methods* need one store and *readers* keep to another: one sentence."""
    others = {
        reader.label if reader.pid is None else f"{reader.label} (pid {reader.pid})"
        for reader in readers
    }
    queues = sorted({reader.queue for reader in readers})
    return (
        f"services with different stores read queue {' and '.join(queues)}: this one, with the "
        f"store {store}, and {_listed(others)}. {_listed(methods)} must not run twice, or at the "
        "same time for one resource, and only a common store prevents that"
    )


FOREIGN_REMEDY: Final = (
    "give both GRACEKIT_STORE_URL the same file, or each a topic of its own; or set "
    "GRACEKIT_ACCEPT_UNSHARED_STORE=true if every request is safe to meet a second service, as "
    "beside a worker of oslo.messaging in a rolling move (docs/oslo.md)"
)


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


class ForeignReaders:
    """Looks at a start who else reads the shared queues, into another store.

    Args:
        announce: Says that this process reads them; returns who does so into another store.
        store: As messages name it.
        methods: What is served.
        accepts: Whether methods that need one store may be served while others use another.
    """

    def __init__(
        self,
        announce: Callable[[], Awaitable[list[QueueReader]]],
        telemetry: Telemetry,
        *,
        store: str,
        methods: Iterable[Method[Any, Any]],
        accepts: bool,
    ) -> None:
        self._announce = announce
        self._telemetry = telemetry
        self._store = store
        self._methods = methods
        self._accepts = accepts

    async def start(self) -> None:
        """Announce ourselves, and log every foreign reader.

        Raises:
            ConfigError: there is one, and a method needs one store.
        """
        readers = await self._announce()
        methods = need_one_store(self._methods)
        if readers and methods and not self._accepts:
            raise ConfigError(f"{foreign_seen(readers, self._store, methods)}; {FOREIGN_REMEDY}")
        for reader in readers:
            self._telemetry.emit(
                "reader.foreign", queue=reader.queue, by=reader.label, store=reader.store
            )

    async def stop(self) -> None:
        """Nothing: the announcement goes with the connection."""
