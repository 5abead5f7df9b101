"""Binds the socket of the HTTP endpoint: a TCP address or a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gracekit.config.admin import AdminAddress
from gracekit.control.door_wire import LONGEST_ADDRESS
from gracekit.errors import ConfigError
from gracekit.life import LifeLock

_BACKLOG: Final = 1024  # waiting connections take no descriptor
_LOCK_TRIES, _LOCK_PAUSE_S = 200, 0.01


def bind(address: AdminAddress) -> socket.socket:
    """A socket that listens at *address*.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        return _bind_path(address.path) if address.path is not None else _bind_tcp(address)
    except OSError as error:
        raise ConfigError(
            f"admin = {address} cannot be listened at: {error.strerror or error}; is another "
            "process there (`ss -ltnp`, or `ls` for a socket)? Set GRACEKIT_ADMIN to a free "
            "address, or to off"
        ) from error


def _bind_tcp(address: AdminAddress) -> socket.socket:
    family, *_, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # After a restart the old run's connections must not block the address.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_path(path: Path) -> socket.socket:
    """A unix socket that only this user and root can open; a stale one is replaced."""
    if len(os.fsencode(path)) > LONGEST_ADDRESS:
        raise ConfigError(
            f"admin = unix:{path} has a path of {len(os.fsencode(path))} bytes, and the kernel "
            f"takes {LONGEST_ADDRESS}: set GRACEKIT_ADMIN to a shorter one"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux makes the file with the mode of its socket
        with _alone_at(path):
            _remove_stale(path)
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Hold a lock, so that other starts that want to listen at *path* wait.

    Otherwise two starts could find the same stale socket, and the slower one would remove the
    socket that the other has just made.
    """
    lock = LifeLock(path.with_name(f".{path.name}.lock"))
    for _ in range(_LOCK_TRIES):
        if _acquire(lock):
            break
        time.sleep(_LOCK_PAUSE_S)
    else:
        raise TimeoutError(f"another start holds {lock.path}")
    try:
        yield
    finally:
        lock.release(remove=True)


def _acquire(lock: LifeLock) -> bool:
    try:
        return lock.acquire()
    except ConfigError as error:  # its message is about locks of runs, so raise the cause
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def _remove_stale(path: Path) -> None:
    """Remove the socket of a dead process, but not one on which a process listens."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def name_of(listener: socket.socket) -> str:
    """Address and port, as in a URL."""
    host, port, *_ = listener.getsockname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
