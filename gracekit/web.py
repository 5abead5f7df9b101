"""The HTTP endpoint for programs that serve HTTP themselves: mount `application(runtime)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracekit.admin.access import access_of
from gracekit.errors import ConfigError
from gracekit.runtime.face import Runtime
from gracekit.runtime.ground import count_metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def application(runtime: Runtime) -> ASGIApp:
    """Probes, listings and verbs of *runtime* as an ASGI application, for any server or framework.

    It may be made before the Runtime is open: until then `/livez` passes and the others fail. Its
    paths are `/livez`, `/readyz`, `/startupz`, `/metrics` and `/api/v1/...`, below its mount.

    It follows `admin_token_file`, `admin_hosts`, `admin_open` and `admin_read_only` of the
    Runtime's settings. Without a token file it answers only probes and `/metrics`, because it
    cannot know which clients can reach the program.

    Raises:
        ConfigError: the extra `web` is not installed, or the token file cannot be used.
    """
    try:
        from gracekit.admin.application import AdminApplication  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'gracekit[web]'") from error
    telemetry = runtime.ground.telemetry
    access = access_of(runtime.settings, None, telemetry)
    counted = count_metrics(runtime.service, telemetry)
    return AdminApplication(lambda: runtime.admin, access, telemetry, counted).build()
