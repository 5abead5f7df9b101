"""Writes those parts of the pages in docs/ that repeat the code: `python -m tools.pages`.

Such a part stands between `<!-- made: NAME -->` and `<!-- end -->`, and `PAGES` says what makes it.
All else on these pages is written by hand. `make docs` writes them first; a test compares them.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from gracekit import errors
from gracekit.cli.main import cli
from gracekit.config.live import CHANGEABLE
from gracekit.config.settings import SETTINGS, Rule, Settings, option_name, rules, variable_name
from gracekit.config.urls import parse_url
from gracekit.config.values import (
    parse_count,
    parse_duration,
    parse_optional_count,
    parse_optional_duration,
    parse_truth,
    parse_words,
)
from gracekit.exits import ExitCode, exit_code_of
from gracekit.rpc.failures import failure_of, rebuild
from gracekit.runtime.ground import label_words
from gracekit.service import Service
from gracekit.telemetry.catalogue import GROUPS as EVENTS
from gracekit.telemetry.catalogue import Event
from gracekit.telemetry.metrics import METRICS, Label, Metric

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
WIDTH: Final = 80
"""Columns of a help text, as click writes it on a terminal of that width or less."""
_PART: Final = re.compile(r"(<!-- made: (\S+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def made(name: str) -> str:
    """The page *name* as it should be: what is written by hand stays."""
    parts = PAGES[name]
    text = (DOCS / name).read_text()
    if (found := [part[2] for part in _PART.finditer(text)]) != list(parts):
        raise ValueError(f"docs/{name} has the places {found}, and should have {list(parts)}")
    return _PART.sub(lambda part: f"{part[1]}\n{parts[part[2]]()}\n{part[3]}", text)


# -- settings -----------------------------------------------------------------------------

SETTING_GROUPS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Queue, journal and names": (
        "What RabbitMQ needs: [rabbitmq.md](rabbitmq.md). What oslo needs: [oslo.md](oslo.md).",
        (
            *("transport_url", "store_url", "run_directory", "host", "instance", "ops_topic"),
            *("exchange", "declare_profile", "accept_unshared_store"),
        ),
    ),
    "Start and stop": (
        "What a drain does with these times: [stopping.md](stopping.md).",
        (
            *("drain_timeout_s", "handover_grace_s", "handover_flush_s", "exit_margin_s"),
            *("kill_after_s", "ops_quiet_timeout_s", "cancel_ok_timeout_s", "progress_every_s"),
            "on_user_stop",
            *("start_timeout_s", "stop_hook_timeout_s"),
        ),
    ),
    "Capacity": (
        "How much one process takes and runs. New requests and the ops topic have separate limits.",
        (
            *("max_accepted", "max_running", "ops_max_accepted", "ops_max_running"),
            *("threads", "ops_threads", "prefetch", "prefetch_bytes"),
            *("accept_wait_s", "max_body_bytes", "loop"),
        ),
    ),
    "Recovery": (
        "What becomes of interrupted tasks and resources: [reconciliation.md](reconciliation.md).",
        (
            *("max_attempts", "startup_reconciliation_enabled"),
            *("startup_reconciliation_wait_seconds", "reconcile_every_s"),
            *("reconciliation_interval_s", "reconcile_at_once", "probe_timeout_s"),
            *("look_every_s", "host_gone_after_s", "fanout_gone_after_s"),
        ),
    ),
    "Hosts that share a store": (
        "When they may take tasks over from each other: [postgresql.md](postgresql.md).",
        ("liveness", "beat_s", "fail_after_s", "hard_after_s", "dead_after_s"),
    ),
    "Records": (
        "What stays in the journal, and for how long.",
        ("retention_s", "retention_after_s", "keep_failed_arguments"),
    ),
    "Tasks that wait for capacity": (
        "What PENDING is, and who ends it: [pending.md](pending.md).",
        (
            *("use_pending_state", "pending_timeout_s", "pending_max"),
            *("notification_topic", "notification_context"),
        ),
    ),
    "Callers": (
        "What clients send and get: [callers.md](callers.md), [security.md](security.md).",
        ("dedupe_context", "error_details", "reply_queues", "rpc_ping_enabled"),
    ),
    "HTTP endpoint": (
        "What it serves, and to whom: [http.md](http.md).",
        (
            *("admin", "admin_token_file", "admin_tls", "admin_open"),
            *("admin_hosts", "admin_read_only"),
        ),
    ),
    "Log": (
        "What the lines look like: [observability.md](observability.md#logs).",
        ("log_format", "log_level", "log_failures"),
    ),
}
"""Each group has a sentence for its beginning, and its settings."""

_KINDS: Final[Mapping[object, str]] = {
    parse_duration: "duration",
    parse_optional_duration: "duration",
    parse_count: "number",
    parse_optional_count: "number",
    parse_truth: "`true` or `false`",
    parse_url: "URL",
    parse_words: "words, separated by commas",
}


def settings() -> str:
    """Every setting, by group."""
    listed = [name for _, names in SETTING_GROUPS.values() for name in names]
    if sorted(listed) != sorted(SETTINGS):
        raise ValueError(f"SETTING_GROUPS lacks, or repeats: {sorted(set(listed) ^ set(SETTINGS))}")
    return "\n\n".join(
        "\n\n".join([f"## {title}", begin, *map(_setting, names)])
        for title, (begin, names) in SETTING_GROUPS.items()
    )


def _setting(name: str) -> str:
    flags = ", ".join(f"`{flag}`" for flag in _flags(name))
    reload = "changed by a reload" if name in CHANGEABLE else "needs a restart"
    return (
        f"### `{option_name(name)}`\n\n{_lines(_meaning(name))}\n\n"
        f"`{variable_name(name)}` · {flags}\\\n{_kind(name)} · {_default(name)} · {reload}"
    )


def _flags(name: str) -> list[str]:
    (option,) = (one for one in _command("run").params if one.name == name)
    return [*option.opts, *option.secondary_opts]


def _meaning(name: str) -> str:
    _, meaning = next(one for one in _section(Settings, "Attributes") if one[0] == name)
    return meaning


def _kind(name: str) -> str:
    metadata = SETTINGS[name].metadata
    if "choices" in metadata:
        return " or ".join(f"`{word}`" for word in metadata["choices"])
    kind = _KINDS.get(metadata["parse"], "text")
    return "number of bytes" if name.endswith("_bytes") else kind


def _default(name: str) -> str:
    if name == "host":
        return "by default the name of the machine"
    shown = {field: value for field, value, _ in Settings(host="host").describe()}
    value = shown[option_name(name)]
    return {"unset": "unset by default", "": "empty by default"}.get(value, f"default `{value}`")


def setting_rules() -> str:
    """Which settings limit each other."""
    lines = ["| must hold | otherwise | |", "|---|---|---|"]
    given = {"kill_after_s": 30.0, "max_accepted": 1000, "store_url": "postgresql://localhost/one"}
    for rule in rules(Settings(host="host", **given)):
        result = "the start is refused" if rule.refused else "`gracekit doctor` warns"
        lines.append(f"| {_relation(rule)} | {rule.because} | {result} |")
    return "\n".join(lines)


def _relation(rule: Rule) -> str:
    if rule.formula:
        names = "|".join(option_name(name) for name in rule.about)
        return re.sub(rf"\b({names})\b", r"[`\1`](#\1)", rule.formula)
    *left, right = [f"[`{option_name(name)}`](#{option_name(name)})" for name in rule.about]
    return f"{' + '.join(left)} {rule.relation} {right}"


# -- commands -----------------------------------------------------------------------------

SHARED: Final = ("store_url", "transport_url", "instance", "config", "as_json")
"""Parameters of every command for operators; the page lists their options once."""
_SHARED_TITLE: Final = "Options that most commands share"


def commands() -> str:
    """What `--help` says of each command."""
    with click.Context(cli, info_name="gracekit", **_shape(cli)) as ctx:
        first = f"## gracekit\n\n{_block(cli.get_help(ctx))}"
        shared = f"## {_SHARED_TITLE}\n\n{_block(_shared_options(ctx))}"
        return "\n\n".join([first, shared, *_commands_in(cli, ctx, 2)])


def _shared_options(ctx: click.Context) -> str:
    formatter = click.HelpFormatter(width=WIDTH)
    options = {one.name: one for one in _command("status").params}
    with formatter.section("Options"):
        formatter.write_dl([options[name].get_help_record(ctx) for name in SHARED])
    return formatter.getvalue().rstrip()


def _commands_in(group: click.Group, ctx: click.Context, level: int) -> Iterator[str]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        with click.Context(command, info_name=name, parent=ctx, **_shape(command)) as inner:
            yield f"{'#' * level} {inner.command_path}\n\n{_help(command, inner)}"
            if isinstance(command, click.Group):
                yield from _commands_in(command, inner, level + 1)


def _shape(command: click.Command) -> dict[str, object]:
    return {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}


def _help(command: click.Command, ctx: click.Context) -> str:
    """Its help, without options that stand elsewhere."""
    names = {one.name for one in command.params}
    if names.issuperset(SETTINGS):
        hidden, also = set(SETTINGS), "an option for each setting: [settings.md](settings.md)"
    elif names.issuperset(SHARED):
        anchor = _SHARED_TITLE.lower().replace(" ", "-")
        hidden, also = set(SHARED), f"the [options that most commands share](#{anchor})"
    else:
        return _block(command.get_help(ctx))
    shown = copy.copy(command)
    shown.params = [one for one in command.params if one.name not in hidden]
    return f"{_block(shown.get_help(ctx))}\n\nIt also has {also}."


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


def _command(name: str) -> click.Command:
    with click.Context(cli) as ctx:
        command = cli.get_command(ctx, name)
    assert command is not None
    return command


# -- errors -------------------------------------------------------------------------------

ERROR_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Configuration and start": (
        *("GracekitError", "ConfigError", "DeclarationError", "SchemaTooNewError"),
        *("AlreadyRunningError", "DependencyError"),
    ),
    "Sending a request": (
        *("RpcError", "Undeliverable", "UnconfirmedError", "VersionCapError"),
        *("CallTimeoutError", "HeartbeatTimeoutError", "Draining", "NoAnswerError"),
    ),
    "A request that is refused": (
        *("BadMessageError", "MessageTooLargeError", "InvalidArgumentsError"),
        *("NoSuchMethodError", "UnsupportedVersionError", "ConflictingRequestError"),
        *("UnserialisableError",),
    ),
    "A task that did not succeed": (
        *("RemoteError", "MethodTimeoutError", "TaskInterruptedError", "TaskCancelledError"),
        *("LeaseHeld", "TryAgain"),
    ),
    "Tasks that wait for capacity": (
        *("NoCapacity", "Parked", "Gone", "StaleVersionError", "UnknownTaskError"),
    ),
    "Leases that people hold": ("LeaseExists", "NoSuchLease"),
    "Commands to a run": ("RunEndedError",),
    "The store": (
        *("StoreError", "ConflictError", "UnknownCommitError", "StoreLockedError"),
        *("StoreUnreachableError", "StoreFinalError", "StoreBrokenError", "StoreFencedError"),
        "StoreClosedError",
    ),
    "Faults of gracekit": ("IllegalTransitionError",),
}

ANSWERED: Final = frozenset(
    {
        *("BadMessageError", "MessageTooLargeError", "InvalidArgumentsError"),
        *("NoSuchMethodError", "UnsupportedVersionError", "ConflictingRequestError"),
        *("UnserialisableError", "Draining", "LeaseHeld", "RemoteError", "MethodTimeoutError"),
        *("TaskInterruptedError", "TaskCancelledError", "NoCapacity", "Parked", "Gone"),
        *("StaleVersionError", "UnknownTaskError", "RunEndedError"),
    }
)
"""What a service answers a request with."""

RAISED_BY_CLIENTS: Final = frozenset(
    {
        *("ConfigError", "DependencyError", "RpcError", "Undeliverable", "UnconfirmedError"),
        *("VersionCapError", "CallTimeoutError", "HeartbeatTimeoutError", "Draining"),
        *("MessageTooLargeError", "InvalidArgumentsError", "UnserialisableError"),
        "StoreLockedError",
    }
)
"""What a client raises by itself, without an answer."""


def error_classes() -> dict[str, type[errors.GracekitError]]:
    """Each public class of gracekit.errors, by name."""
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.GracekitError)
    }


def an_error(name: str) -> errors.GracekitError:
    """One of the class of that name."""
    if name == "Parked":
        return errors.Parked("task-1", 1e9)
    if name == "ConflictError":
        return errors.ConflictError("it is so", statement=0)
    return error_classes()[name]("it is so")


def error_pages() -> str:
    """Each error class under a heading, which is what a refused start points to."""
    listed = [name for names in ERROR_GROUPS.values() for name in names]
    if sorted(listed) != sorted(error_classes()):
        wrong = sorted(set(listed) ^ set(error_classes()))
        raise ValueError(f"ERROR_GROUPS lacks, or repeats: {wrong}")
    return "\n\n".join(
        "\n\n".join([f"## {title}", *map(_error, names)]) for title, names in ERROR_GROUPS.items()
    )


def _error(name: str) -> str:
    kind = error_classes()[name]
    body, *rest = _SECTION.split(inspect.getdoc(kind) or "")
    facts = [" and ".join(map(_base, kind.__bases__)), *_ways(name)]
    parts = [f"### {name}", f"Subclass of {' · '.join(facts)}", _paragraphs(body)]
    for title in rest[::2]:
        if title != "Raises":
            found = _section(kind, title)
            lines = (_lines(f"- `{one}`: {meaning}", indent="  ") for one, meaning in found)
            parts.append("\n".join([f"{_SECTIONS[title]}:\n", *lines]))
    return "\n\n".join(parts)


_SECTION: Final = re.compile(r"^(Args|Attributes|Raises):$", re.MULTILINE)
_SECTIONS: Final = {"Args": "Arguments", "Attributes": "Attributes"}


def _paragraphs(text: str) -> str:
    return "\n\n".join(_lines(one) for one in text.split("\n\n") if one.strip())


def _base(base: type) -> str:
    name = base.__name__
    return f"[{name}](#{name.lower()})" if base.__module__ == errors.__name__ else f"`{name}`"


def _ways(name: str) -> Iterator[str]:
    if name in ANSWERED:
        sent = type(rebuild(failure_of(an_error(name)), {})).__name__
        yield "sent to callers" if sent == name else f"sent to callers as `{sent}`"
    if name in RAISED_BY_CLIENTS:
        yield "raised by clients"


def start_errors() -> str:
    """The errors that end a start, by exit code."""
    by_code: dict[ExitCode, list[str]] = {}
    for name in error_classes():
        by_code.setdefault(exit_code_of(an_error(name)), []).append(name)
    by_code[ExitCode.INTERNAL] = []
    lines = ["| exit code | errors |", "|---|---|"]
    for code, names in sorted(by_code.items()):
        linked = ", ".join(f"[{name}](#{name.lower()})" for name in names)
        lines.append(f"| {code.value} | {linked or 'any other error'} |")
    return "\n".join(lines)


# -- metrics and events -------------------------------------------------------------------

OF_A_SERVICE: Final = frozenset({"methods", "jobs", "handlers", "kinds", "versions"})
"""The `LabelWords` that differ from service to service."""


def metrics() -> str:
    """The table of metrics."""
    head = ["| Prometheus | OpenTelemetry | type | labels | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(_metric, METRICS)])


def _metric(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    cells = (f"`{metric.name}`", _instrument(metric), metric.kind.value, labels, metric.help)
    return f"| {' | '.join(cells)} |"


def _instrument(metric: Metric) -> str:
    """Its name in OpenTelemetry, and its attributes that are called otherwise there."""
    others = ", ".join(f"`{one.attribute}`" for one in metric.labels if _differs(one))
    return f"`{metric.instrument}` ({others})" if others else f"`{metric.instrument}`"


def _differs(label: Label) -> bool:
    return label.attribute != label.name


def label_values() -> str:
    """The table of the labels whose values are the same for every service."""
    words = label_words(Service("any"))
    lines = ["| label | of | values |", "|---|---|---|"]
    for label in dict.fromkeys(label for metric in METRICS for label in metric.labels):
        if label.words not in OF_A_SERVICE:
            names = ", ".join(f"`{one.name}`" for one in METRICS if label in one.labels)
            values = ", ".join(f"`{value}`" for value in sorted(label.known(words)))
            lines.append(f"| `{label.name}` | {names} | {values} |")
    return "\n".join(lines)


def events() -> str:
    """The table of events."""
    lines = ["| event | level | meaning | fields |", "|---|---|---|---|"]
    for group, found in EVENTS.items():
        lines += [f"| **{group}** | | | |", *map(_event, found)]
    return "\n".join(lines)


def _event(event: Event) -> str:
    fields = ", ".join(f"`{field}`" for field in sorted(event.fields))
    limited = " *" if event.kind is not None else ""
    level = logging.getLevelName(event.level)
    return f"| `{event.name}` | {level}{limited} | {event.meaning} | {fields} |"


# -- texts --------------------------------------------------------------------------------

LONGEST_LINE: Final = 150


def _lines(text: str, *, indent: str = "") -> str:
    """One paragraph in lines of a page; the later ones begin with *indent*."""
    return textwrap.fill(
        " ".join(text.split()),
        LONGEST_LINE,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _section(kind: type, title: str) -> list[tuple[str, str]]:
    """Names and meanings of a section of a class's docstring."""
    _, _, rest = (inspect.getdoc(kind) or "").partition(f"{title}:\n")
    text = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return [(name, " ".join(meaning.split())) for name, meaning in _ENTRY.findall(text)]


PAGES: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "settings.md": {"rules": setting_rules, "settings": settings},
    "commands.md": {"commands": commands},
    "errors.md": {"start": start_errors, "errors": error_pages},
    "observability.md": {"metrics": metrics, "label-values": label_values},
    "events.md": {"events": events},
}


def main() -> None:
    """Write every page whose generated parts are out of date."""
    for name in PAGES:
        text, path = made(name), DOCS / name
        if text != path.read_text():
            path.write_text(text)
            print(f"docs/{name}: written")


if __name__ == "__main__":
    main()
