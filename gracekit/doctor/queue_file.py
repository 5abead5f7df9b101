"""Checks of the transport's file: waiting messages, and foreign readers of our queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gracekit.clock import age_s
from gracekit.config.settings import Settings
from gracekit.config.values import duration
from gracekit.doctor.finding import Finding, fail, ok, skip, warn
from gracekit.doctor.store_file import ReadOnlyDatabase
from gracekit.doctor.store_runs import Runs
from gracekit.process import Process
from gracekit.rpc.foreign_readers import (
    FOREIGN_REMEDY,
    SHARE_REMEDY,
    QueueReader,
    foreign_seen,
    need_one_store,
)
from gracekit.rpc.sqlite import sqlite_rows as rows
from gracekit.rpc.transport import announced_queues
from gracekit.service import Service
from gracekit.store.location import StoreLocation
from gracekit.store.wakeup import wakeups_directory

SHOWN: Final = 5


def check_waiting(look: ReadOnlyDatabase) -> Finding:
    """Report the messages that no consumer has taken."""
    now = time.time()
    listed = ", ".join(
        f"{number!s} in {queue!s} (oldest {duration(age_s(now, float(str(sent_at))))})"
        for queue, number, sent_at in look.read(rows.WAITING)[:SHOWN]
    )
    return ok("waiting", listed or "no message waits")


def check_dead_letters(look: ReadOnlyDatabase) -> Finding:
    """Report messages that no consumer could process."""
    ((number,),) = look.read("SELECT count(*) FROM dead_letter")
    if not number:
        return ok("dead letters", "none")
    ((queue, reason),) = look.read(
        "SELECT queue, reason FROM dead_letter ORDER BY dead_letter_id DESC LIMIT 1"
    )
    return warn(
        "dead letters",
        f"{number!s} kept aside, the last from {queue!s}: {reason!s}",
        "find their senders; they are in table dead_letter for 7 days, and at most 1,000 of them",
    )


def check_readers(
    settings: Settings,
    look: ReadOnlyDatabase,
    store: str | None,
    runs: Runs,
    service: Service | None,
) -> Finding:
    """Check for living readers of our shared queues that use another store."""
    queues = _announced(settings, runs, service)
    if not queues:
        return skip("foreign readers", "no queue is known to be ours", "name the MODULE:ATTR")
    foreign = [one for one in living_readers(look) if one.queue in queues and one.store != store]
    return judge(settings, foreign, sorted(queues), service)


def living_readers(look: ReadOnlyDatabase) -> list[QueueReader]:
    """The readers of all shared queues that are not proven dead, with their stores."""
    found, directory = map(rows.reader_of, look.read(rows.READERS)), wakeups_directory(look.path)
    process = Process()
    return [one for one, peer in found if not process.judge(peer.life, directory).is_dead]


def _announced(settings: Settings, runs: Runs, service: Service | None) -> set[str]:
    if service is None:
        return runs.topics
    ops_topic, queues = settings.ops_topic_of(service.topic), service.queues
    found = announced_queues(service.topic, ops_topic, settings.host, queues=queues)
    return {queue.name for queue in found}


def judge(
    settings: Settings,
    foreign: Sequence[QueueReader],
    queues: Sequence[str],
    service: Service | None,
) -> Finding:
    """The finding about *foreign* readers of our shared *queues*: whether they do harm."""
    check = "foreign readers"
    if not foreign:
        return ok(check, f"no reader of {', '.join(queues)} uses another store")
    methods = ["methods that are 'error' or 'probe' or name a resource"]
    if service is not None:
        methods = need_one_store(service.methods)
        if not methods:
            seen = "another store shares the queue, and no method here needs a single store"
            return ok(check, seen)
    seen = foreign_seen(foreign, StoreLocation(settings).url, methods)
    if settings.accept_unshared_store:
        return warn(
            check,
            f"{seen}; accept_unshared_store = true",
            "if workers with other stores are meant to run, there is nothing to do; otherwise "
            f"{SHARE_REMEDY}",
        )
    if service is None:
        return warn(
            check, seen, f"name the MODULE:ATTR, so that it can be judged; {FOREIGN_REMEDY}"
        )
    return fail(check, seen, FOREIGN_REMEDY)
