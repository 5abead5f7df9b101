"""What docs/http.md shows can be run: the endpoint in a program that serves HTTP itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import Page

PAGE = Page("http.md")


async def ask(app: Any, path: str) -> tuple[int, dict[str, Any]]:
    """What the application answers to a GET, without a server between."""
    answers: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    await app(scope, receive, send)
    body = b"".join(answer.get("body", b"") for answer in answers)
    return answers[0]["status"], json.loads(body)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `app` of the page, with its files in a directory of its own."""
    PAGE.write_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name == "app"]:
        monkeypatch.delitem(sys.modules, name)
    import app

    yield app
    del sys.modules["app"]


async def test_the_mounted_application_answers_probes(program: Any):
    """Before the Runtime is open only /livez passes; with the lifespan the service is ready."""
    app = program.make_app()
    assert (await ask(app, "/ops/livez"))[0] == 200
    assert (await ask(app, "/ops/readyz"))[0] == 503

    async with app.router.lifespan_context(app):
        assert await ask(app, "/ops/readyz") == (
            200,
            {"status": "pass", "phase": "serving", "why": []},
        )


async def test_without_a_token_file_the_listings_are_closed(program: Any):
    """The application cannot know who can reach the program."""
    app = program.make_app()
    async with app.router.lifespan_context(app):
        status, _ = await ask(app, "/ops/api/v1/status")

    assert status == 403
