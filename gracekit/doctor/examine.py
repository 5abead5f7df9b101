"""The list of all checks, in the order of the output.

If a check raises, that becomes a finding too: SKIP for something that must not be
read, and FAIL for a bug in the check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gracekit.config.settings import Settings
from gracekit.config.urls import UrlKind, kind_of
from gracekit.doctor import (
    configuration,
    declared,
    host,
    platform,
    pods,
    processes,
    queue_file,
    store_file,
    store_runs,
    units,
)
from gracekit.doctor.finding import Finding, Level, fail, skip, told
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.exits import ExitCode
from gracekit.rpc import connect
from gracekit.rpc.sqlite.sqlite_transport import QUEUES_SCHEMA
from gracekit.service import Service
from gracekit.store.location import StoreLocation
from gracekit.store.migrate import MIGRATIONS, load_migrations

Check = Callable[[], "Finding | Iterable[Finding]"]
Findings = Iterator[Finding]

STORE_TABLES: Final = ("run", "task", "reply", "lease", "hold", "tally")
_NO_RUNS: Final = store_runs.Runs(living=(), doubtful=(), all=())
QUEUE_TABLES: Final = ("connection", "queue", "message", "subscription")
_HOST_CHECKS: Final[tuple[Check, ...]] = (store_file.check_library, host.check_clock)


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The input of `examine`.

    Attributes:
        settings: None if they are wrong; `problems` then has the errors.
        service: None if none was named, or it cannot be loaded.
        problems: Problems that are known already.
        pids: Processes of the service that the user named.
        unit: The file of a systemd unit, or its name.
        manifests: Kubernetes manifests.
    """

    settings: Settings | None
    service: Service | None = None
    problems: tuple[Finding, ...] = ()
    pids: tuple[int, ...] = ()
    unit: str | None = None
    manifests: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[object, ...]:
        """The given files that describe how the service is run, often on another machine."""
        unit = () if self.unit is None else (self.unit,)
        return (*unit, *self.manifests)


def examine(examination: Examination) -> Findings:
    """Run all checks; must be called outside an event loop."""
    yield from examination.problems
    if examination.settings is None:
        if examination.service is not None:
            yield from _in("application", *_declaration_checks(examination.service))
        yield from _in("process", *_process_checks(examination.pids))
        yield from _in("host", *_HOST_CHECKS)
        wrong = "the rest is judged by the settings, which are wrong"
        yield from _in("settings", lambda: skip("settings", wrong, "mend them"))
        return
    yield from _with_settings(examination, examination.settings)


def _with_settings(examination: Examination, settings: Settings) -> Findings:
    elsewhere = _elsewhere(examination, settings)
    found, problems = (_NO_RUNS, []) if "store_url" in elsewhere else _runs(settings)
    pids = (
        *examination.pids,
        *(pid for pid in store_runs.pids_here(found) if pid not in examination.pids),
    )
    yield from _in("settings", *_settings_checks(settings))
    if examination.service is not None:
        yield from _in("application", *_service_checks(settings, examination.service))
    yield from _in("platform", *_platform_checks(examination, settings, pids))
    yield from _in("process", *_process_checks(pids))
    yield from problems
    if "store_url" in elsewhere:
        yield from _in("store", lambda: _not_named("--store"))
    else:
        yield from _store(settings, found)
    if "transport_url" in elsewhere:
        yield from _in("transport", lambda: _not_named("--transport"))
    else:
        yield from _transport(settings, found, examination.service)
    yield from _in(
        "host",
        *_HOST_CHECKS,
        lambda: host.check_host_name(settings, os.getpid()),
    )


def _elsewhere(examination: Examination, settings: Settings) -> set[str]:
    """The URL settings whose default must not be checked here, as the service runs elsewhere."""
    if not examination.files:
        return set()
    return {n for n in ("store_url", "transport_url") if settings.origin(n) == "default"}


def _not_named(option: str) -> Finding:
    return skip(
        "file",
        "the run of the given file has one of its own, which was not named here",
        f"to have it examined, give {option} as that run has it, as a user who may read it",
    )


def _settings_checks(settings: Settings) -> tuple[Check, ...]:
    return (
        lambda: configuration.check_settings(settings),
        lambda: configuration.check_secrets(settings),
        lambda: configuration.check_hard_limit(settings),
        lambda: configuration.check_inequalities(settings),
        lambda: configuration.check_settle(settings),
    )


def _declaration_checks(service: Service) -> tuple[Check, ...]:
    return (
        lambda: declared.check_methods(service),
        lambda: declared.check_doubts(service),
        lambda: declared.check_types(service),
        lambda: declared.check_kinds(service),
    )


def _service_checks(settings: Settings, service: Service) -> tuple[Check, ...]:
    return (
        *_declaration_checks(service),
        lambda: declared.check_pending(settings, service),
        lambda: declared.check_timeouts(settings, service),
        lambda: declared.check_threads(settings, service),
        lambda: declared.check_accepted(settings, service),
    )


def _platform_checks(
    examination: Examination, settings: Settings, pids: tuple[int, ...]
) -> Iterator[Check]:
    pid = pids[0] if pids else os.getpid()
    if not examination.files or settings.kill_after_s is not None:
        yield lambda: platform.check_kill_after(settings)
    for manifest in examination.manifests:
        yield lambda manifest=manifest: pods.check_manifest(settings, manifest)  # type: ignore[misc]
    if examination.unit is not None:
        unit = examination.unit
        yield lambda: units.check_unit(settings, unit)
    else:
        yield lambda: platform.check_systemd(settings, pid)
    if not examination.files:  # given files describe another machine
        yield lambda: platform.check_container(settings, pid)


def _process_checks(pids: tuple[int, ...]) -> Iterator[Check]:
    for pid in pids:
        yield lambda pid=pid: processes.check_pid(pid)  # type: ignore[misc]


# -- store and transport -------------------------------------------------------------


def _runs(settings: Settings) -> tuple[store_runs.Runs, list[Finding]]:
    """The runs of the store, or none and the reason."""
    location = StoreLocation(settings)
    if location.is_memory or (location.path is not None and not location.path.is_file()):
        return _NO_RUNS, []
    try:
        return store_runs.read_runs(location), []
    except ConfigError:
        return _NO_RUNS, []  # check_schema reports it
    except GracekitError as error:
        if location.postgres is not None:
            return _NO_RUNS, []  # check_server reports it
        found = told("runs", error, ExitCode.DEPENDENCY)
        return _NO_RUNS, [msgspec.structs.replace(one, area="store") for one in found]


def _store(settings: Settings, found: store_runs.Runs) -> Findings:
    location = StoreLocation(settings)
    path, directory = location.path, location.run_directory
    if location.is_memory:
        yield from _in("store", lambda: _no_file(settings.store_url))
    if location.postgres is not None:
        yield from _database(settings, location, found)
    if path is None or directory is None:
        return
    migrations = load_migrations(MIGRATIONS)

    def inside(look: store_file.ReadOnlyDatabase) -> Iterator[Check]:
        yield lambda: store_runs.check_epoch(look, directory)
        if look.schema() == len(migrations):  # what follows reads this one alone
            yield lambda: store_runs.check_living(found)
            yield lambda: store_runs.check_doubtful(found)
            yield lambda: store_runs.check_doors(found, directory)
            yield lambda: store_runs.check_unfinished(look, found, settings)
            yield lambda: store_runs.check_resources(found)
            yield lambda: store_runs.check_suspects(look, found)
            yield lambda: store_runs.check_accounts(look)
            yield lambda: store_file.check_retention(look, settings)

    yield from _file("store", path, migrations, STORE_TABLES, inside)
    if not path.is_file():
        yield from _in("store", lambda: store_runs.check_lost(location))


def _database(settings: Settings, location: StoreLocation, found: store_runs.Runs) -> Findings:
    # Imported here: the package for it is an extra.
    try:
        from gracekit.doctor import store_server  # noqa: PLC0415
    except ImportError:
        yield from _in("store", lambda: _without_package(location))
        return
    directory = location.run_directory
    assert directory is not None
    server = list(_in("store", lambda: store_server.check_server(location)))
    yield from server
    if any(one.level is Level.FAIL for one in server):
        return
    yield from _in(
        "store",
        lambda: store_runs.check_living(found),
        lambda: store_runs.check_doubtful(found),
        lambda: store_runs.check_doors(found, directory),
        lambda: store_server.check_inside(settings, location, found),
        lambda: store_runs.check_resources(found),
    )


def _without_package(location: StoreLocation) -> list[Finding]:
    try:
        location.reader()
    except ConfigError as error:
        return told("package", error)
    return []


def _transport(settings: Settings, found: store_runs.Runs, service: Service | None) -> Findings:
    if kind_of(settings.transport_url) is UrlKind.BROKER:
        yield from _broker(settings, found, service)
        return
    path = connect.queue_file(settings.transport_url)
    if path is None:
        yield from _in("transport", lambda: _no_file(settings.transport_url))
        return
    migrations = load_migrations(QUEUES_SCHEMA)
    location = StoreLocation(settings)

    def inside(look: store_file.ReadOnlyDatabase) -> Iterator[Check]:
        yield lambda: queue_file.check_waiting(look)
        yield lambda: queue_file.check_dead_letters(look)
        # Only a connection tells which store one in PostgreSQL is.
        if look.schema() == len(migrations) and location.postgres is None:
            yield lambda: queue_file.check_readers(
                settings, look, location.identity(), found, service
            )

    yield from _file("transport", path, migrations, QUEUE_TABLES, inside)


def _broker(settings: Settings, found: store_runs.Runs, service: Service | None) -> Findings:
    # Imported here: the AMQP client takes 0.1 s to load, and is not needed for files.
    from gracekit.doctor.rabbit import ConnectionChecks  # noqa: PLC0415

    connection = ConnectionChecks(
        settings, found, service, store=StoreLocation(settings).identity()
    )
    yield from _in("transport", connection.check_url, connection.check_nodes)
    checks = connection.checks
    if checks is None:
        return
    yield from _in(
        "transport",
        checks.check_versions,
        checks.check_answers,
        checks.check_profile,
        checks.check_exchange,
        checks.check_delivery_limit,
        checks.check_consumer_timeout,
        checks.check_waiting,
        checks.check_directed,
        checks.check_dead_letters,
        checks.check_readers,
    )


def _place_checks(path: Path) -> tuple[Check, ...]:
    first: tuple[Check, ...] = (lambda: store_file.check_place(path),)
    if not path.parent.is_dir():
        return first
    return (
        *first,
        lambda: store_file.check_file(path),
        lambda: store_file.check_directory(path),
        lambda: store_file.check_room(path),
    )


def _file(
    area: str,
    path: Path,
    migrations: Sequence[str],
    tables: Sequence[str],
    checks: Callable[[store_file.ReadOnlyDatabase], Iterator[Check]],
) -> Findings:
    yield from _in(area, *_place_checks(path))
    if not path.is_file():  # opening a pipe would block for ever; check_place reports it
        return
    try:
        with store_file.ReadOnlyDatabase(path) as look:
            yield from _in(
                area,
                lambda: store_file.check_schema(look, migrations, tables),
                lambda: store_file.check_integrity(look),
            )
            if set(tables) <= look.tables():
                yield from _in(area, *checks(look))
    except GracekitError as error:
        yield msgspec.structs.replace(store_file.unreadable(error), area=area)


def _no_file(url: str) -> Finding:
    return skip("file", f"{url} is the memory of one process")


# -- one check --------------------------------------------------------------------


def _in(area: str, *checks: Check) -> Findings:
    for check in checks:
        for finding in _run(check):
            yield msgspec.structs.replace(finding, area=area)


def _run(check: Check) -> list[Finding]:
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except ConfigError as error:
        return told("check", error)
    except (GracekitError, DependencyError) as error:
        return told("check", error, ExitCode.DEPENDENCY)
    except OSError as error:
        return [skip("check", f"it may not be looked at: {error}")]
    except Exception as error:  # noqa: BLE001 - one failing check must not prevent the others
        return [
            fail(
                "check",
                f"a check of gracekit itself failed: {error!r}",
                "report it, with this line",
                ExitCode.INTERNAL,
            )
        ]
