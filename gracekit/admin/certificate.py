"""The TLS certificate of the endpoint, read again when its files change.

Certificates are renewed while a service runs. Handshakes that begin later use the new one.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path


class Certificate:
    """A certificate and its key, as a context uses them.

    Args:
        context: Has loaded them.
        files: Certificate and key, as PEM files.
        report: Called with None when new ones are in use, and with the error if the files have
            become unusable, once for each state of them. The old ones then stay in use.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        files: Sequence[str],
        report: Callable[[Exception | None], object],
    ) -> None:
        self._context = context
        self._files = files
        self._report = report
        self._seen = self._state()

    def read_changed(self) -> None:
        """Load the files if they have changed."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            # In a context of its own first: a certificate without its key would stay in the other.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self._context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            self._report(error)
        else:
            self._report(None)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: str) -> tuple[int, int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
