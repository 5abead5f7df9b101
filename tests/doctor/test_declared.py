"""Settings against each other, and what a service declares against them."""

from __future__ import annotations

import pytest

from gracekit import Context, Done, Service, Settings
from gracekit.config.loading import load
from gracekit.config.settings import rules
from gracekit.doctor import configuration, declared
from gracekit.doctor.finding import Finding, Level, exit_code, fail, ok, told, warn
from gracekit.errors import ConfigError
from gracekit.exits import ExitCode
from tests.doctor.kit import levels, one


@pytest.fixture
def svc() -> Service:
    return Service("compute")


# -- settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "url", "level"),
    [
        (0o644, "amqp://u:canary@h/v", Level.WARN),
        (0o604, "amqp://u:canary@h/v", Level.WARN),
        (0o640, "amqp://u:canary@h/v", Level.OK),
        (0o644, "amqp://h/v", None),
    ],
)
def test_a_settings_file_with_a_password_that_others_can_read_is_a_warning(
    tmp_path, mode, url, level
):
    """A group may be the service's own; everybody is nobody's."""
    file = tmp_path / "compute.toml"
    file.write_text(f'host = "h"\ntransport_url = "{url}"\n')
    file.chmod(mode)

    found = list(configuration.check_secrets(load({}, {}, file)))

    assert [one.level for one in found] == ([] if level is None else [level])
    assert not any("canary" in one.seen + one.remedy for one in found)


def test_the_defaults_keep_every_rule():
    """Nobody is warned of what nobody has set."""
    found = [*configuration.check_inequalities(Settings()), *configuration.check_settle(Settings())]

    assert {finding.level for finding in found} == {Level.OK}
    assert len(list(rules(Settings(kill_after_s=30)))) == len(list(rules(Settings()))) + 1


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({"cancel_ok_timeout_s": 26}, "cancel_ok_timeout"),
        ({"ops_quiet_timeout_s": 26}, "ops_quiet_timeout"),
        ({"progress_every_s": 26}, "progress_every"),
        ({"max_running": 1001, "max_accepted": 1000}, "max_running"),
        ({"ops_max_running": 1001}, "ops_max_running"),
        ({"threads": 101}, "threads"),
        ({"ops_threads": 101}, "ops_threads"),
    ],
)
def test_each_inequality_that_is_not_kept_is_a_warning_with_both_values(settings, check):
    """The sentence has the two values, the rule and what follows; the remedy both variables."""
    found = one(configuration.check_inequalities(Settings(**settings)), check)

    assert found.level is Level.WARN
    assert "should be at most" in found.seen
    assert f"lower GRACEKIT_{check.upper()}, or raise GRACEKIT_" in found.remedy


def test_a_store_that_hosts_share_is_judged_by_its_times():
    """Each rule is named for the setting that it begins with."""
    settings = Settings(store_url="postgresql://localhost/compute")

    seen = {one.check: one.seen for one in configuration.check_inequalities(settings)}

    assert seen["beat"] == "3.3 * beat 3s + op 2s = 11.9s is at most fail_after = 12s"
    assert {"fail_after", "hard_after"} <= seen.keys()


def test_a_drain_that_waits_for_nothing_is_judged_by_no_drain_rule():
    """drain_timeout = 0 is a choice: nothing is waited for."""
    found = list(configuration.check_inequalities(Settings(drain_timeout_s=0)))

    assert {finding.level for finding in found} == {Level.OK}


@pytest.mark.parametrize(
    "settings",
    [{"startup_reconciliation_wait_seconds": 0}, {"startup_reconciliation_enabled": False}],
)
def test_no_pause_before_unclean_tasks_is_a_warning(settings):
    """The dead process's last request may still be on its way."""
    (found,) = configuration.check_settle(Settings(**settings))

    assert found.level is Level.WARN


# -- methods ------------------------------------------------------------------------


def test_a_service_without_methods_is_told(svc):
    """Usually the module that declares them was not imported."""
    assert declared.check_methods(svc).level is Level.WARN


def test_methods_are_counted_by_what_becomes_of_them(svc):
    """One line says how many there are of each policy, how many need threads, and how many a drain
    does not close.
    """

    @svc.rpc
    async def create(ctx: Context) -> None: ...

    @svc.rpc(on_interrupt="retry")
    def delete(ctx: Context) -> None: ...

    assert declared.check_methods(svc).seen == (
        "2 on topic compute: 1 error, 1 retry; 1 in threads"
    )

    @svc.ops
    async def count(ctx: Context) -> None: ...

    @svc.ops(in_drain="refuse")
    async def stop(ctx: Context) -> None: ...

    assert declared.check_methods(svc).seen == (
        "4 on topic compute: 3 error, 1 retry; 1 in threads; 1 also in a drain, on the ops topic"
    )


@pytest.mark.parametrize("policy", ["error", "retry", "probe"])
def test_each_resource_that_no_kind_has_is_a_warning_whatever_the_policy(svc, policy):
    """A misspelt kind takes another lease than the rules do, and no pass settles such a
    resource.
    """
    svc.kind("volume")

    @svc.rpc
    async def list_all(ctx: Context) -> None: ...

    @svc.rpc(resource="volumes", on_interrupt=policy)
    async def create(ctx: Context, volumes: str) -> None: ...

    @svc.rpc(resource="image")
    async def copy(ctx: Context, image: str) -> None: ...

    bare, *found = [one for one in declared.check_doubts(svc) if "resource" in one.seen]

    assert {one.level for one in (bare, *found)} == {Level.WARN}
    assert bare.seen == "kind volume has no rule, so no pass settles any of its resources"
    assert [finding.seen.partition(":")[0] for finding in found] == ["copy()", "create()"]
    assert found[0].remedy == (
        "declare svc.kind('image') with its find, write and rules; if no record of such a "
        "resource can stay in a transient status, leave it so"
    )
    assert "resource='volumes', and no svc.kind('volumes') is declared" in found[1].seen
    assert "(did you mean 'volume'?): no pass settles such a resource" in found[1].seen
    assert found[1].remedy.startswith("write resource=('volume', 'argument')")


def test_a_resource_in_a_service_without_kinds_is_no_warning(svc):
    """Leases are of use without kinds: nobody is warned of what was never meant to be settled."""

    @svc.rpc(resource="volume")
    async def create(ctx: Context, volume: str) -> None: ...

    assert list(declared.check_doubts(svc)) == []


def test_the_task_api_is_not_counted_as_a_method():
    """Its methods are gracekit's own: a service with no other serves nothing of the
    application's.
    """
    svc = Service("compute", task_api=True)

    assert declared.check_methods(svc).level is Level.WARN


def test_a_probe_method_without_probe_is_a_warning(svc):
    """Each of its interrupted tasks would end as ERRORED, which was not what was asked for."""

    @svc.rpc(on_interrupt="probe")
    async def migrate(ctx: Context) -> None: ...

    (found,) = declared.check_doubts(svc)

    assert found.level is Level.WARN
    assert "@migrate.probe" in found.remedy

    @migrate.probe
    async def _(ctx: Context) -> Done:
        return Done(None)

    assert list(declared.check_doubts(svc)) == []


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, Level.OK),
        ({"max_running": 30}, Level.OK),
        ({"max_accepted": 41}, Level.WARN),
        ({"max_accepted": 40}, Level.OK),
        ({"max_accepted": 40, "threads": 30}, Level.WARN),
        ({"accept_unshared_store": False}, None),
    ],
)
def test_a_store_of_its_own_must_not_keep_more_than_can_run(svc, given, level):
    """Beside workers with other stores a drain would leave there what only this store's runs can
    run.
    """

    @svc.rpc
    def create(ctx: Context) -> None: ...

    @svc.ops
    async def count(ctx: Context) -> None: ...

    settings = Settings(**{"accept_unshared_store": True, **given})

    found = levels(declared.check_accepted(settings, svc))

    assert found == ({} if level is None else {"accepted requests": level})


def test_what_keeps_the_store_small_is_named_and_breaks_no_other_rule(svc):
    """With a coroutine max_running is the limit; a service that journals nothing is not warned."""
    asked = Settings(accept_unshared_store=True, max_running=60, max_accepted=1000)
    nothing = list(declared.check_accepted(asked, svc))

    @svc.rpc
    async def create(ctx: Context) -> None: ...

    (found,) = declared.check_accepted(asked, svc)
    mended = Settings(accept_unshared_store=True, max_running=60)

    assert nothing == []
    assert "max_accepted = 1000 requests are kept in this store while at most 60 run" in found.seen
    assert found.remedy.startswith("leave GRACEKIT_MAX_ACCEPTED out: ")
    assert levels(declared.check_accepted(mended, svc)) == {"accepted requests": Level.OK}
    assert {one.level for one in configuration.check_inequalities(mended)} == {Level.OK}


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({"timeout": "10m"}, Level.WARN),
        ({"timeout": "10m", "on_interrupt": "retry"}, Level.OK),
        ({"timeout": "20s"}, Level.OK),
        ({}, Level.OK),
    ],
)
def test_work_longer_than_a_drain_must_not_end_as_an_error(svc, options, level):
    """A method that may outlive each drain, and is not run again, is ERRORED by deployments."""

    @svc.rpc(**options)
    async def create(ctx: Context) -> None: ...

    assert declared.check_timeouts(Settings(), svc).level is level


def test_threads_bound_plain_functions(svc):
    """More at a time than threads, or a time-out that stops nobody, is told."""

    @svc.rpc(max_running=50)
    def scan(ctx: Context) -> None: ...

    @svc.ops(timeout="5s")
    def ping(ctx: Context) -> None: ...

    found = list(declared.check_threads(Settings(), svc))

    assert [(f.check, f.level) for f in found] == [
        ("threads", Level.WARN),  # 50 > 40
        ("ops_threads", Level.OK),
        ("threads", Level.WARN),  # ping() goes on after its time-out
    ]


# -- the exit code ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([], 0),
        ([ok("a", "b"), warn("a", "b", "c")], 0),
        ([fail("a", "b", "c", ExitCode.DEPENDENCY)], 69),
        ([fail("a", "b", "c", ExitCode.INTERNAL), fail("a", "b", "c", ExitCode.DEPENDENCY)], 70),
        ([fail("a", "b", "c", ExitCode.DEPENDENCY), fail("a", "b", "c")], 78),
    ],
)
def test_the_exit_code_is_the_largest_that_a_fail_asks_for(findings: list[Finding], code):
    """Warnings end with 0; configuration outweighs a fault of ours, and that a dependency."""
    assert exit_code(findings) == code


def test_an_error_of_ours_becomes_a_finding_a_line():
    """Value and rule are what was seen, and what follows is the remedy."""
    found = told("settings", ConfigError("a = 1 must be 2; set A\nb is wrong"))

    assert [(f.seen, f.remedy) for f in found] == [("a = 1 must be 2", "set A"), ("b is wrong", "")]


@pytest.mark.parametrize(("used", "level"), [(False, Level.WARN), (True, Level.OK)])
def test_a_time_to_wait_for_capacity_needs_tasks_that_wait(svc, used, level):
    """Where tasks are not parked, `pending_timeout=` says nothing, and the remedy is a setting."""

    @svc.rpc(pending_timeout="5m")
    async def build(ctx: Context) -> None: ...

    found = one(declared.check_pending(Settings(use_pending_state=used), svc), "pending")

    assert found.level is level
    assert "build()" in found.seen
    if level is Level.WARN:
        assert "GRACEKIT_USE_PENDING_STATE=true" in found.remedy


@pytest.mark.parametrize("used", [False, True])
def test_without_a_declared_time_to_wait_nothing_is_said(svc, used):
    """Whether tasks are parked is the settings' affair then."""

    @svc.rpc
    async def build(ctx: Context) -> None: ...

    assert list(declared.check_pending(Settings(use_pending_state=used), svc)) == []
