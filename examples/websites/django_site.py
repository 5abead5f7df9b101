"""A site of Django that calls a service: `gunicorn examples.websites.django_site:application`.

In one file, to be read at once. In yours the client stands in a module beside the views.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from examples.websites.service import shrink, svc
from gracekit import GracekitError

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    MIDDLEWARE=["examples.websites.django_site.errors"],
    ROOT_URLCONF="examples.websites.django_site",
    SECRET_KEY="of this example",  # noqa: S106 - it signs nothing
)
client = svc.sync_client(os.environ.get("QUEUES", "sqlite:///gracekit.db"))
quick = client.prepare(timeout=10, fail_fast=True)


def thumbnail(request: HttpRequest, picture: str) -> HttpResponse:
    """GET waits for it: 200; POST does not: 202, with the id of the request."""
    width = int(request.GET["width"])
    if request.method == "POST":
        made = {"request_id": client.cast(shrink, picture=picture, width=width)}
        return JsonResponse(made, status=202)
    return JsonResponse({"file": quick.call(shrink, picture=picture, width=width)})


def errors(respond: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """A middleware that answers for errors of the handler (400) and of the service (503)."""

    class Errors:
        def __call__(self, request: HttpRequest) -> HttpResponse:
            return respond(request)

        def process_exception(self, _: HttpRequest, error: Exception) -> HttpResponse | None:
            if isinstance(error, ValueError):
                return JsonResponse({"error": str(error)}, status=400)
            if isinstance(error, GracekitError):
                return JsonResponse({"error": type(error).__name__}, status=503)
            return None

    return Errors()


urlpatterns = [path("thumbnails/<picture>", thumbnail)]
application = get_wsgi_application()
