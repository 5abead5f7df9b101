"""Where oslo.messaging is installed its threads are chosen; elsewhere its tests are left out."""

from __future__ import annotations

import importlib.util
import warnings

collect_ignore: list[str] = []

if importlib.util.find_spec("oslo_messaging") is None:
    collect_ignore.append("test_adapter.py")  # test_environment.py runs it where it is
else:
    from oslo_service import backend

    backend.init_backend(backend.BackendType.THREADING)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        import oslo_messaging  # noqa: F401 - it warns of parts of its own
