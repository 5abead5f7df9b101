"""Functions of the application: what they are called, and how they want to be called.

A coroutine function is awaited on the loop, anything else is called in a thread. Every place that
takes a function of the application asks here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from gracekit.errors import DeclarationError

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_PLAIN: Final = "__gracekit_plain__"
_MOST_WRAPPERS: Final = 100  # some objects have every attribute, so that the search had no end


def plain(function: FunctionT) -> FunctionT:
    """Mark a function that looks like a coroutine function, and runs the coroutine to its end.

    Such as one that a decorator has made by `asyncio.run` or `async_to_sync`. It is called in a
    thread. Write `@plain` above that decorator.
    """
    try:
        setattr(function, _PLAIN, True)
    except (AttributeError, TypeError) as error:
        raise DeclarationError(f"{function!r} takes no mark: mark a def around it") from error
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of *function* makes a coroutine; also for partials and objects."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(_called(function))


def _called(function: Callable[..., Any]) -> Any:
    """The code that a call of *function* runs first."""
    while isinstance(function, partial):
        function = function.func
    has_code = inspect.isroutine(function) or isinstance(function, type)
    return function if has_code else type(function).__call__


def name_of(function: Callable[..., Any]) -> str:
    """Its name; that of the class for an object without one."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def shown_name(function: Callable[..., Any]) -> str:
    """Its name with that of its class, for errors."""
    return str(getattr(function, "__qualname__", name_of(function))).rpartition("<locals>.")[2]


def check(function: Callable[..., Any], what: str, *, awaited: bool = True) -> None:
    """Refuse a function that would seem to have run without having done so.

    Args:
        function: A function of the application.
        what: What it is declared as, for the error.
        awaited: Whether a coroutine function may be given.

    Raises:
        DeclarationError: it has a `yield`, hides a coroutine function, or is one unduly.
    """
    if not callable(function):
        raise DeclarationError(f"{what} {function!r} is no function")
    name, inner = shown_name(function), innermost(function)
    if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
        raise DeclarationError(
            f"{what} {name}() has a yield, so to call it runs nothing and makes a generator: "
            "return the whole result in place of the yield, or, if a decorator loops over it, put "
            "@gracekit.plain above that"
        )
    if is_async(function):
        if not awaited:
            raise DeclarationError(
                f"{what} {name}() is a coroutine function, and is called without being awaited: "
                "make it a plain function"
            )
    elif is_async(inner):
        raise DeclarationError(
            f"{what} {name}() is a coroutine function behind a plain decorator, which may never "
            "await it: write the decorator's function as `async def` with an await, or, if it runs "
            "the coroutine to its end itself, put @gracekit.plain above it"
        )


def check_call(
    function: Callable[..., Any], what: str, written: str, *, has_self: bool = False
) -> list[inspect.Parameter]:
    """Check a function, and that it can be called with the arguments in *written*.

    Args:
        function: A function of the application.
        what: What it is declared as, for the error.
        written: The arguments as in a `def`. Those after `*` are passed by name.
        has_self: Whether it is a function of a class.

    Returns:
        Its parameters; empty for a builtin that does not tell them.

    Raises:
        DeclarationError: it is refused.
    """
    check(function, what)
    by_place, _, by_name = written.partition("*, ")
    try:
        signature = inspect.signature(function)
        signature.bind(*["self"] * has_self, *_names(by_place), **dict.fromkeys(_names(by_name)))
        return [*signature.parameters.values()]
    except TypeError as error:
        name, given = name_of(function), f"({written})" if written else "no argument"
        raise DeclarationError(
            f"{what} {shown_name(function)}() is called with {given}, and its arguments do not fit "
            f"({error}): write def {name}({'self, ' * has_self}{written})"
        ) from None
    except ValueError:
        return []


def _names(written: str) -> list[str]:
    return [part.split(":")[0].strip() for part in written.split(",") if part.strip()]


def innermost(function: Callable[..., Any]) -> Any:
    """The function behind all decorators and partials, or the first one marked as `plain`."""
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(function, "__wrapped__", None) or _called(function)
        if inner is function or getattr(function, _PLAIN, False) is True:
            break
        function = inner
    return function
