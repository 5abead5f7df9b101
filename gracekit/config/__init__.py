"""Settings: flags over environment over file over defaults, checked against each other."""

from gracekit.config.live import LiveSettings
from gracekit.config.loading import load
from gracekit.config.settings import Settings

__all__ = ["LiveSettings", "Settings", "load"]
