"""The Dockerfile of a service: `gracekit init docker`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Final

from gracekit.config.settings import variable_name
from gracekit.deploy.kubernetes import (
    DATA,
    LIVE_EVERY_S,
    PROBE_TIMEOUT_S,
    SECRETS,
    USER_ID,
    check_socket,
)
from gracekit.deploy.plan import NUMBERS, WATCHDOG_S, Plan, commented, printable

_HOME: Final = "/app"


def dockerfile(plan: Plan) -> str:
    """The text of a Dockerfile.

    Raises:
        ConfigError: a setting has characters that a Dockerfile cannot contain, or a path that a
            container cannot write to.
    """
    check_socket(plan)
    parts = (
        _head(plan),
        _image(),
        _settings(plan),
        _start(plan),
        commented(NUMBERS, _reasons(plan)),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    kill_after = variable_name("kill_after_s")
    extras = ["web", "prometheus"] * (plan.admin is not None)
    extras += ["postgres"] * plan.has_server
    extras += ["uvloop"] * (plan.settings.loop != "asyncio")
    extra = f"[{','.join(extras)}]" if extras else ""
    extra += " and psycopg[binary]" * plan.has_server
    yield f"# Dockerfile: printed by gracekit init docker. requirements.txt names gracekit{extra}."
    yield "#"
    yield f"#   docker build -t {plan.name} ."
    port = ""
    if plan.admin is not None and plan.admin.path is None:
        port = f" -p {plan.admin.port}:{plan.admin.port}"
    yield f"#   docker run --hostname {plan.name} --stop-timeout {plan.stop_s}{port} \\"
    yield f"#       -e {kill_after}={plan.stop_s} -v {plan.name}:{DATA} {plan.name}"
    for variable, shown in plan.secret().items():
        yield "#"
        yield f"# {variable} ({shown}) holds a password, so it is not in this file:"
        yield "# give it by --env-file, in a file of mode 0600."
    for variable in plan.host_files(with_file=True):
        mounts = " ".join(f"-v FILE:{place}:ro" for place in SECRETS[variable].split(","))
        yield "#"
        yield f"# {variable}: the files stay on the host. Let user {USER_ID} read them:"
        yield f"#   docker run {mounts} ..."


def _image() -> Iterator[str]:
    yield f"FROM python:{sys.version_info.major}.{sys.version_info.minor}-slim"
    yield f"RUN useradd --uid {USER_ID} --user-group --no-create-home gracekit \\"
    yield f"    && install -d -o gracekit -g gracekit -m 0700 {DATA}"
    yield f"WORKDIR {_HOME}"
    yield "COPY requirements.txt ./"
    yield "RUN pip install --no-cache-dir -r requirements.txt"
    yield "COPY . ./"


def _settings(plan: Plan) -> Iterator[str]:
    variables = plan.files_inside(DATA) | plan.other_urls() | plan.runs_inside(DATA)
    variables |= plan.given(with_file=True)
    variables |= {name: SECRETS[name] for name in plan.host_files(with_file=True)}
    if plan.admin is not None:
        variables[variable_name("admin")] = str(plan.admin)
    if plan.keeps_files:
        yield f"# Files are in {DATA}: a volume, so that they outlive the container."
    for name, value in variables.items():
        yield f"ENV {name}={_word(value)}"
    yield f"VOLUME {json.dumps([DATA])}"


def _start(plan: Plan) -> Iterator[str]:
    words = ["gracekit", "run", plan.target, *["--factory"] * plan.factory]
    yield f"USER {USER_ID}:{USER_ID}"
    yield "STOPSIGNAL SIGTERM"
    if plan.has_door:
        yield f"HEALTHCHECK --interval={LIVE_EVERY_S}s --timeout={PROBE_TIMEOUT_S}s \\"
        yield f"    --start-period={plan.start_s}s --retries={WATCHDOG_S // LIVE_EVERY_S} \\"
        yield f"    CMD {json.dumps(['gracekit', 'health', '--live'])}"
    yield "# A list, because a shell would not pass SIGTERM on to the service."
    yield f"CMD {json.dumps(words)}"


def _reasons(plan: Plan) -> Iterator[str]:
    yield from plan.reasons("docker run --stop-timeout", "start-period")
    yield (
        "Without --stop-timeout Docker kills 10 s after SIGTERM, and an image cannot change that. "
        f"In a compose file: stop_grace_period: {plan.stop_s}s."
    )
    if plan.has_door:
        yield (
            f"HEALTHCHECK: fails after {WATCHDOG_S} s in which the event loop did not answer. It "
            "passes during a drain. Docker itself does not restart a container that fails it."
        )


def _word(text: str) -> str:
    r"""*text* in quotes, with `\`, `"` and `$` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", printable(text, "a Dockerfile")) + '"'
