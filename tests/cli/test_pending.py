"""`gracekit pending` and its orders, and how other listings show parked tasks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gracekit.process import FAILPOINTS_ON
from tests.cli.kit import Answer, Started, gracekit, write_service
from tests.cli.parked import CANARY, PARKING, left_parked, park, rows, running, state, wait_for

pytestmark = pytest.mark.process

WHY = ("--reason", "too large")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path, text=PARKING)
    return tmp_path


def age(directory: Path, task_id: str, *, by_s: float) -> None:
    """Let a parked task have been accepted, and be due, so many seconds earlier."""
    rows(
        directory,
        "UPDATE task SET accepted_at = accepted_at - ?1, parked_at = parked_at - ?1, "
        "pending_deadline = pending_deadline - ?1 WHERE request_id = ?2",
        *(by_s, task_id),
    )


# -- the call that parks ------------------------------------------------------------------


def test_a_call_whose_task_is_parked_says_so_and_has_not_failed(directory):
    """Exit 3: nothing on standard output, and how to look at the task beside its version and
    deadline.
    """
    with running(directory):
        called = gracekit(directory, "call", "compute", "build", "vm=v", "--id", "a b")
        again = gracekit(directory, "call", "compute", "build", "vm=v", "--id", "a b", "--json")
        (task,) = gracekit(directory, "pending", "--json").json["tasks"]

    until = task["deadline"][:19].replace("T", " ")
    assert (called.code, called.out) == (3, ""), called
    assert called.err.startswith(
        f"task 'a b' is parked: it waits for capacity until {until} UTC, as version 1. "
    )
    assert "`gracekit tasks show 'a b'`" in called.err
    assert "The same call with --id 'a b' asks for its result" in called.err
    assert "NoCapacity" not in called.err
    parked = {"task_id": "a b", "version": 1, "deadline": task["deadline"]}
    assert (again.code, again.json) == (3, {"request_id": "a b", "parked": parked}), again
    assert json.loads(again.err)["message"] == called.err.rstrip("\n")


# -- the list ---------------------------------------------------------------------------


def test_parked_tasks_are_listed_by_their_deadlines_while_no_run_lives(directory):
    """The table has what a resolver needs, and the JSON is that of version 1.1."""
    left_parked(directory, "new", "old", "late")
    age(directory, "new", by_s=10)
    age(directory, "old", by_s=250)
    age(directory, "late", by_s=3600 + 200)

    header, *lines = gracekit(directory, "pending").out.splitlines()
    listed = gracekit(directory, "pending", "--json").json
    cut = gracekit(directory, "pending", "--limit", "1")
    elsewhere = gracekit(directory, "pending", "--service", "compte")

    assert header.split() == [
        *("TASK", "METHOD", "RESOURCE", "WAITS", "DEADLINE", "V", "REQUESTED", "REASON")
    ]
    assert lines[0].split()[:4] == ["late", "build", "vm:late", "1h03m"]
    assert "  overdue 3m  1  memory_mb=8192  no host has 8192 MiB free" in lines[0]
    assert lines[1].split()[:3] == ["old", "build", "vm:old"]
    assert "  in 55m  " in lines[1]
    assert "  in 59m  " in lines[2]
    assert (listed["api_version"], listed["more"]) == ("1.0", False)
    assert [task["task_id"] for task in listed["tasks"]] == ["late", "old", "new"]
    first = listed["tasks"][0]
    assert (first["state"], first["version"], first["requested"]) == (
        *("pending", 1, {"memory_mb": 8192}),
    )
    assert first["left_s"] < 0 < first["waits_s"]
    assert cut.out.splitlines()[1:] == [
        lines[0].rstrip(),
        "there are more than 1: a larger --limit shows them",
    ]
    assert (elsewhere.code, elsewhere.out) == (4, "")
    assert "no run of service 'compte' is on record" in elsewhere.err
    assert "did you mean compute?" in elsewhere.err


def test_a_list_is_of_one_service_or_of_that_of_an_instance(directory):
    """A name of which no run is on record is refused, and so are two ways to say it."""
    with running(directory, "--instance", "api-1"):
        park(directory, "order-1")
        named = gracekit(directory, "pending", "--instance", "api-1", "--json").json
        unknown = gracekit(directory, "pending", "--instance", "api-2")
        both = gracekit(directory, "pending", "--instance", "api-1", "--service", "compute")

    assert [task["task_id"] for task in named["tasks"]] == ["order-1"]
    assert (unknown.code, both.code) == (4, 2)
    assert "no run of instance 'api-2'" in unknown.err


def test_what_a_handler_says_can_forge_no_line(directory):
    """Reasons and what was requested are escaped and cut, in each listing."""
    left_parked(
        directory, "order-1", why='"a\\n\x1b[31mforged"', zone='"b\\n\u202e' + "c" * 80 + '"'
    )

    shown = [
        gracekit(directory, *words).out
        for words in (("pending",), ("tasks",), ("tasks", "show", "order-1"))
    ]

    assert len(shown[0].splitlines()) == len(shown[1].splitlines()) == 2
    for text in shown:
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert r"a\n\x1b[31mforged" in text
    assert "c" * 40 not in shown[0]


# -- orders -----------------------------------------------------------------------------


def test_a_retry_with_another_argument_is_run_by_a_living_service(directory):
    """It is woken at once. Who changed which argument is on record; no value of the request is
    shown.
    """
    with running(directory) as run:
        park(directory, "order-1")
        answer = gracekit(
            directory, "pending", "retry", "order-1", "--set", "memory_mb=1024", "--json"
        )
        run.wait_line("built order-1 1024")
        wait_for(lambda: state(directory, "order-1") == "succeeded")
        again = gracekit(directory, "pending", "retry", "order-1")
        incidents = gracekit(directory, "incidents", "--what", "operator")
        wait_for(lambda: not rows(directory, "SELECT 1 FROM outbox"))

    assert (answer.code, answer.json["state"], answer.json["before"]) == (0, "accepted", "pending")
    assert "its arguments were not checked" not in answer.json["words"]
    assert again.code == 1
    assert "task order-1 (build) does not wait for capacity: it is succeeded" in again.err
    assert "(it was pending (no_capacity); --set memory_mb)" in incidents.out
    assert not any(CANARY in text for text in (answer.out, again.err, incidents.out))


def test_orders_about_tasks_of_a_stopped_service_are_carried_out_in_its_store(directory):
    """Each leaves a notification for any run. The next start sends them, runs what was retried, and
    calls the hook of what was given up.
    """
    left_parked(directory, "again", "large", "gone")

    replaced = gracekit(directory, "pending", "retry", "again", "--set", "memory_mb=1")
    retried = gracekit(directory, "pending", "retry", "again")
    given_up = gracekit(directory, "pending", "give-up", "large", *WHY, "--json")
    cancelled = gracekit(directory, "pending", "cancel", "gone", *WHY)
    status = gracekit(directory, "status")
    unsent = rows(directory, "SELECT owner, event_type FROM outbox")
    with running(directory) as run:
        run.wait_line("gave up large gave_up")
        wait_for(lambda: rows(directory, "SELECT 1 FROM task WHERE parkings = 2"))
        wait_for(lambda: not rows(directory, "SELECT 1 FROM outbox"))
        balanced = gracekit(directory, "status", "--json").json["accounts"]["balanced"]

    assert "no run of compute lives, and only a run can check what --set gives" in replaced.err
    assert (replaced.code, retried.code, given_up.code, cancelled.code) == (1, 0, 0, 0)
    assert "the next start runs it" in retried.out
    assert given_up.json["words"] == (
        "given up: it is errored now; the next start sends the notification"
    )
    assert (given_up.json["verb"], given_up.json["state"]) == ("give_up", "errored")
    assert ": cancelled; the next start sends the notification\n" in cancelled.out
    assert unsent == [(None, "task.update")] * 3
    assert "notifications: 3 not sent yet (oldest " in status.out
    assert [state(directory, name) for name in ("large", "gone")] == ["errored", "cancelled"]
    assert balanced


def test_the_orders_for_tasks_work_on_parked_ones(directory):
    """`gracekit tasks` retries, cancels and fails them as it does others that nobody works on."""
    left_parked(directory, "again", "gone", "wrong")

    codes = [
        gracekit(directory, "tasks", "retry", "again").code,
        gracekit(directory, "tasks", "cancel", "gone", *WHY).code,
        gracekit(directory, "tasks", "fail", "wrong", *WHY).code,
    ]

    assert codes == [0, 0, 0]
    assert [state(directory, name) for name in ("again", "gone", "wrong")] == [
        *("accepted", "cancelled", "errored")
    ]


def test_a_task_that_is_not_parked_is_refused_with_what_it_is(directory):
    """Whatever it is: at work without a row, ended, or not known."""
    with running(directory) as run:
        gracekit(directory, "call", "compute", "echo", "--id", "echo-1")
        gracekit(directory, "cast", "compute", "peek", "--id", "peek-1")
        run.wait_line("peeking")
        answers = [
            gracekit(directory, "pending", *words)
            for words in (
                ("retry", "echo-1"),
                ("give-up", "echo-1", *WHY),
                ("cancel", "peek-1", *WHY),
                ("cancel", "nobody", *WHY),
            )
        ]

    assert [answer.code for answer in answers] == [1, 1, 1, 1]
    ended = "task echo-1 (echo) does not wait for capacity: it is succeeded"
    assert ended in answers[0].err
    assert ended in answers[1].err
    assert "peek-1 (peek) does not wait for capacity: it is running" in answers[2].err
    assert "no task nobody is on record" in answers[3].err


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("vm=other", 1, "acts on vm:order-1, and these arguments name vm:other: a retry keeps"),
        ("vm=", 1, "build() needs a value for 'vm': it names the vm"),
        ("memry_mb=1", 1, "got an unexpected keyword argument 'memry_mb'; did you mean"),
        ("memory_mb", 2, "--set 'memory_mb' is not NAME=VALUE"),
        ('zone="a\\u0000"', 2, "has a NUL character"),
        ('zone={"k\\u0000": 1}', 2, "has a NUL character"),
        ('zone="\\ud800"', 2, "lone surrogate"),
        ("zone=1e999", 2, "cannot be written in JSON"),
        ("zone=" + "[" * 40 + "]" * 40, 2, "nested deeper than"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, word: str, code: int, said: str
):
    """With the reason; the task stays parked as it was, and its own arguments are never shown."""
    with running(directory):
        park(directory, "order-1")
        wait_for(lambda: not rows(directory, "SELECT 1 FROM outbox"))
        before = rows(directory, "SELECT * FROM task")
        answer = gracekit(directory, "pending", "retry", "order-1", "--set", word)

    assert (answer.code, said in answer.err) == (code, True), answer
    assert CANARY not in answer.err + answer.out
    assert rows(directory, "SELECT * FROM task") == before
    assert rows(directory, "SELECT * FROM outbox") == []


@pytest.mark.parametrize(
    ("source", "word", "said"),
    [
        ("'vm.id'", 'vm={"id": "v-2"}', "acts on vm:v-1, and these arguments name vm:v-2"),
        ("'vm.id'", "vm={}", "build() needs a value for 'vm.id': it names the vm"),
        ("'vm.id'", 'vm={"id": "v-1", "zone": "b"}', ""),
        ("'vm.id'", "memory_mb=1", ""),
        ("lambda args: args['vm']['id']", "memory_mb=1", ""),
        ("lambda args: args['vm']['id']", 'vm={"id": "v-2"}', "these arguments name vm:v-2"),
    ],
)
def test_arguments_with_the_id_of_the_resource_inside_are_compared(
    directory: Path, source: str, word: str, said: str
):
    """By a path or a function: the run that checks them has it."""
    text = PARKING.replace('resource="vm"', f'resource=("vm", {source})')
    text = text.replace("vm: str,", "vm: dict[str, str],")
    write_service(directory, text=text)

    with running(directory):
        park(directory, "order-1", vm='{"id": "v-1"}')
        answer = gracekit(directory, "pending", "retry", "order-1", "--set", word)

    assert (answer.code, said in answer.err) == (1 if said else 0, True), answer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list",), "no command 'list'; there are cancel, give-up, retry"),
        (("retri",), "no command 'retri'; did you mean retry?"),
        (("give-up", "t", "--reson", "3"), "'--reason'"),
    ],
)
def test_a_command_line_that_cannot_be_read_names_what_is_near(tmp_path: Path, words, said):
    """A typing error costs one look, not a manual."""
    answer = gracekit(tmp_path, "pending", *words)

    assert answer.code == 2
    assert said in answer.err


def test_an_ended_task_is_retried_by_another_command(directory):
    """`pending retry` is for parked tasks; the refusal names the command, and is no fatal error."""
    left_parked(directory, "order-1")
    gracekit(directory, "pending", "give-up", "order-1", *WHY)

    plain = gracekit(directory, "pending", "retry", "order-1")
    as_json = gracekit(directory, "pending", "retry", "order-1", "--json")

    assert plain.code == as_json.code == 1
    assert plain.err.endswith(". `gracekit tasks retry order-1` runs it again\n")
    assert json.loads(as_json.err)["level"] == "ERROR"


def test_an_argument_that_is_not_utf8_is_refused(directory):
    """Python keeps such bytes as half characters, which no store takes."""
    left_parked(directory, "order-1")

    answer = gracekit(directory, "pending", "retry", "order-1", "--set", "zone=\udcff")

    assert answer.code == 2
    assert state(directory, "order-1") == "pending"


def test_a_method_that_the_newest_run_does_not_serve_is_retried_unchanged_alone(directory):
    """It cannot say what the method takes, so nothing is replaced."""
    with running(directory, "--instance", "old"):
        park(directory, "order-1")
        write_service(directory, text=PARKING.replace("build", "make"))
        with running(directory, "--instance", "new"):
            replaced = gracekit(directory, "pending", "retry", "order-1", "--set", "memory_mb=1")
            plain = gracekit(directory, "pending", "retry", "order-1")

    assert (replaced.code, plain.code) == (1, 0)
    assert "method 'build' is not served" in replaced.err


def test_a_run_that_does_not_answer_checks_no_argument(directory):
    """So nothing is replaced, and the task stays parked; without --set no run is needed."""
    with running(directory) as run:
        park(directory, "order-1")
        run.process.send_signal(signal.SIGSTOP)
        replaced = gracekit(directory, "pending", "retry", "order-1", "--set", "memory_mb=1")
        before = state(directory, "order-1")
        plain = gracekit(directory, "pending", "retry", "order-1")
        run.process.send_signal(signal.SIGCONT)

    assert (replaced.code, before, plain.code) == (4, "pending", 0)
    assert "did not answer to 'retry' within 5 s: it is stopped" in replaced.err
    assert "it alone may act" not in replaced.err


def test_of_two_operators_at_once_one_alone_is_heard(directory):
    """The other is told what the task is now; there is one record and one notification."""
    left_parked(directory, "order-1")

    verbs = (("give-up", *WHY), ("cancel", *WHY), ("retry",))
    commands = [Started(directory, "pending", verb, "order-1", *more) for verb, *more in verbs]
    codes = []
    for command in commands:
        with command:
            codes.append(command.wait())

    assert sorted(codes) == [0, 1, 1]
    (events,) = rows(directory, "SELECT count(*) FROM outbox")
    (records,) = rows(directory, "SELECT count(*) FROM incident WHERE what LIKE 'operator%'")
    assert (events, records) == ((1,), (1,))


@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_command_that_is_killed_leaves_all_or_nothing(directory, phase):
    """The row, the record of the order and the notification are of one commit."""
    left_parked(directory, "order-1")

    kill = {"GRACEKIT_FAILPOINT": f"settle.{phase}", **FAILPOINTS_ON}
    died = gracekit(directory, "pending", "give-up", "order-1", *WHY, **kill)
    done = phase == "after"
    (unsent,) = rows(directory, "SELECT count(*) FROM outbox")
    (records,) = rows(directory, "SELECT count(*) FROM incident WHERE what = 'operator_give_up'")
    now = state(directory, "order-1")
    again = gracekit(directory, "pending", "give-up", "order-1", *WHY)

    assert died.code == -signal.SIGKILL
    assert (now, unsent, records) == (
        "errored" if done else "pending", (int(done),), (int(done),),
    )  # fmt: skip
    assert again.code == int(done)


def test_an_abbreviated_id_is_asked_about_as_with_other_orders(directory):
    """At a terminal a no is a no; elsewhere four characters are needed."""
    left_parked(directory, "0123456789abcdef0123456789abcdef")

    short = gracekit(directory, "pending", "give-up", "012", *WHY)
    with Started(directory, "pending", "give-up", "0123", *WHY, terminal=True) as asked:
        asked.type("n\n")
        assert asked.wait() == 1
        question = asked.rest()
    kept = state(directory, "0123456789abcdef0123456789abcdef")
    done = gracekit(directory, "pending", "give-up", "0123", *WHY)

    assert "give up 0123456789abcdef0123456789abcdef (build vm:0123" in question
    assert (short.code, kept, done.code) == (2, "pending", 0)


def test_an_end_needs_a_reason(directory):
    """It is on record, and the errored hook may tell it."""
    assert gracekit(directory, "pending", "give-up", "order-1").code == 2
    assert gracekit(directory, "pending", "cancel", "order-1", "--reason", " ").code == 2


# -- other listings ---------------------------------------------------------------------


def listed(answer: Answer) -> list[tuple[str, str]]:
    return [(task["request_id"], task["state"]) for task in answer.json["tasks"]]


def test_a_parked_task_is_pending_in_every_document(directory):
    left_parked(directory, "order-1")

    for words in ((), ("--state", "pending"), ("--state", "all")):
        answer = gracekit(directory, "tasks", *words, "--json")
        assert answer.err == ""
        assert listed(answer) == [("order-1", "pending")]
    assert answer.json["api_version"] == "1.0"
    assert answer.json["tasks"][0]["reason"] == "no_capacity"
    assert answer.json["tasks"][0]["ownerless"] is False
    assert listed(gracekit(directory, "tasks", "--state", "errored", "--json")) == []
    shown = gracekit(directory, "tasks", "show", "order-1", "--json").json["task"]
    assert (shown["state"], shown["parkings"]) == ("pending", 1)
    assert shown["requested"] == {"memory_mb": 8192}


def test_people_read_that_a_task_waits_for_capacity_and_until_when(directory):
    """It has no owner and needs none; it is not stuck, however long it waits."""
    left_parked(directory, "order-1", "late-1")
    age(directory, "order-1", by_s=250)
    age(directory, "late-1", by_s=2 * 3600)

    lines = gracekit(directory, "tasks").out.splitlines()
    by_name = {line.split()[0]: line for line in lines}
    shown = gracekit(directory, "tasks", "show", "order-1").out
    stuck = gracekit(directory, "tasks", "--stuck")

    assert "  waits for capacity, in 55m: no host has 8192 MiB free" in by_name["order-1"]
    _, _, _, now, waits, *_, owner = by_name["order-1"].split("  waits")[0].split()[:8]
    assert (now, waits[:3], owner) == ("pending", "4m1", "-")
    assert "  waits for capacity, overdue 1h00m: no host" in by_name["late-1"]
    assert "state     pending: no_capacity: no host has 8192 MiB free" in shown
    assert "waits     for capacity, in 55m, version 1: memory_mb=8192" in shown
    history = shown.partition("\nhistory\n")[2].partition("\nlast failure")[0].splitlines()
    assert [line[23:] for line in history if "parked" in line] == [
        "parked as version 1: no host has 8192 MiB free"
    ]
    assert CANARY not in shown
    assert stuck.out == "no task is stuck\n"


def test_the_status_counts_parked_tasks_and_unsent_notifications(directory):
    """Parked tasks are not without an owner: no start settles them."""
    left_parked(directory, "order-1", "order-2", "late-1")
    nothing_due = gracekit(directory, "status").out
    age(directory, "order-1", by_s=48 * 60 - 30)
    age(directory, "late-1", by_s=3600)
    rows(
        directory,
        "INSERT INTO outbox (message_id, service, event_type, priority, payload, at, expires_at) "
        "VALUES ('m', 'compute', 'task.update', 'INFO', '{}', unixepoch() - 250, 9e9)",
    )

    text = gracekit(directory, "status").out
    report = gracekit(directory, "status", "--json").json
    rows(directory, "UPDATE task SET pending_deadline = 1")
    overdue = gracekit(directory, "status").out
    retried = gracekit(directory, "pending", "retry", "late-1")

    assert "pending: 3 parked (next deadline in 59m)" in nothing_due
    assert "notifications" not in nothing_due
    assert "pending: 3 parked (next deadline in 12m, 1 overdue)" in text
    assert "notifications: 1 not sent yet (oldest 4m)" in text
    assert "without owner" not in text
    (pending,) = report["pending"]
    assert (pending["service"], pending["parked"], pending["overdue"]) == ("compute", 3, 1)
    assert report["notifications"]["unsent"] == 1
    assert (report["ownerless"], report["accounts"]["transient"]) == ({}, {"pending": 3})
    assert "pending: 3 parked (3 overdue)" in overdue
    assert "the next start runs it; its deadline is over: if it still finds no" in retried.out
