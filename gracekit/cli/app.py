"""From `module:attr` to a Service, with a clear word for each way that it can fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError
from gracekit.service import Service

DEFAULT_ATTRIBUTES: Final = ("svc", "app")


def load_service(target: str, *, factory: bool, app_dir: Path) -> Service:
    """Import the Service that *target* names.

    Args:
        target: `module:attr`; without an attribute `svc`, then `app`.
        factory: Whether the attribute is to be called for the Service.
        app_dir: Where modules are looked for first.

    Raises:
        ConfigError: there is no such module or attribute, or it is no Service.
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
    hint = "; add --factory to call it" if callable(value) and not factory else ""
    raise ConfigError(f"{target} is a {type(value).__name__}, not a gracekit Service{hint}")


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
    return value()


_MISSING: Final = object()
