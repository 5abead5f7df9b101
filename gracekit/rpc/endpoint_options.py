"""The options of oslo endpoints.

`oslo_adapter` uses it; this module does not need oslo.messaging.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError, DeclarationError
from gracekit.rpc.method_options import OPTIONS, MethodOptions, options_from

HOOKS: Final = ("probe", "errored")
KNOWN: Final = (*(name for name in OPTIONS if name not in {"namespace", "version"}), *HOOKS)
"""The options of a method of an endpoint. Its target says namespace and version."""

_AS: Final = "options={'create': {'on_interrupt': 'retry'}}"

Options = Mapping[str, Mapping[str, Any]]


def check_shape(options: object) -> None:
    """Check that *options* are mappings by the names of methods.

    Raises:
        DeclarationError: they are not; the message shows what they should be.
    """
    if not isinstance(options, Mapping):
        raise DeclarationError(
            f"options must be a mapping, as {_AS}, and not a {type(options).__name__}"
        )
    for name, given in options.items():
        if not isinstance(name, str):
            raise DeclarationError(f"options name {name!r}: write the name of a method, as {_AS}")
        if not isinstance(given, Mapping):
            raise DeclarationError(f"options[{name!r}]={given!r} must be a mapping, as {_AS}")


def check_names(options: Options, served: Collection[str]) -> None:
    """Check that each method in *options* is *served*.

    Raises:
        DeclarationError: one is not.
    """
    for name in options:
        if name not in served:
            raise DeclarationError(
                f"options[{name!r}]: no endpoint serves it{did_you_mean(name, served)}"
            )


def read_options(name: str, given: Mapping[Any, Any], place: Mapping[str, Any]) -> MethodOptions:
    """The options *given* for the method *name*, which is served at *place*.

    Raises:
        DeclarationError: one is unknown or wrong.
    """
    for option, value in given.items():
        if option not in KNOWN:
            hint = did_you_mean(option, KNOWN) if isinstance(option, str) else ""
            raise DeclarationError(f"{name}: unknown option {option!r}{hint}")
        if option in HOOKS and not callable(value):
            raise DeclarationError(f"{name}: {option}={value!r} is no function")
    policy = {option: value for option, value in given.items() if option not in HOOKS}
    try:
        return options_from(**policy, **place)
    except ConfigError as error:
        raise DeclarationError(f"{name}: {error}") from None
