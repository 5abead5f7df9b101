"""From `module:attr` to a Service, with a clear word for each way that it can fail."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError
from gracekit.service import Service


class LoadFailedError(Exception):
    """The application has raised the cause, such as a SystemExit, which would end us; says when."""


DEFAULT_ATTRIBUTES: Final = ("svc", "app")


def what_failed(error: Exception) -> tuple[BaseException, str]:
    """What the application has raised as it was loaded, and when, for the end of a sentence."""
    if isinstance(error, LoadFailedError) and error.__cause__ is not None:
        return error.__cause__, str(error)
    return error, "when it was imported"


def load_service(target: str, *, factory: bool, app_dir: Path) -> Service:
    """Import the Service that *target* names.

    Args:
        target: `module:attr`; for `module` alone, its attribute `svc`, or else `app`, is used.
        factory: Whether the attribute is to be called for the Service.
        app_dir: Where modules are looked for first.

    Raises:
        ConfigError: there is no such module or attribute, or it is no Service.
        LoadFailedError: its factory has raised, or the module what is no Exception.
        Exception: whatever the module itself raises.
    """
    name, _, attribute = target.partition(":")
    if not name or name.endswith(".py") or "/" in name:
        raise ConfigError(
            f"{target!r} names no module; write module:attr, for example "
            f"{Path(name).stem or 'compute'}:svc, and --app-dir for its directory"
        )
    module = _import(name, app_dir)
    value = _find(module, attribute)
    if factory:
        value = _call(value, target)
    if isinstance(value, Service):
        return value
    hint = "" if factory else _hint(value, module)
    raise ConfigError(f"{target} is a {type(value).__name__}, not a gracekit Service{hint}")


def _hint(value: object, module: ModuleType) -> str:
    """What was meant by something that is no Service: a factory, or a Service beside it."""
    if isinstance(value, FunctionType) and not _why_not_called(value):
        return "; add --factory to call it"
    services = [name for name, one in vars(module).items() if isinstance(one, Service)]
    return f"; write {module.__name__}:{services[0]}" if services else ""


def _why_not_called(function: Callable[..., object]) -> str:
    """Why *function* cannot be called without arguments; empty if it can."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin that does not say what it takes
        return ""
    return ""


def _import(name: str, app_dir: Path) -> ModuleType:
    directory = str(app_dir.resolve())
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The name itself or a package above it; anything else is missing *inside* the module.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        known = {path.stem for path in Path(directory).glob("*.py")}
        raise ConfigError(
            f"there is no module {error.name!r} in {directory} or on the Python path"
            f"{did_you_mean(error.name, known)}; --app-dir says where to look"
        ) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise LoadFailedError("when it was imported") from error


def _find(module: ModuleType, attribute: str) -> object:
    names = (attribute,) if attribute else DEFAULT_ATTRIBUTES
    for name in names:
        value: object = module
        for part in name.split("."):
            value = getattr(value, part, _MISSING)
        if value is not _MISSING:
            return value
    public = [name for name in vars(module) if not name.startswith("_")]
    services = [name for name in public if isinstance(vars(module)[name], Service)]
    hint = did_you_mean(names[0], services or public)
    if services and not hint:
        hint = f"; it has {', '.join(services)}"
    raise ConfigError(f"module {module.__name__!r} has no {' or '.join(map(repr, names))}{hint}")


def _call(value: object, target: str) -> object:
    if isinstance(value, Service) or not callable(value):
        raise ConfigError(f"--factory calls {target}, and that is a {type(value).__name__}")
    if why := _why_not_called(value):
        raise ConfigError(
            f"--factory calls {target} without arguments, and that does not do: {why}; give the "
            "arguments defaults, or call it in the module and name its Service"
        )
    try:
        return value()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise LoadFailedError("when its factory was called") from error


_MISSING: Final = object()
