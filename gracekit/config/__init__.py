"""Settings, read from flags, environment, file and defaults, in this order of precedence."""

from gracekit.config.live import LiveSettings
from gracekit.config.loading import load
from gracekit.config.settings import Settings

__all__ = ["LiveSettings", "Settings", "load"]
