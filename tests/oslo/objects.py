"""Objects as arguments, as in nova: a class, its serializer, an endpoint, and its service.

    gracekit run tests.oslo.objects:svc

What a request does to the world is a line in the effects file of the process tests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)

import oslo_messaging  # noqa: E402

from gracekit import Service, current  # noqa: E402
from gracekit.rpc.oslo_adapter import include_endpoints  # noqa: E402
from tests.process.served import GO, effect  # noqa: E402

NAME: Final = "nova_object.name"
DATA: Final = "nova_object.data"
VERSION: Final = "nova_object.version"


class Instance:
    """An object with versions."""

    uuid: str

    def __init__(self, uuid: str, version: str = "1.0") -> None:
        self.uuid = uuid
        self.version = version


class Objects(oslo_messaging.NoOpSerializer):
    """Turns objects into plain data and back, and changes what it reads, as oslo's own does."""

    def serialize_entity(self, ctxt: Any, entity: Any) -> Any:
        if not isinstance(entity, Instance):
            return entity
        return {NAME: "Instance", VERSION: entity.version, DATA: {"uuid": entity.uuid}}

    def deserialize_entity(self, ctxt: Any, entity: Any) -> Any:
        if not isinstance(entity, dict) or NAME not in entity:
            return entity
        version = entity.pop(VERSION)
        if version != "1.0":
            raise ValueError(f"{entity[NAME]} version {version} is not supported")
        return Instance(**entity[DATA])


def meant(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command, in which `{"an_instance": {...}}` stands for an object."""
    return {
        name: Instance(**value["an_instance"])
        if isinstance(value, dict) and "an_instance" in value
        else value
        for name, value in args.items()
    }


class Compute:
    """Works on instances."""

    def build(self, ctxt: Any, instance: Instance, key: str) -> str:
        """Take effect when the test says so."""
        effect("start", key, current().fence)
        while not GO.exists():
            time.sleep(0.02)
        effect("done", key)
        return instance.uuid

    def reboot(self, ctxt: Any, instance: Instance, key: str) -> str:
        """Take effect at once."""
        effect("start", key, current().fence)
        effect("done", key)
        return instance.uuid


INSTANCE: Final = ("instance", "instance.uuid")
OPTIONS: Final = {
    "build": {"resource": INSTANCE, "on_interrupt": "retry"},
    "reboot": {"resource": ("instance", lambda args: args["instance"].uuid)},
}

svc = Service("compute")
include_endpoints(svc, [Compute()], serializer=Objects(), options=OPTIONS)
