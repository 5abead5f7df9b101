"""docs/coming-from.md: the task that was moved does what its original does; the names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from gracekit.config.settings import SETTINGS, variable_name
from gracekit.rpc.method_options import MethodOptions
from gracekit.testing import InMemoryService
from gracekit.testing import run as play
from tests.docs.pages import Page

PAGE = Page("coming-from.md")


@pytest.fixture
def mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's service as a module."""
    PAGE.make_importable(tmp_path, monkeypatch)
    return importlib.import_module("mail")


@pytest.mark.parametrize("failures", [0, 3, 4])
def test_the_moved_task_tries_as_often_as_the_original(mail: ModuleType, failures: int):
    """Three retries after the first try, as Celery's max_retries=3."""
    tries = 0

    async def deliver(address: str) -> str:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise ConnectionError(address)
        return f"sent to {address}"

    mail.deliver = deliver

    async def main() -> None:
        async with InMemoryService(mail.svc) as one:
            if failures <= 3:
                assert await one.call(mail.send, address="ann") == "sent to ann"
            else:
                with pytest.raises(ConnectionError):
                    await one.call(mail.send, address="ann")

    play(main())
    assert tries == min(failures + 1, 4)


def test_the_moved_task_goes_on_with_the_next_try_after_a_drain(mail: ModuleType):
    """A stop does not give it all its tries again."""
    tries: list[str] = []

    async def deliver(address: str) -> str:
        tries.append(address)
        raise ConnectionError(address)

    mail.deliver = deliver

    async def main() -> None:
        async with InMemoryService(mail.svc) as one:
            pending = one.start_call(mail.send, address="ann")
            await one.pass_time(2)
            await one.drain()
            assert len(tries) == 2
            await one.start()
            with pytest.raises(ConnectionError):
                await pending

    play(main())
    assert len(tries) == 4


def test_settings_and_options_exist():
    """Each variable and each option of a method that a table names is one of gracekit's."""
    variables = set(re.findall(r"GRACEKIT_[A-Z_]+", PAGE.text))
    options = set(re.findall(r"`(?:@svc\.rpc\()?(timeout|max_running|on_interrupt)=", PAGE.text))

    assert variables <= {variable_name(name) for name in SETTINGS}
    assert {f"{one}_s" if one == "timeout" else one for one in options} <= set(
        MethodOptions.__struct_fields__
    )
