"""`gracekit init`: prints what a platform needs to run a service, with numbers that fit."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click

from gracekit.cli.app import load_service
from gracekit.cli.main import HintingGroup
from gracekit.cli.options import app_dir_option, config_option, factory_option, setting_flags
from gracekit.config.loading import load
from gracekit.config.settings import SETTINGS
from gracekit.deploy.docker import dockerfile
from gracekit.deploy.kubernetes import manifests
from gracekit.deploy.plan import Plan, name_for
from gracekit.deploy.systemd import UnitOptions, installed_version, this_program, unit

P = ParamSpec("P")


@click.group(cls=HintingGroup)
def init() -> None:
    """Print a unit of systemd, manifests of Kubernetes or a Dockerfile for a service.

    The numbers in it are calculated from the settings, and comments say how. Give
    it the options and the environment of `gracekit run`; `gracekit doctor` checks
    the unit and the manifests.
    """


def _planned(command: Callable[Concatenate[Plan, P], None]) -> Callable[..., None]:
    """Give *command* the service and its settings, as one Plan."""

    @click.argument("target", metavar="MODULE[:ATTR]", envvar="GRACEKIT_APP")
    @click.option(
        "--name",
        metavar="NAME",
        help="Name of the unit, the user and the objects.  [default: topic]",
    )
    @factory_option
    @app_dir_option
    @config_option
    @setting_flags
    @functools.wraps(command)
    def wrapped(
        *,
        target: str,
        name: str | None,
        factory: bool,
        app_dir: Path,
        config: Path | None,
        **rest: Any,
    ) -> None:
        flags = {name: rest.pop(name) for name in SETTINGS}
        service = load_service(target, factory=factory, app_dir=app_dir)
        plan = Plan(
            name=name_for(service.topic, name),
            topic=service.topic,
            target=target,
            factory=factory,
            app_dir=app_dir.resolve(),
            settings=load(flags, os.environ, config, defaults=service.defaults),
            start_hooks=len(service.start_hooks),
            config=config,
        )
        command(plan, **rest)  # type: ignore[call-arg]

    return wrapped


@init.command()
@click.option(
    "--instances",
    metavar="N",
    type=click.IntRange(min=1),
    help="Print a template unit, to run N instances of it.",
)
@click.option(
    "--user", metavar="NAME", help="The user that the service runs as.  [default: the unit's name]"
)
@click.option(
    "--systemd-version",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="Version of the systemd that will run it.  [default: this machine's]",
)
@_planned
def systemd(
    plan: Plan, /, *, instances: int | None, user: str | None, systemd_version: int | None
) -> None:
    """Print a unit of systemd for MODULE:ATTR."""
    version = systemd_version or installed_version() or 0
    options = UnitOptions(
        instances=instances,
        version=version,
        user=user or plan.name,
        program=this_program(),
        interpreter=Path(sys.executable).resolve(),
    )
    click.echo(unit(plan, options), nl=False)


@init.command()
@click.option("--image", metavar="IMAGE", required=True, help="The container's image.")
@_planned
def k8s(plan: Plan, /, *, image: str) -> None:
    """Print manifests of Kubernetes for MODULE:ATTR, in one file.

    These are a StatefulSet, because the pod needs a volume of its own for its files (a Deployment
    only if the store is memory and the queue is on a broker, so that there is no file); a Service
    that names the pods; and a PodDisruptionBudget.
    """
    click.echo(manifests(plan, image), nl=False)


@init.command()
@_planned
def docker(plan: Plan, /) -> None:
    """Print a Dockerfile for MODULE:ATTR."""
    click.echo(dockerfile(plan), nl=False)
