"""`gracekit doctor`: everything that can be seen to be wrong, each with its remedy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gracekit.cli.app import load_service, what_failed
from gracekit.cli.options import (
    app_dir_option,
    config_option,
    factory_option,
    json_option,
    setting_flags,
)
from gracekit.cli.text import Colour, json_text, paint, safe
from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.doctor.examine import Examination, examine
from gracekit.doctor.finding import Finding, Level, exit_code, fail, told
from gracekit.errors import ConfigError, DeclarationError
from gracekit.exits import ExitCode
from gracekit.service import Service

LONGEST: Final = 1000

_COLOURS: Final[dict[Level, Colour]] = {
    Level.OK: "green",
    Level.WARN: "yellow",
    Level.FAIL: "red",
    Level.SKIP: "bold",
}
_SHOWN: Final = {Level.OK: "ok", Level.WARN: "WARN", Level.FAIL: "FAIL", Level.SKIP: "skip"}


@click.command()
@click.argument("target", metavar="[MODULE[:ATTR]]", envvar="GRACEKIT_APP", required=False)
@factory_option
@app_dir_option
@click.option(
    "--pid",
    "pids",
    metavar="PID",
    type=click.IntRange(min=1),
    multiple=True,
    help="A process of the service. Living runs of the store are examined in any case.",
)
@click.option(
    "--unit",
    metavar="FILE|NAME",
    help="A systemd unit: its file, or its name.",
)
@click.option(
    "--manifest",
    "manifests",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A Kubernetes manifest, YAML or JSON.",
)
@click.option("--quiet", "-q", is_flag=True, help="Show only what is not ok.")
@config_option
@json_option
@setting_flags
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    target: str | None,
    *,
    factory: bool,
    app_dir: Path,
    pids: tuple[int, ...],
    unit: str | None,
    manifests: tuple[Path, ...],
    quiet: bool,
    config: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Look for what would keep a service from stopping and starting well.

    It compares the settings with each other and with the time that the platform
    gives the process. It examines both files or the broker, other readers of the
    queues, the processes and this machine, and with MODULE:ATTR what the service
    declares. It changes nothing. Give it the options and the environment of
    `gracekit run`.

    Exit status: 0 if nothing FAILs, else the largest code of the FAILs: 78
    configuration, declaration or deployment; 70 a fault of gracekit; 69 a disk,
    a file, a broker or a process. 2 usage.
    """
    service, more = _service(target, factory=factory, app_dir=app_dir)
    settings, problems = _settings(flags, config, {} if service is None else service.defaults)
    examination = Examination(
        settings=settings,
        service=service,
        problems=(*problems, *more),
        pids=pids,
        unit=unit,
        manifests=manifests,
    )
    findings = list(examine(examination))
    code = exit_code(findings)
    if as_json:
        click.echo(json_text(_as_json(findings, code)))
    else:
        shown = [one for one in findings if not quiet or one.level in {Level.WARN, Level.FAIL}]
        _print(shown)
        click.echo(_summary(findings))
    ctx.exit(code)


def _settings(
    flags: dict[str, Any], config: Path | None, defaults: Mapping[str, object]
) -> tuple[Settings | None, Sequence[Finding]]:
    try:
        return load(flags, os.environ, config, defaults=defaults), ()
    except ConfigError as error:
        return None, _in("settings", told("settings", error))


def _service(
    target: str | None, *, factory: bool, app_dir: Path
) -> tuple[Service | None, Sequence[Finding]]:
    if target is None:
        return None, ()
    try:
        return load_service(target, factory=factory, app_dir=app_dir), ()
    except (ConfigError, DeclarationError) as error:
        return None, _in("application", told("import", error))
    except Exception as failure:  # noqa: BLE001 - the application's own
        raised, when = what_failed(failure)
        code = ExitCode.CONFIG if isinstance(raised, ImportError) else ExitCode.INTERNAL
        seen = f"{target} raised {type(raised).__name__} {when}: {raised}"
        remedy = f"run: python -c 'import {target.partition(':')[0]}', and mend it"
        return None, _in("application", [fail("import", seen, remedy, code)])


def _in(area: str, findings: Sequence[Finding]) -> list[Finding]:
    return [msgspec.structs.replace(finding, area=area) for finding in findings]


# -- what is shown ----------------------------------------------------------------


def _as_json(findings: Sequence[Finding], code: int) -> dict[str, Any]:
    counts = Counter(one.level for one in findings)
    return {
        "exit_code": code,
        "counts": {level.value: counts[level] for level in Level},
        "findings": [finding.as_json() for finding in findings],
    }


def _print(findings: Sequence[Finding]) -> None:
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            click.echo(paint(area, "bold"))
        level = f"{_SHOWN[finding.level]:<4}"
        seen = safe(finding.seen, longest=LONGEST)
        check = "" if seen.startswith(finding.check) else f"{safe(finding.check)}: "
        click.echo(f"{paint(level, _COLOURS[finding.level])}  {check}{seen}")
        if finding.remedy:
            click.echo(f"      {safe(finding.remedy, longest=LONGEST)}")


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(one.level for one in findings)
    text = ", ".join(f"{counts[level]} {_SHOWN[level]}" for level in Level)
    worst = next((one for one in (Level.FAIL, Level.WARN) if counts[one]), Level.OK)
    return paint(text, _COLOURS[worst])
