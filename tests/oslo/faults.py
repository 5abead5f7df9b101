"""What an application's own exceptions look like, for both sides of the wire.

In a module of their own, because its name travels: an oslo client imports it if it is told that
it may, a gracekit client maps `tests.oslo.faults.NotFound` to the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final


class ShopError(Exception):
    """As OpenStack projects make them: a format, filled from keyword arguments that are kept."""

    msg_fmt = "something is wrong in the shop"

    def __init__(self, message: str | None = None, **kwargs: Any) -> None:
        self.kwargs = kwargs
        super().__init__(message or self.msg_fmt % kwargs)


class NotFound(ShopError):  # noqa: N818 - as it is called in many projects
    msg_fmt = "%(item)s is not in stock"


class TooMany(Exception):  # noqa: N818
    """The other way: positional arguments, and a text made from them."""

    def __init__(self, item: str, most: int) -> None:
        super().__init__(item, most)

    def __str__(self) -> str:
        item, most = self.args
        return f"at most {most} of {item}"


def _chained() -> Exception:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    return error


_FAULTS: Final[Mapping[str, Callable[[], BaseException]]] = MappingProxyType(
    {
        "builtin": lambda: ValueError("no such size: 7"),
        "builtin_two_args": lambda: FileNotFoundError(2, "No such file", "/lamp"),
        "builtin_without_args": ZeroDivisionError,
        "key": lambda: KeyError("lamp"),
        "chained": _chained,
        "app_with_kwargs": lambda: NotFound(item="lamp"),
        "app_with_args": lambda: TooMany("lamp", 7),
        "args_not_json": lambda: ValueError("odd", object(), {1, 2}),
        "system_exit": lambda: SystemExit(3),
    }
)

FAULTS: Final = tuple(_FAULTS)


def fault(name: str) -> BaseException:
    """By its name an exception, as new, that an endpoint may raise."""
    return _FAULTS[name]()
