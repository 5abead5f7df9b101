"""Settings that are read again while the service runs, as SIGHUP asks for it.

Settings that may change are changed. For every other setting whose value differs, one log line
says that it needs a restart. If the settings are wrong, nothing changes.
"""

from __future__ import annotations

from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.errors import ConfigError
from gracekit.notify import Notify
from gracekit.phase import Phase
from gracekit.process import Threads
from gracekit.telemetry.safe_text import Sentence
from gracekit.telemetry.telemetry import Telemetry


class Reload:
    """Reads the settings of one run again.

    Args:
        coordinator: Knows whether a drain is under way: its times must not change.
        threads: One thread reads the file, because its disk may not answer.
    """

    def __init__(
        self,
        settings: LiveSettings,
        coordinator: ShutdownCoordinator,
        phase: Phase,
        notify: Notify,
        threads: Threads,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._phase = phase
        self._notify = notify
        self._threads = threads
        self._telemetry = telemetry
        self._is_asked = False
        self._is_busy = False

    async def reload(self) -> None:
        """Read the settings, and again if another reload is asked for meanwhile; never raises."""
        self._is_asked = True
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._is_asked:
                self._is_asked = False
                # systemd waits for both messages (Type=notify-reload), also if the reload fails.
                # During a start the second one would say that the service is ready.
                is_told = self._phase.has_served
                if is_told:
                    self._notify.reloading()
                try:
                    await self._reload()
                finally:
                    if is_told:
                        self._notify.ready()
        finally:
            self._is_busy = False

    async def _reload(self) -> None:
        read = self._settings.read
        if read is None:
            self._hint(
                "SIGHUP is ignored: this program does not read its settings again, as `gracekit "
                "run` does; SIGTERM drains"
            )
            return
        try:
            found = await self._threads.run(read)
            if self._coordinator.stop_requested:
                self._hint("SIGHUP is ignored in a drain: the next start reads the settings")
                return
            self._take(found)
        except ConfigError as error:
            for problem in str(error).splitlines():
                self._telemetry.emit("service.reload_failed", error=Sentence(problem))
        except Exception as error:  # noqa: BLE001 - a parser or the program's reader may raise any
            self._telemetry.emit("service.reload_failed", error=repr(error))

    def _take(self, found: Settings) -> None:
        differences = self._settings.differences(found)
        for one in differences:
            if not one.is_changeable:
                self._telemetry.emit(
                    "setting.kept", setting=one.name, value=one.before, wanted=one.after
                )
        self._settings.take(found)
        changed = [str(one) for one in differences if one.is_changeable]
        self._telemetry.emit("service.reloaded", changed=", ".join(changed) or "nothing")

    def _hint(self, text: str) -> None:
        self._telemetry.emit("signal.hint", text=text)
