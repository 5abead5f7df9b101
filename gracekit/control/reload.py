"""Reads the settings again while the service runs, after SIGHUP.

Settings that may change are changed. For every other setting whose value differs, one log line
says that it needs a restart. If the settings are wrong, or cannot be read in time, nothing changes.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.errors import ConfigError
from gracekit.notify import Notify
from gracekit.phase import Phase
from gracekit.process import Threads
from gracekit.request.calls import call
from gracekit.telemetry.safe_text import Sentence
from gracekit.telemetry.telemetry import Telemetry

READ_S: Final = 10.0
"""Seconds that a reload waits for the settings at most."""


class Reload:
    """Reads the settings of one run again.

    Reading may never end: the file may be a FIFO without a writer, or on a disk that does not
    answer. A thread cannot be stopped, so it is left behind.

    Args:
        coordinator: Says whether a drain is under way, whose times must not change.
        threads: One, which reads.
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
        """Read the settings, and once more if a reload is asked for meanwhile; never raises."""
        self._is_asked = True
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._is_asked:
                self._is_asked = False
                # systemd waits for both messages (Type=notify-reload), also if the reload fails.
                # During a start the second one would say that the service is ready, and in a final
                # drain, which may begin meanwhile, both would contradict STOPPING=1.
                is_told = self._phase.has_served and not self._is_final
                if is_told:
                    self._notify.reloading()
                try:
                    await self._reload()
                finally:
                    if is_told and not self._is_final:
                        self._notify.ready()
        finally:
            self._is_busy = False

    @property
    def _is_final(self) -> bool:
        request = self._coordinator.stop_request
        return request is not None and request.final

    async def _reload(self) -> None:
        if self._settings.read is None:
            self._hint(
                "SIGHUP is ignored: this program does not read its settings again, as `gracekit "
                "run` does; SIGTERM drains"
            )
            return
        try:
            found = None if self._coordinator.stop_requested else await self._read()
            if found is None or self._coordinator.stop_requested:
                self._hint("SIGHUP is ignored in a drain: the next start reads the settings")
                return
            self._take(found)
        except ConfigError as error:
            for problem in str(error).splitlines():
                self._telemetry.emit("service.reload_failed", error=Sentence(problem))
        except Exception as error:  # noqa: BLE001 - a parser or the program's reader may raise any
            self._telemetry.emit("service.reload_failed", error=repr(error))

    async def _read(self) -> Settings:
        """Read the settings in a thread.

        Raises:
            ConfigError: they are wrong, or were not read in time.
        """
        assert self._settings.read is not None
        try:
            async with asyncio.timeout(READ_S) as bound:
                found: Settings = await call(self._settings.read, self._threads, abandon=True)
        except TimeoutError:
            if not bound.expired():
                raise
            file = self._settings.file
            what = "the settings" if file is None else f"the settings in {file}"
            raise ConfigError(
                f"{what} were not read within {READ_S:g} s: this may be a FIFO without a writer, "
                "or a disk that does not answer; nothing has changed"
            ) from None
        return found

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
