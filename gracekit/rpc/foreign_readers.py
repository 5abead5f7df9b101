"""Foreign readers: processes that read one of our queues, but use another store.

Deduplication, leases of resources and recovery work only within one store. If two
processes read one queue and use two stores, both may run the same request,
or act on the same resource at the same time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from gracekit.config.choices import NOT_TWICE
from gracekit.errors import ConfigError
from gracekit.rpc.methods import Method
from gracekit.telemetry.telemetry import Telemetry

_SHOWN: Final = 5


class QueueReader(msgspec.Struct, frozen=True, kw_only=True):
    """A process that reads a queue.

    Attributes:
        queue: Wire name of the queue.
        store: Identity of the reader's store.
        label: `service@instance`, as the reader announced it; for display.
        pid: In its own pid namespace; for display. None if the transport does not know it.
    """

    queue: str
    store: str
    label: str
    pid: int | None


def need_one_store(methods: Iterable[Method[Any, Any]]) -> list[str]:
    """Sorted names of the methods that are safe only if all readers share one store."""
    return sorted(
        {
            method.name
            for method in methods
            if method.options.on_interrupt in NOT_TWICE or method.options.resource
        }
    )


def foreign_seen(readers: Sequence[QueueReader], store: str, methods: Sequence[str]) -> str:
    """The message for *methods* that need one store, while *readers* use another."""
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


SHARE_REMEDY: Final = "give both GRACEKIT_STORE_URL the same file, or each a topic of its own"
FOREIGN_REMEDY: Final = (
    f"{SHARE_REMEDY}; or, if each request names its host, say Service(..., queues='directed'), and "
    "give each host a GRACEKIT_HOST of its own; or set GRACEKIT_ACCEPT_UNSHARED_STORE=true if "
    "every request is safe to meet a second service, as beside a worker of oslo.messaging in a "
    "rolling move (docs/oslo.md)"
)


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


class ForeignReaders:
    """Looks for foreign readers when a service starts.

    Args:
        announce: Announces this process as a reader, and returns the foreign readers.
        store: Our store's name, for messages.
        methods: The methods that this service serves.
        accepts: Whether to start even if there is a foreign reader and a method needs one store.
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
        """Announce this process until the transport stops, and log every foreign reader.

        Raises:
            ConfigError: there is a foreign reader, and a method needs one store.
        """
        readers = await self._announce()
        methods = need_one_store(self._methods)
        if readers and methods and not self._accepts:
            raise ConfigError(f"{foreign_seen(readers, self._store, methods)}; {FOREIGN_REMEDY}")
        for reader in readers:
            self._telemetry.emit(
                "reader.foreign", queue=reader.queue, by=reader.label, store=reader.store
            )
