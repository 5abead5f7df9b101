"""Settings: where a value comes from, and that everything wrong is told at once."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import socket
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from gracekit import Service, Wait
from gracekit.config.live import LiveSettings
from gracekit.config.loading import load, load_again, load_for_log, read_settings_file
from gracekit.config.postgres_url import read_postgres_url
from gracekit.config.settings import Settings, option_name, variable_name
from gracekit.config.timings import Timings
from gracekit.config.urls import file_of, redact_url, shown_url
from gracekit.config.values import check_topic, format_duration, parse_duration
from gracekit.errors import ConfigError, DeclarationError, InvalidArgumentsError


def problems(**what) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(**({"env": {}} | what))
    return str(caught.value).splitlines()


# -- precedence ---------------------------------------------------------------------


def test_defaults_are_those_of_the_design():
    """With nothing said, a drain takes 25 s and the process is gone within Kubernetes' 30 s."""
    settings = load(env={})

    assert settings == Settings()
    assert (settings.drain_timeout_s, settings.handover_s, settings.hard_limit_s) == (25, 3, 29)
    assert settings.host == socket.gethostname()
    assert settings.origin("host") == "default"


def test_a_service_s_own_defaults_are_below_all_but_gracekit_s(tmp_path):
    """A compute service needs minutes to drain, a scheduler a few seconds; operators have the
    say.
    """
    file = tmp_path / "gracekit.toml"
    file.write_text("threads = 1\n")
    defaults = {"drain_timeout": "180s", "threads": 3, "prefetch": "9"}

    settings = load(env={"GRACEKIT_PREFETCH": "2"}, file=file, defaults=defaults)

    names = ("drain_timeout_s", "threads", "prefetch", "host")
    assert [settings.origin(name) for name in names] == [
        *("service", f"{file}:1", "GRACEKIT_PREFETCH", "default"),
    ]
    assert [getattr(settings, name) for name in names[:3]] == [180.0, 1, 2]


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ({"drain_timout": "3s"}, "did you mean drain_timeout?"),
        ({"drain_timeout": "soon"}, "drain_timeout in the service's defaults: 'soon'"),
        ({"threads": 2.5}, "threads in the service's defaults: 2.5 is not a whole number"),
        ({"store_url": "sqlite:///s.db"}, "set GRACEKIT_STORE_URL"),
        ({"log_level": "debug"}, "is needed before the service is imported"),
    ],
)
def test_a_wrong_default_of_a_service_is_refused_where_it_is_declared(defaults, said):
    """The value, the rule and the remedy; what the command line reads without the service too."""
    with pytest.raises(DeclarationError, match=re.escape(said)):
        Service("compute", defaults=defaults)


def test_flag_beats_variable_beats_file_beats_default(tmp_path):
    """Each value comes from the strongest place that names it, and remembers which."""
    file = tmp_path / "gracekit.toml"
    file.write_text('threads = 1\nprefetch = 1\nmax_running = 1\nhost = "from-file"\n')
    env = {"GRACEKIT_PREFETCH": "2", "GRACEKIT_MAX_RUNNING": "2", "PATH": "/bin"}

    settings = load({"max_running": 3, "threads": None}, env, file)

    assert (settings.threads, settings.prefetch, settings.max_running) == (1, 2, 3)
    origins = [settings.origin(n) for n in ("threads", "prefetch", "max_running", "look_every_s")]
    assert origins == [f"{file}:1", "GRACEKIT_PREFETCH", "flag --max-running", "default"]


def test_names_drop_the_unit_where_it_is_only_a_suffix():
    """`_s` is for code; operators write GRACEKIT_DRAIN_TIMEOUT, and Manila's own name stays
    whole.
    """
    assert variable_name("drain_timeout_s") == "GRACEKIT_DRAIN_TIMEOUT"
    assert variable_name("startup_reconciliation_wait_seconds") == (
        "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS"
    )
    assert load({"drain_timeout": "5s"}, {}).drain_timeout_s == 5
    assert load({"drain_timeout_s": 5}, {}).drain_timeout_s == 5


def test_describe_lists_every_setting_with_its_origin():
    """`config show` can print all settings from one call, as an operator would write them."""
    settings = load(env={"GRACEKIT_RETENTION": "14d"})

    shown = {name: (value, origin) for name, value, origin in settings.describe()}

    assert shown["retention"] == ("14d", "GRACEKIT_RETENTION")
    assert shown["startup_reconciliation_enabled"] == ("true", "default")
    assert set(shown) == {option_name(f) for f in Settings.__dataclass_fields__} - {
        "origins",
        "service_defaults",
        "doubts",
    }


# -- values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("25", 25),
        (25, 25),
        (0.5, 0.5),
        ("25s", 25),
        ("500ms", 0.5),
        ("5m", 300),
        ("1h", 3600),
        ("7d", 604800),
        (" 1.5 s ", 1.5),
        ("0", 0),
    ],
)
def test_durations_are_read_in_all_spellings(text, seconds):
    """A number is seconds; a unit says otherwise."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-1",
        "1w",
        "1h30m",
        "inf",
        "nan",
        "٣s",
        "9" * 400,
        True,
        -1,
        10**400,
        [],
        float("nan"),
        float("inf"),
    ],
)
def test_other_durations_are_refused_with_the_spelling(text):
    """What is no duration is told together with what would be one."""
    with pytest.raises(ConfigError, match="write 25, 25s, 500ms, 5m, 1h or 7d"):
        parse_duration(text)


def test_a_duration_that_is_too_long_is_told_from_what_is_none():
    """Its spelling is right."""
    with pytest.raises(ConfigError, match="'400000d' is longer than a century; write 25"):
        parse_duration("400000d")


@given(st.integers(0, 10**9).map(lambda ms: ms / 1000))
def test_a_duration_survives_being_shown(seconds):
    """What `config show` prints can be pasted back."""
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


@given(st.text() | st.floats() | st.integers() | st.booleans() | st.lists(st.integers()))
def test_no_value_breaks_the_reader(value):
    """Whatever a file holds, the answer is a setting or a ConfigError."""
    for name in ("drain_timeout", "threads", "log_format", "host", "store_url", "look_every"):
        try:
            load({name: value}, {})
        except ConfigError:
            pass


def test_truth_is_read_in_the_usual_words():
    """yes and off mean what they say; another word is an error, not a truth."""
    off = {"GRACEKIT_STARTUP_RECONCILIATION_ENABLED": "off"}
    assert load(env=off).startup_reconciliation_enabled is False
    on = load({"startup_reconciliation_enabled": "Yes"}, env=off)
    assert on.startup_reconciliation_enabled is True
    (problem,) = problems(env={"GRACEKIT_STARTUP_RECONCILIATION_ENABLED": "maybe"})
    assert problem == "GRACEKIT_STARTUP_RECONCILIATION_ENABLED: 'maybe' is neither true nor false"


def test_empty_optional_values_mean_unset():
    """An empty variable, as templates leave it, is no instance name."""
    names = ("INSTANCE", "KILL_AFTER", "BEAT", "FAIL_AFTER", "HARD_AFTER", "DEAD_AFTER")
    assert load(env={f"GRACEKIT_{name}": "" for name in names}) == Settings()


# -- what is wrong ------------------------------------------------------------------


def test_everything_wrong_is_told_at_once(tmp_path):
    """Four mistakes in three places are one error with four lines."""
    file = tmp_path / "gracekit.toml"
    file.write_text('thread = 1\nbeat = "soon"\n')

    lines = problems(flags={"prefetch": 0}, env={"GRACEKIT_DRAIN_TIMOUT": "5"}, file=file)

    assert lines == [
        f"unknown setting thread in {file}, line 1; did you mean threads?",
        f"beat in {file}, line 2: 'soon' is not a duration; write 25, 25s, 500ms, 5m, 1h or 7d",
        "unknown variable GRACEKIT_DRAIN_TIMOUT; did you mean GRACEKIT_DRAIN_TIMEOUT?",
        "prefetch = 0 must be more than 0; set GRACEKIT_PREFETCH",
    ]


def test_a_rule_that_a_file_breaks_names_its_lines(tmp_path):
    """Values that can be read by themselves may be wrong too, alone or with each other."""
    file = tmp_path / "gracekit.toml"
    file.write_text('max_running = 0\n\nkill_after = "20s"\n')

    number, kill = problems(file=file)
    (overridden,) = problems(file=file, env={"GRACEKIT_MAX_RUNNING": "1"})
    (flag,) = problems(flags={"max_running": 0}, file=file, env={"GRACEKIT_KILL_AFTER": "1h"})

    assert number == (
        "max_running = 0 must be more than 0; set GRACEKIT_MAX_RUNNING "
        f"(max_running in {file}, line 1)"
    )
    assert kill.endswith(f" (kill_after in {file}, line 3)")
    assert overridden == kill
    assert flag == "max_running = 0 must be more than 0; set GRACEKIT_MAX_RUNNING"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('drain_timeout = "zzz"\n', "drain_timeout in"),
        ('drain_timout = "5s"\n', "did you mean drain_timeout?"),
        ('[gracekit]\ndrain_timeout = "5s"\n', "settings stand in no table"),
        ("drain_timeout =\n", "cannot read the settings in"),
    ],
)
def test_a_rule_is_not_judged_if_one_of_its_values_could_not_be_read(tmp_path, text, wrong):
    """Otherwise the default would be compared, and an error would name a value that nobody gave."""
    file = tmp_path / "settings.toml"
    file.write_text(text)

    (problem,) = problems(file=file, env={"GRACEKIT_KILL_AFTER": "14s"})

    assert wrong in problem


def test_a_rule_is_judged_if_a_stronger_place_gives_what_could_not_be_read(tmp_path):
    """The variable would have won over the line of the file that is wrong."""
    file = tmp_path / "settings.toml"
    file.write_text('drain_timeout = "zzz"\n')

    found = problems(file=file, env={"GRACEKIT_DRAIN_TIMEOUT": "50s"}, flags={"kill_after": "14s"})

    assert found[0].startswith("drain_timeout in ")
    assert found[1].startswith("drain_timeout 50s + handover_grace 2s")
    assert len(found) == 2


def test_of_settings_that_are_wrong_together_only_those_that_were_read_are_judged():
    """Two files that are the same, a token that is missing, and what one of them could not say."""
    same = {"transport_url": "sqlite:///x.db", "store_url": "sqlite:///x.db"}
    remote = {"admin": "0.0.0.0:9701"}

    assert len(problems(flags=same | remote)) == 2
    assert len(problems(flags=same | {"store_url": ""})) == 1
    assert len(problems(flags=remote | {"admin_token_file": 3})) == 1


JUDGED_TOGETHER: Final = """\
drain_timeout = "60s"
handover_grace = "2s"
handover_flush = "1s"
exit_margin = "1s"
kill_after = "30s"
"""


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        ('kill_after = "zz"\nmax_accepted = 0\n', {}, ["'zz' is not a", "max_accepted = 0 must"]),
        ("foo = 1\nmax_accepted = 0\n", {}, ["unknown setting foo", "max_accepted = 0 must"]),
        (
            "",
            {"DRAIN_TIMEOUT": "3x", "MAX_RUNNIN": "2", "THREADS": "-1"},
            ["'3x' is not a", "did you mean GRACEKIT_MAX_RUNNING", "threads = -1 must"],
        ),
        (
            JUDGED_TOGETHER + 'log_level = "loud"\nhost = ""\n',
            {},
            ["'' is empty", "log_level = 'loud' must", "must be below kill_after = 30s"],
        ),
    ],
    ids=["unreadable", "unknown", "variables", "rules"],
)
def test_before_the_service_is_imported_all_is_told_that_its_defaults_cannot_change(
    tmp_path, text, env, said
):
    """An operator who mends one line at a time would have to start the service once for each."""
    file = tmp_path / "settings.toml"
    file.write_text(text)

    with pytest.raises(ConfigError) as early:
        load_for_log({}, {f"GRACEKIT_{name}": value for name, value in env.items()}, file)

    lines = str(early.value).splitlines()
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    "env",
    [
        {"GRACEKIT_KILL_AFTER": "14s"},  # the service may drain within 5 s
        {"GRACEKIT_DRAIN_TIMEOUT": "60s", "GRACEKIT_KILL_AFTER": "64s"},  # and hand over in 1 s
        {"GRACEKIT_ADMIN": "0.0.0.0:9701"},  # and have a token file
    ],
)
def test_what_a_service_s_defaults_may_mend_is_not_refused_before_they_are_known(env):
    """The log begins with what is known; the settings are judged when the service is imported."""
    assert problems(env=env)
    assert load_for_log({}, env, None).log_level == "info"


def test_a_pipe_is_read_once_for_the_log_and_the_service():
    """`--config <(command)` gives the settings once, and a second look would find an empty file."""
    read_end, write_end = os.pipe()
    os.write(write_end, b'max_running = 7\nlog_level = "debug"\n')
    os.close(write_end)
    pipe = Path(f"/dev/fd/{read_end}")

    try:
        found = read_settings_file(pipe)
        early, settings = load_for_log({}, {}, found), load({}, {}, found)
        with pytest.raises(ConfigError, match="is a pipe and is empty now"):
            load_again({}, {}, pipe, {})
    finally:
        os.close(read_end)

    assert (early.log_level, settings.max_running) == ("debug", 7)
    assert settings.origin("max_running") == f"{pipe}:1"


def test_variables_of_others_are_left_alone():
    """Failpoints, test switches, and what Kubernetes sets for a Service called gracekit are no
    typos.
    """
    names = ("FAILPOINT", "SOAK", "CONFIG", "TEST_AMQP_URL", "SERVICE_HOST", "SERVICE_PORT")
    more = ("API_SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR", "API_PORT")

    assert load(env={f"GRACEKIT_{name}": "x" for name in names + more}) == Settings()


def test_unreadable_file_is_a_problem_like_any_other(tmp_path):
    """A missing file and a broken one are told beside the other mistakes."""
    broken = tmp_path / "broken.toml"
    broken.write_text("threads =")

    assert "cannot read the settings" in problems(file=tmp_path / "none.toml")[0]
    assert len(problems(file=broken, flags={"look_every": 0})) == 2


STRANGER: Final = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another uid take root")


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "said"),
    [
        (0o666, -1, -1, "can be written by everybody.* chmod o-w"),
        pytest.param(
            0o664, -1, STRANGER, f"written by group {STRANGER}.* chmod g-w", marks=needs_root
        ),
        pytest.param(0o600, STRANGER, -1, f"belongs to uid {STRANGER}", marks=needs_root),
    ],
    ids=["everybody", "a group", "a stranger"],
)
def test_settings_that_others_may_write_are_refused(
    tmp_path, mode: int, uid: int, gid: int, said: str
):
    """They decide where requests go; a link to them is judged by what it leads to."""
    file, link = tmp_path / "site.toml", tmp_path / "link.toml"
    file.write_text("threads = 3\n")
    link.symlink_to(file)
    os.chown(file, uid, gid)
    file.chmod(mode)

    for one in (file, link):
        (problem,) = problems(file=one)
        assert re.search(said, problem)


def test_settings_behind_links_and_of_our_own_group_are_read(tmp_path):
    """Kubernetes mounts a ConfigMap as links, and many a umask leaves the bits of one's own
    group.
    """
    file, link = tmp_path / "site.toml", tmp_path / "link.toml"
    file.write_text("threads = 3\n")
    link.symlink_to(file)
    os.chown(file, -1, os.getegid())
    file.chmod(0o664)

    assert load(env={}, file=link).threads == 3


def test_hard_limit_must_be_below_the_platforms_kill():
    """A drain that the platform would cut is refused, with both ways out."""
    (problem,) = problems(flags={"drain_timeout": "60s", "kill_after": 30})

    assert problem == (
        "drain_timeout 1m + handover_grace 2s + handover_flush 1s + exit_margin 1s = 64s must be "
        "below kill_after = 30s: the platform would kill the process before it could hand its "
        "tasks over; raise terminationGracePeriodSeconds or TimeoutStopSec, and "
        "GRACEKIT_KILL_AFTER with it, to 66, or set GRACEKIT_DRAIN_TIMEOUT=25s"
    )


@given(drain=st.floats(0, 1000), kill=st.floats(4.1, 1000))
def test_the_remedy_for_a_kill_works(drain, kill):
    """Following the advice of the message leads to settings that are accepted."""
    given = {"drain_timeout_s": drain, "kill_after_s": kill}
    try:
        load(given, {})
    except ConfigError as error:
        advice = str(error)
        load(given | {"kill_after_s": advice.partition("with it, to ")[2].partition(",")[0]}, {})
        if "GRACEKIT_DRAIN_TIMEOUT=" in advice:
            load(given | {"drain_timeout_s": advice.rpartition("=")[2]}, {})


# -- signs of life ------------------------------------------------------------------

SHARED: Final = "postgresql://localhost/compute"


@pytest.mark.parametrize(
    ("liveness", "times"),
    [("normal", (3, 2, 9, 12, 20, 30)), ("slow", (15, 5, 60, 75, 90, 120))],
)
def test_each_preset_keeps_the_rules_and_gives_all_times(liveness, times):
    """Time between beats, for a request, until the warning, the cancellation, the kill, death."""
    settings = load({"store_url": SHARED, "liveness": liveness}, {})

    assert settings.timings == pytest.approx(times, rel=1e-12)
    assert load(env={}).timings == Settings(liveness="normal").timings


def test_a_time_that_is_set_overrides_the_one_of_the_preset():
    """The others stay; those for a request and the warning follow from it."""
    env = {"GRACEKIT_LIVENESS": "slow", "GRACEKIT_BEAT": "6s", "GRACEKIT_DEAD_AFTER": "5m"}

    assert load({"store_url": SHARED}, env).timings == Timings(
        beat_s=6, op_s=4, warn_s=69, fail_s=75, hard_s=90, dead_s=300
    )
    assert load({"fail_after": "13s", "hard_after": "21s"}, {}).timings[2:] == (10, 13, 21, 30)


@pytest.mark.parametrize(
    ("kept", "broken", "said"),
    [
        (
            {"beat_s": 3.0, "fail_after_s": 11.9},
            {"fail_after_s": 11.8},
            (
                "3.3 * beat 3s + op 2s = 11.9s must be at most fail_after = 11.8s: two lost beats "
                "would be enough to cancel all handlers; lower GRACEKIT_BEAT, or set "
                "GRACEKIT_FAIL_AFTER=12s"
            ),
        ),
        (
            {"beat_s": 30.0, "fail_after_s": 104.0, "hard_after_s": 106.0, "dead_after_s": 114.0},
            {"beat_s": 30.1},
            (
                "3.3 * beat 30.1s + op 5s = 104.33s must be at most fail_after = 104s: two lost "
                "beats would be enough to cancel all handlers; lower GRACEKIT_BEAT, or set "
                "GRACEKIT_FAIL_AFTER=105s GRACEKIT_HARD_AFTER=107s GRACEKIT_DEAD_AFTER=115s"
            ),
        ),
        (
            {"handover_grace_s": 8.0},
            {"handover_grace_s": 8.5},
            (
                "fail_after 12s + handover_grace 8.5s = 20.5s must be at most hard_after = 20s: "
                "the kernel would end the process while cancelled handlers have time to return; "
                "lower GRACEKIT_HANDOVER_GRACE, or set GRACEKIT_HARD_AFTER=21s"
            ),
        ),
        (
            {"hard_after_s": 20.0, "dead_after_s": 23.0},
            {"dead_after_s": 22.9},
            (
                "1.05 * hard_after 20s + 2s = 23s must be at most dead_after = 22.9s: others, "
                "whose clocks may run 5 % faster, could take tasks over before it ends; lower "
                "GRACEKIT_HARD_AFTER, or set GRACEKIT_DEAD_AFTER=23s"
            ),
        ),
    ],
)
def test_beats_must_leave_time_for_what_follows(kept, broken, said):
    """Each rule is kept at its boundary, and beyond it refused with the values and the remedy."""
    Settings(store_url=SHARED, **kept)

    with pytest.raises(ConfigError) as refused:
        Settings(store_url=SHARED, **{**kept, **broken})

    assert str(refused.value) == said


@given(
    st.fixed_dictionaries(
        {"liveness": st.sampled_from(["normal", "slow"])},
        optional=dict.fromkeys(
            ("beat", "fail_after", "hard_after", "dead_after", "handover_grace"),
            st.integers(1, 10**6).map(lambda ms: ms / 1000),
        ),
    )
)
def test_the_remedy_for_beats_works(given):
    """Following the advice once leads to settings that are accepted."""
    try:
        load(given | {"store_url": SHARED}, {})
    except ConfigError as error:
        advice = str(error).rpartition(", or set ")[2].split()
        env = dict(one.split("=") for one in advice)
        kept = {name: value for name, value in given.items() if variable_name(name) not in env}
        load(kept | {"store_url": SHARED}, env)


def test_beats_are_not_judged_for_a_store_of_one_host():
    """Its runs see each other's locks, so a long grace for handlers is no danger."""
    assert Settings(handover_grace_s=60.0, beat_s=60.0).handover_grace_s == 60.0


def test_an_unknown_liveness_is_the_only_problem_that_is_told():
    """The rules between the times would judge by a preset that nobody has named."""
    given = {"store_url": SHARED, "liveness": "slwo", "handover_grace": "1m"}

    assert problems(flags=given) == ["liveness = 'slwo' must be normal or slow; did you mean slow?"]


def test_a_probe_s_wait_is_read_in_all_spellings():
    """As every other duration that users write. A wrong one is an error of that call, not of a
    setting.
    """
    assert (Wait("1m"), Wait(0.5).seconds) == (Wait(60.0), 0.5)
    with pytest.raises(InvalidArgumentsError, match=r"Wait\('soon'\): 'soon' is not a duration"):
        Wait("soon")


@pytest.mark.parametrize("name", ["look_every_s", "beat_s", "kill_after_s", "threads"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_must_be_positive(name, value):
    """A zero or negative number is refused also where settings are built by hand."""
    with pytest.raises(ConfigError, match="must be more than 0"):
        Settings(**{name: value})


def test_no_wait_at_all_is_a_sensible_drain():
    """A drain of 0 s hands everything over at once."""
    assert Settings(drain_timeout_s=0).hard_limit_s == 4


@pytest.mark.parametrize("value", ["", "a*b", "x" * 256, "naïve", "a\n"])
def test_names_fit_queues(value):
    """A host or instance that could not name a queue is refused."""
    for name in ("host", "instance"):
        with pytest.raises(ConfigError, match=f"{name} = .* must be 1 to 255 of"):
            Settings(**{name: value})


@pytest.mark.parametrize("value", ["#", "a.#", "#.a", "a.#.b"])
def test_a_name_is_no_pattern_of_a_broker(value):
    """A broker's exchange takes `#` between dots for any words: a queue bound by such a name gets
    the requests of others.
    """
    for name in ("host", "instance"):
        with pytest.raises(ConfigError, match=f"{name} = .* '#' as a word"):
            Settings(**{name: value})
    with pytest.raises(ConfigError, match="'#' as a word"):
        check_topic(value, "name it otherwise")
    with pytest.raises(ConfigError, match="'#' as a word"):
        Settings(ops_topic=f"{{topic}}.{value}").ops_topic_of("compute")
    assert Settings(host="rack#3.node-1").host == "rack#3.node-1"
    assert check_topic("c#", "") == "c#"


def test_ops_topic_is_another_topic():
    """The ops lane may be named freely, but never as the service itself."""
    assert Settings().ops_topic_of("compute") == "compute-ops"
    assert Settings(ops_topic="compute-alt").ops_topic_of("compute") == "compute-alt"
    with pytest.raises(ConfigError, match="a name of its own"):
        Settings(ops_topic="{topic}")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("compute", "names 'compute', to which requests are sent: set GRACEKIT_NOTIFICATION_TOPIC"),
        ("{topic}-ops", "names 'compute-ops', to which requests are sent"),
        (
            "{topic}" * 40,
            "makes a topic of 280 characters, 'compute.*', and queues can be named for",
        ),
    ],
)
def test_a_notification_topic_is_another_topic(given, why):
    """Requests would be read as notifications; and queues are named for it."""
    with pytest.raises(ConfigError, match=f"notification_topic = '.*' {why}"):
        Settings(notification_topic=given).notification_topic_of("compute")


def test_an_ops_topic_that_no_exchange_can_be_named_for_is_refused():
    """The setting alone may be short enough, and be too long with the topic in it."""
    settings = Settings(ops_topic="{topic}-" + "x" * 30)

    assert settings.ops_topic_of("t" * 89).startswith("ttt")
    with pytest.raises(ConfigError, match=r"of 121 characters.*set GRACEKIT_OPS_TOPIC"):
        settings.ops_topic_of("t" * 90)


# -- URLs ---------------------------------------------------------------------------


def test_sqlite_url_names_a_file():
    """Three slashes are relative to the working directory, four are absolute."""
    assert file_of("sqlite:///a/b.db") == Path("a/b.db")
    assert file_of("sqlite:////var/lib/b.db") == Path("/var/lib/b.db")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://host/x.db", "sqlite:///a?b"])
def test_sqlite_url_without_file_is_refused(url):
    """A URL that names no file of this machine is told with its right form."""
    (problem,) = problems(flags={"store_url": url})

    assert problem.startswith("store_url: ")
    assert problem.endswith(
        "write sqlite:///relative.db or sqlite:////absolute.db, without options"
    )


def test_a_file_name_that_is_too_long_is_refused():
    """The system would refuse it, or one of the files beside it, in the middle of something."""
    (problem,) = problems(flags={"store_url": f"sqlite:///a/{'x' * 238}.db"})

    assert "has a name of 241 bytes: at most 240 fit" in problem
    assert "give a shorter one" in problem
    assert file_of(f"sqlite:///{'x' * 237}.db").name == "x" * 237 + ".db"


def test_unknown_scheme_is_told_without_its_password():
    """The nearest scheme is offered, and a password in the URL never reaches the message."""
    (problem,) = problems(env={"GRACEKIT_TRANSPORT_URL": "sqlight://me:canary@host/"})

    assert "did you mean sqlite?" in problem
    assert "canary" not in problem
    assert redact_url("amqp://me:can@ry/@host/v is gone") == "amqp://***@host/v is gone"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://bob:canary@h/v", "amqp://***@h/v"),
        ("amqp://bob:can@ry/@h,you:canary@i/v", "amqp://***@i/v"),
        ("bob:canary@h", "***@h"),
        ("amqp:/bob:canary@h", "amqp:/***@h"),
        ("amqp:bob:canary@h/v", "amqp:***@h/v"),
        ("amqp:///bob:canary@h/v", "amqp://***@h/v"),
        ("amqb://bob:canary@h", "amqb://***@h"),
        ("canary@h", "***@h"),
        ("amqp://bob:canary", "amqp://bob:***"),
        ("amqp://bob:canary/canary?x", "amqp://bob:***"),
        ("amqp://h:5672,[::1]:5673/v", "amqp://h:5672,[::1]:5673/v"),
        ("amqp://h/v?profile=canary&x", "amqp://h/v?profile=***&x"),
        ("sqlite:///x.db?key=canary", "sqlite:///x.db?key=***"),
        ("sqlite://bob:canary@h/x.db", "sqlite://***@h/x.db"),
        ("sqlite:////home/me@here/x.db", "sqlite:////home/me@here/x.db"),
        ("sqlite:///a:b/x.db", "sqlite:///a:b/x.db"),
        ("memory://", "memory://"),
        ("gracekit.db", "gracekit.db"),
    ],
)
def test_a_url_is_shown_without_its_secrets_however_it_is_written(url, shown):
    """Everything before the last @ is a login, and an option's value may be the end of one."""
    assert shown_url(url) == shown


@pytest.mark.parametrize("name", ["transport_url", "store_url"])
@pytest.mark.parametrize(
    "value",
    [
        "bob:canary@h",
        "amqp:/bob:canary@h",
        "amqp//bob:canary@h",
        "ftp://bob:canary",
        ["b:canary@h"],
    ],
)
def test_a_wrong_url_is_told_without_its_password(tmp_path, name, value):
    """From a file and from the environment, right or wrong, as a text or not."""
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")

    told = problems(file=file)
    if isinstance(value, str):
        told += problems(env={variable_name(name): value})

    assert told
    assert not any("canary" in problem for problem in told)


@pytest.mark.parametrize("url", ["bob:canary@h", "amqp:/bob:canary@h", "amqp://bob:can/ary@h"])
def test_no_password_is_taken_from_a_flag_however_it_is_written(url):
    """Whoever lists processes reads it there, before anybody has said that it is wrong."""
    (problem,) = problems(flags={"transport_url": url})

    assert "holds a password, which everybody sees" in problem


def test_a_field_that_settings_do_not_have_is_named_with_the_one_that_is_meant():
    """In code values are numbers of seconds; text is for the environment, flags and files."""
    with pytest.raises(ConfigError, match=r"only 'drain_timeout_s', in seconds: write drain_"):
        Settings(drain_timeout="25s")
    with pytest.raises(ConfigError, match="has no 'drain_timeot_s'; did you mean drain_timeout_s"):
        Settings(drain_timeot_s=25)
    assert dataclasses.replace(Settings(), max_running=3).max_running == 3
    assert pickle.loads(pickle.dumps(Settings(host="h"))).host == "h"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("drain_timeout_s", "25s", "seconds, such as 25.0"),
        ("drain_timeout_s", None, "seconds, such as 25.0"),
        ("kill_after_s", True, "seconds, such as 25.0"),
        ("max_running", "100", "a whole number"),
        ("max_running", 1.5, "a whole number"),
        ("accept_unshared_store", "yes", "True or False"),
        ("host", 3, "a text"),
        ("transport_url", ["amqp://bob:canary@h"], "a text"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_one_that_is_wanted(name, value, wanted):
    """It would break a comparison much later, in the middle of a start or a drain."""
    with pytest.raises(ConfigError, match=rf"^{name}.*wants {wanted}") as refused:
        Settings(**{name: value})

    assert "canary" not in str(refused.value)


A_UNIT = "is not a whole number; write digits alone, without a unit: 64 MiB are 67108864"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-1", "prefetch_bytes = -1 must be more than 0; set GRACEKIT_PREFETCH_BYTES"),
        ("9" * 20, f"GRACEKIT_PREFETCH_BYTES: {'9' * 20} must be below 2^53"),
        ("9" * 9000, f"GRACEKIT_PREFETCH_BYTES: {'9' * 30}... must be below 2^53"),
        ("64MiB", f"GRACEKIT_PREFETCH_BYTES: '64MiB' {A_UNIT}"),
        ("64 M", f"GRACEKIT_PREFETCH_BYTES: '64 M' {A_UNIT}"),
        ("many", "GRACEKIT_PREFETCH_BYTES: 'many' is not a whole number; write digits alone"),
    ],
)
def test_a_number_that_is_refused_is_told_the_rule_that_it_breaks(text, said):
    """Negative and huge numbers are whole ones, and who writes a unit learns what to write."""
    assert problems(env={"GRACEKIT_PREFETCH_BYTES": text}) == [said]


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("gracekit-store.db", "; for this file write sqlite:///gracekit-store.db"),
        ("/var/lib/api/store", "; for this file write sqlite:////var/lib/api/store"),
        ("sqlit:///x.db", "; did you mean sqlite?"),
        ("store", ""),
    ],
)
def test_a_url_that_is_none_is_told_what_to_write(url, hint):
    """A path is turned into its URL; and no password is shown."""
    (problem,) = problems(env={"GRACEKIT_STORE_URL": url})

    assert problem.endswith(f"must begin with sqlite:///, memory:// or postgresql://{hint}")


def test_postgresql_is_no_transport():
    """A URL of the store in the wrong variable is answered with the right one, and no password."""
    (problem,) = problems(env={"GRACEKIT_TRANSPORT_URL": "postgresql://u:canary@h/d"})

    assert problem.endswith("PostgreSQL keeps the store alone: set GRACEKIT_STORE_URL to this URL")
    assert "canary" not in problem


@pytest.mark.parametrize(
    ("url", "libpq", "name"),
    [
        ("//localhost/d", "//localhost/d", "//localhost/d?schema=gracekit"),
        ("//u:p%2Fw@[::1]:5/d", "//u:p%2Fw@[::1]:5/d", "//[::1]:5/d?schema=gracekit"),
        ("//u:a?b@127.0.0.1/d?schema=x_1", "//u:a?b@127.0.0.1/d", "//127.0.0.1/d?schema=x_1"),
        (
            "//a,b:6/d?sslmode=require",
            "//a,b:6/d?sslmode=require&target_session_attrs=read-write",
            "//a,b:6/d?schema=gracekit",
        ),
        (
            "//a,b/d?sslmode=require&target_session_attrs=primary&schema=s",
            "//a,b/d?sslmode=require&target_session_attrs=primary",
            "//a,b/d?schema=s",
        ),
        ("///d?host=/run/pg&port=6", "///d?host=/run/pg&port=6", "//%2Frun%2Fpg/d?schema=gracekit"),
        ("//%2Frun%2Fpg:6/d", "//%2Frun%2Fpg:6/d", "//%2Frun%2Fpg:6/d?schema=gracekit"),
    ],
)
@pytest.mark.parametrize("scheme", ["postgresql:", "postgres:"])
def test_the_url_of_postgresql_is_one_of_libpq_with_a_schema(scheme, url, libpq, name):
    """The schema is taken out, several hosts are asked for the one that writes, and the name for
    messages has no login.
    """
    assert Settings(store_url=scheme + url)
    read = read_postgres_url(scheme + url)

    assert (read.libpq, read.name) == (scheme + libpq, f"postgresql:{name}")
    assert read.schema == name.rpartition("=")[2]
    assert conninfo_to_dict(read.libpq)["dbname"] == "d"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("//u:canary@h", "names no database: write postgresql://user@host/database"),
        ("//u:canary@h/?sslmode=require", "names no database"),
        ("//u:canary@h/d?sslmod=require", "has the unknown option 'sslmod'; did you mean sslmode?"),
        ("//u@localhost/d?password=canary", "has the unknown option 'password'"),
        ("//u@localhost/d?options=-ccanary", "has the unknown option 'options'"),
        ("//u:canary@h/d", "must say sslmode, because h is another machine: sslmode=verify-full"),
        ("//u:canary@h/d?sslmode=", "must say sslmode"),
        ("//u:canary@localhost,10.0.0.1:6/d", "because 10.0.0.1:6 is another machine"),
        ("//u:canary@localhost/d?host=10.0.0.1", "because 10.0.0.1 is another machine"),
        ("//localhost/d?schema=Big", "such as gracekit, not 'Big'"),
        ("//localhost/d?schema=", "needs a schema"),
        ("//localhost/d?schema=pg_x", "needs a schema"),
        ("//u:canary@/d", "must name each host as host or host:port"),
        ("//u:canary/d?sslmode=require", "must name each host as host or host:port"),
        ("//u:can/ary@h/d", "needs %40 and %2F for each @ and / in user, password"),
        ("//u:can@ry@h/d", "needs %40 and %2F"),
        ("//u:canary%zz@localhost/d", "has a % that begins no %xx: write %25"),
        ("//u:canary%00@localhost/d", "has a % that begins no %xx"),
        ("//u:canary y@localhost/d", "has a space: write %20"),
        ("//u:canary@local host/d", "has a space: write %20"),
        ("//u:canary%C3%28@localhost/d", "has a %xx that is no UTF-8"),
    ],
)
def test_a_wrong_url_of_postgresql_is_told_without_its_password(url, said):
    """libpq would say it at the first connection, and would print what it cannot read."""
    (problem,) = problems(env={"GRACEKIT_STORE_URL": f"postgresql:{url}"})

    assert problem.startswith("store_url: 'postgresql:")
    assert said in problem
    assert not re.search("canary|ry@", problem)


@pytest.mark.parametrize("word", ["password=canary", "password = 'canary bird'"])
def test_the_other_form_of_libpq_is_refused_without_its_password(word):
    """It is no URL."""
    (problem,) = problems(env={"GRACEKIT_STORE_URL": f"host=h {word} dbname=d"})

    assert "must begin with sqlite:///" in problem
    assert "canary" not in problem
    assert "bird" not in problem


def test_a_password_of_postgresql_is_shown_nowhere(tmp_path):
    """Neither by `config show`, nor in the value that has it, nor taken from a flag."""
    url = "postgresql://u:canary@localhost/d?passfile=secret"
    shown = [value for _, value, _ in load({}, {"GRACEKIT_STORE_URL": url}).describe()]

    assert "postgresql://***@localhost/d?passfile=***" in shown
    assert "canary" not in repr(read_postgres_url(url))
    assert "holds a password" in problems(flags={"store_url": url})[0]


def test_a_table_in_a_file_is_told_to_be_taken_away(tmp_path):
    """Other programs have tables, so people write them."""
    file = tmp_path / "settings.toml"
    file.write_text('[gracekit]\ndrain_timeout = "25s"\n')

    (problem,) = problems(file=file)

    assert problem.endswith("one `name = value` a line; take the line [gracekit] away")


def test_messages_may_not_be_bounded_to_nothing():
    """A service that refuses each request as too large would look healthy."""
    (problem,) = problems(env={"GRACEKIT_MAX_BODY_BYTES": "1"})

    assert problem.startswith("max_body_bytes = 1 must be at least 1024: ")
    assert Settings(max_body_bytes=1024)


@pytest.mark.parametrize("ops_topic", ["compute", "compute.node-1", "{topic}.slot-3"])
def test_an_ops_topic_that_is_a_queue_of_new_requests_is_refused(ops_topic):
    """Names are compared as they are in the end: ops requests would be read as new ones, and
    back.
    """
    settings = Settings(ops_topic=ops_topic, host="node-1", instance="slot-3")

    with pytest.raises(ConfigError, match="which is a queue of new requests of"):
        settings.ops_topic_of("compute")


def test_transport_and_store_have_a_file_each(tmp_path, monkeypatch):
    """The same file is refused however it is spelled."""
    monkeypatch.chdir(tmp_path)
    urls = {
        "transport_url": "sqlite:///x.db",
        "store_url": f"sqlite:///{tmp_path}/../{tmp_path.name}/x.db",
    }

    (problem,) = problems(flags=urls)

    assert "the journal needs a file of its own" in problem


def test_memory_store_needs_a_memory_transport():
    """A journal that is gone at exit may not ack what a file kept."""
    assert Settings(transport_url="memory://", store_url="memory://")
    assert Settings(transport_url="memory://")
    with pytest.raises(ConfigError, match="forgets at exit"):
        Settings(store_url="memory://")


# -- the HTTP endpoint ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("off", "off"),
        ("unix:/run/api/admin.sock", "unix:/run/api/admin.sock"),
        ("127.0.0.1:9701", "127.0.0.1:9701"),
        ("localhost:0", "localhost:0"),
        ("[::1]:9701", "[::1]:9701"),
    ],
)
def test_the_http_endpoint_listens_on_this_host_without_a_token(text, said):
    """Unix sockets and loopback addresses need no further setting."""
    assert load({"admin": text}, env={}).admin == said


@pytest.mark.parametrize(
    "text", ["9701", "unix:relative", "127.0.0.1", "1.2.3:80", "[nonsense]:80", "h:70000", "h:-1"]
)
def test_what_is_no_address_to_listen_at_is_refused_with_the_ways_to_write_one(text):
    """The message shows the wrong text and every valid form."""
    (problem,) = problems(flags={"admin": text})

    assert problem.startswith(f"--admin: {text!r} ")
    assert "off, unix:/run/api/admin.sock, 127.0.0.1:9701" in problem


def test_beyond_this_host_the_http_endpoint_needs_tokens(tmp_path):
    """An address that other hosts reach is refused without a token file, before anything starts."""
    (problem,) = problems(flags={"admin": "0.0.0.0:9701"})

    assert "set GRACEKIT_ADMIN_TOKEN_FILE" in problem
    settings = load({"admin": "0.0.0.0:9701", "admin_token_file": str(tmp_path)}, env={})
    assert settings.admin == "0.0.0.0:9701"


def test_an_endpoint_that_lets_nobody_in_is_refused():
    """If probes needed a token and there were none, they could never pass."""
    (problem,) = problems(flags={"admin": "127.0.0.1:1", "admin_open": "nothing"})

    assert problem.startswith("admin_open = nothing demands a token of every client")


# -- while a run lives ----------------------------------------------------------------


def test_of_settings_that_are_read_again_those_change_that_may():
    """Their origins change too; listeners get the settings before and after; all others stay."""
    live, told = LiveSettings(load(env={"GRACEKIT_MAX_RUNNING": "5"})), []
    live.on_change(lambda before, now: told.append((before.max_running, now.max_running)))
    found = load({"max_running": "7", "max_accepted": "70"}, env={})

    differences = live.differences(found)
    live.take(found)

    assert [str(one) for one in differences] == ["max_accepted unset -> 70", "max_running 5 -> 7"]
    assert [one.is_changeable for one in differences] == [False, True]
    assert told == [(5, 7)]
    assert (live.now.max_running, live.now.max_accepted) == (7, None)
    assert live.now.origin("max_running") == "flag --max-running"
    assert live.now.origin("max_accepted") == "default"
    live.take(load(env={}))
    assert (live.now.max_running, live.now.origin("max_running")) == (100, "default")


def test_the_origin_of_what_stays_is_where_it_stands_now_or_where_it_stood(tmp_path: Path):
    """A line of the file may have moved, or may have another value that needs a restart."""
    file = tmp_path / "set.toml"
    file.write_text('max_accepted = 70\nhandover_grace = "2s"\nthreads = 9\n')
    live = LiveSettings(load({}, {}, read_settings_file(file)))
    file.write_text('# a line more\nmax_accepted = 70\nhandover_grace = "9s"\n')

    for _ in range(2):
        live.take(load({}, {}, read_settings_file(file)))

    names = ("max_accepted", "handover_grace_s", "threads")
    assert [live.now.origin(name) for name in names] == [
        f"{file}:2",
        f"{file}:2, as it was at the start",
        f"{file}:3, as it was at the start",
    ]
    assert live.now.handover_grace_s == 2.0


def test_what_does_not_fit_what_stays_changes_nothing():
    """New settings that fit each other may not fit one that only a restart changes."""
    live = LiveSettings(load({"kill_after": "30s"}, env={}))
    found = load({"kill_after": "90s", "drain_timeout": "60s", "max_running": "7"}, env={})

    with pytest.raises(ConfigError, match=r"with the settings that need a restart, .* = 30s"):
        live.take(found)

    assert (live.now.drain_timeout_s, live.now.max_running) == (25.0, 100)


def test_a_password_that_has_changed_is_named_and_not_shown():
    """It needs a restart; the log must not have the password."""
    live = LiveSettings(load({}, {"GRACEKIT_TRANSPORT_URL": "amqp://u:canary@h/v"}))
    found = load({}, {"GRACEKIT_TRANSPORT_URL": "amqp://u:secret@h/v"})

    (one,) = live.differences(found)

    assert (one.name, one.is_changeable) == ("transport_url", False)
    assert "canary" not in str(one)
    assert "secret" not in str(one)
