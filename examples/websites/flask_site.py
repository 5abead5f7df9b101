"""A site of Flask that calls a service: `gunicorn examples.websites.flask_site:app`.

The client is made with the module, before a server forks its workers. Each worker connects at its
first request, and closes at its end.
"""

from __future__ import annotations

import os

from flask import Flask, request

from examples.websites.service import shrink, svc
from gracekit import GracekitError

app = Flask(__name__)
client = svc.sync_client(os.environ.get("QUEUES", "sqlite:///gracekit.db"))
quick = client.prepare(timeout=10, fail_fast=True)


@app.get("/thumbnails/<picture>")
def thumbnail(picture: str) -> dict[str, str]:
    """Wait for it: 200."""
    return {"file": quick.call(shrink, picture=picture, width=int(request.args["width"]))}


@app.post("/thumbnails/<picture>")
def order(picture: str) -> tuple[dict[str, str], int]:
    """Do not wait: 202, with the id of the request."""
    return {
        "request_id": client.cast(shrink, picture=picture, width=int(request.args["width"]))
    }, 202


@app.errorhandler(ValueError)
def refuse(error: ValueError) -> tuple[dict[str, str], int]:
    """What the handler raised, or `int` above."""
    return {"error": str(error)}, 400


@app.errorhandler(GracekitError)
def fail(error: GracekitError) -> tuple[dict[str, str], int]:
    """The service drains, does not answer in time, or cannot be reached."""
    return {"error": type(error).__name__}, 503
