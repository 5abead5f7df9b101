"""The TLS certificate of the endpoint, loaded again when its files change.

So a certificate can be renewed while the service runs; later handshakes use the new one.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path


class Certificate:
    """A certificate and its key, used by an SSL context.

    Args:
        context: The context, which has loaded them.
        files: PEM files of certificate and key.
        report: Called with None after new files were loaded. Called with the error if the changed
            files cannot be used, once for each change; the old certificate stays in use.
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
            # Try them in a separate context first: if only the certificate was new, the load would
            # fail but leave it in our context.
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
