"""Binds the socket of the HTTP endpoint: a TCP address or a unix socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from gracekit.config.admin import AdminAddress
from gracekit.control.door_wire import LONGEST_ADDRESS
from gracekit.errors import ConfigError

_BACKLOG: Final = 1024  # waiting connections take no descriptor


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
        _remove_stale(path)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


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
