"""`gracekit config show`: every setting, its value, and who said so."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from gracekit.cli.options import _meanings
from gracekit.config.settings import SETTINGS, Settings, option_name
from tests.cli.kit import Answer, gracekit

pytestmark = pytest.mark.process


def test_each_setting_is_shown_with_what_decided_it(tmp_path: Path):
    """A flag names itself, a variable its name, a file its line, and the rest is default."""
    (tmp_path / "site.toml").write_text('# ours\n\nthreads = 7\nhost = "h"\nprefetch = 9\n')
    more = {"GRACEKIT_HOST": "from-env", "GRACEKIT_PREFETCH": "8"}
    words = ("config", "show", "--config", "site.toml", "--prefetch", "5")

    answer = gracekit(tmp_path, *words, "--json", **more)
    shown = gracekit(tmp_path, *words, **more)

    found = {one["setting"]: one for one in answer.json["settings"]}
    assert answer.code == 0
    assert found.keys() == {option_name(name) for name in SETTINGS}
    assert [(found[n]["value"], found[n]["origin"]) for n in ("threads", "host", "prefetch")] == [
        ("7", "site.toml:3"),
        ("from-env", "GRACEKIT_HOST"),
        ("5", "flag --prefetch"),
    ]
    assert (found["drain_timeout"]["value"], found["drain_timeout"]["origin"]) == ("25s", "default")
    assert found["kill_after"]["value"] == "unset"
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "ORIGIN", "VARIABLE"]
    assert ["threads", "7", "site.toml:3", "GRACEKIT_THREADS"] in lines


def test_named_settings_alone_are_shown_and_wrong_names_get_a_hint(tmp_path: Path):
    """In any spelling; a name that is none costs one look."""
    two = gracekit(tmp_path, "config", "show", "drain-timeout", "GRACEKIT_STORE_URL", "--json")
    wrong = gracekit(tmp_path, "config", "show", "drain_timout")
    variable = gracekit(tmp_path, "config", "show", "GRACEKIT_DRAIN_TIMEOT")
    command = gracekit(tmp_path, "config", "shwo")

    assert {one["setting"] for one in two.json["settings"]} == {"drain_timeout", "store_url"}
    assert [a.code for a in (wrong, variable, command)] == [78, 78, 2]
    assert "unknown setting drain_timout; did you mean drain_timeout?" in wrong.err
    assert "did you mean GRACEKIT_DRAIN_TIMEOUT?" in variable.err
    assert "no command 'shwo'; did you mean show?" in command.err


def test_secrets_are_masked_and_wrong_settings_are_told(tmp_path: Path):
    """A password in a URL is shown nowhere, right or wrong; all problems come at once."""
    url = "memory://user:pass\x1b[1mword@here"
    shown = gracekit(tmp_path, "config", "show", "--store", "memory://", GRACEKIT_TRANSPORT_URL=url)
    flag = gracekit(tmp_path, "config", "show", "--store", "memory://", "--transport", url)
    wrong = gracekit(
        tmp_path, "config", "show", "--kill-after", "3s", GRACEKIT_TRANSPORT_URL="ftp://u:word@h"
    )

    assert shown.code == 0, shown
    assert "***@here" in shown.out
    assert flag.code == 78
    assert "everybody sees who lists processes: set GRACEKIT_TRANSPORT_URL" in flag.err
    assert "word" not in shown.out + shown.err + wrong.err + flag.err.replace("a password,", "")
    assert wrong.code == 78
    assert "must be below kill_after = 3s" in wrong.err


SERVICE = """
from gracekit import Service

svc = Service("compute", defaults={"drain_timeout": "10s", "threads": 3})
"""


def test_the_service_s_own_defaults_are_shown_with_their_origin(tmp_path: Path):
    """With --app, or GRACEKIT_APP as `gracekit run` reads it; whatever else says so goes before."""
    (tmp_path / "compute.py").write_text(SERVICE)
    words = ("config", "show", "drain_timeout", "threads", "--json", "--threads", "5")

    by_option = gracekit(tmp_path, *words, "--app", "compute:svc")
    by_variable = gracekit(tmp_path, *words, GRACEKIT_APP="compute")
    without = gracekit(tmp_path, *words)

    def shown(answer: Answer) -> list[tuple[str, str]]:
        return [(one["value"], one["origin"]) for one in answer.json["settings"]]

    assert shown(by_option) == shown(by_variable) == [("10s", "service"), ("5", "flag --threads")]
    assert shown(without) == [("25s", "default"), ("5", "flag --threads")]


def test_settings_are_judged_together_with_the_service_s_own_defaults(tmp_path: Path):
    """A platform's patience that is too short for gracekit's default fits the service's; and a
    default that breaks a rule is refused at the start, however the operator set the other side.
    """
    (tmp_path / "compute.py").write_text(SERVICE)
    (tmp_path / "slow.py").write_text(SERVICE.replace("10s", "180s"))
    words = ("config", "show", "drain_timeout", "--kill-after", "20s")

    fits = gracekit(tmp_path, *words, "--app", "compute:svc")
    does_not = gracekit(tmp_path, "run", "slow:svc", "--kill-after", "20s")

    assert (fits.code, fits.err) == (0, "")
    assert does_not.code == 78
    assert "drain_timeout 3m + handover_grace 2s" in does_not.err


def test_every_setting_has_its_meaning_in_the_help():
    """It comes from the docstring of `Settings`, where a new one is easily forgotten."""
    meanings = _meanings()

    assert [field.name for field in fields(Settings) if not meanings.get(field.name)] == []
