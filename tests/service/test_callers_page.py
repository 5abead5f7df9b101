"""What docs/callers.md says can be typed, and its table agrees with the code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.rpc.call_options import CallOptions, PrepareOptions
from gracekit.testing import InMemoryService
from gracekit.testing import run as play
from tests.docs.pages import Page, run, running

PAGE = Page("callers.md")
NOT_ASYNC = ["hello.py", "script.py", "wsgi.py", "patient.py"]


def test_the_table_lists_every_option():
    """Nothing that `prepare` takes is left unsaid, and nothing is promised that it does not
    take.
    """
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.text, re.MULTILINE)

    assert listed == list(PrepareOptions.__annotations__)
    assert set(listed) == set(CallOptions.__struct_fields__)


@pytest.mark.process
def test_the_programs_of_the_page_print_what_the_page_says(tmp_path: Path):
    """A reader can copy them."""
    PAGE.write_to(tmp_path)
    programs = [program for program in PAGE.files if program not in NOT_ASYNC]

    assert [run(tmp_path, program) for program in programs] == [
        output for output in PAGE.outputs if output != printed_by_script()
    ]


def printed_by_script() -> Any:
    """What the page shows for the script."""
    below = PAGE.text.partition("\n# script.py\n")[2]
    return re.findall(r"^```text\n(.*?)^```", below, re.MULTILINE | re.DOTALL)[0]


ONE_REQUEST = """
import os, sys, wsgi

child = os.fork()  # as a server does after the import
said = []
print(said, wsgi.application({}, lambda status, _: said.append(status)), flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.process
def test_programs_that_are_not_async_call_and_end(tmp_path: Path):
    """The script, and a server that forks after it has loaded the application: nobody stops its
    client.
    """
    PAGE.write_to(tmp_path)
    (tmp_path / "one_request.py").write_text(ONE_REQUEST)
    with running(tmp_path, "-m", "gracekit", "run", "hello:svc") as service:
        service.wait_text("service.serving")

        assert run(tmp_path, "script.py") == printed_by_script()
        assert run(tmp_path, "one_request.py") == "['200 OK'] [b'Hello, Ann!\\n']\n" * 2


def test_ops_method_called_by_name_needs_the_option_to_be_answered_in_a_drain():
    """Without it the request waits on the topic for new requests until the next start."""
    svc = Service("ops")

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(20)

    @svc.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.start_call(work)
            await one.pass_time(1)
            drain = asyncio.ensure_future(one.drain())
            await one.pass_time(1)
            waits = one.start_call("ping")
            assert await one.prepare(ops=True).call("ping") == "pong"
            await drain
            assert not waits.done()
            await one.start()
            assert await waits == "pong"

    play(main())
