"""Instances, and their way over the wire: what `nova.objects` and `nova.rpc` are in Nova."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import oslo_messaging
from oslo_context.context import RequestContext


@dataclass
class Instance:
    """A virtual machine; a file in the working directory stands for its row in the database."""

    uuid: str
    memory_mb: int
    vm_state: str = "building"

    def save(self, vm_state: str) -> None:
        """Write its state."""
        self.vm_state = vm_state
        Path(f"{self.uuid}.state").write_text(vm_state)


class InstanceSerializer(oslo_messaging.NoOpSerializer):
    """Instances as dictionaries with a name, as Nova's NovaObjectSerializer writes them."""

    def serialize_entity(self, context: Any, entity: Any) -> Any:
        """An instance as plain data; anything else as it is."""
        if isinstance(entity, Instance):
            return {"nova_object.name": "Instance", "nova_object.data": asdict(entity)}
        return entity

    def deserialize_entity(self, context: Any, entity: Any) -> Any:
        """The instance that such data describes; anything else as it is."""
        if isinstance(entity, dict) and entity.get("nova_object.name") == "Instance":
            return Instance(**entity["nova_object.data"])
        return entity


class RequestContextSerializer(InstanceSerializer):
    """Also the context: its class here, a dictionary on the wire."""

    def serialize_context(self, context: RequestContext) -> dict[str, Any]:
        """The context as plain data, with `request_id`, `user_id` and `project_id`."""
        ids = {"user_id": context.user_id, "project_id": context.project_id}
        return {**context.to_dict(), **ids}

    def deserialize_context(self, context: dict[str, Any]) -> RequestContext:
        """The context that such data describes."""
        return RequestContext.from_dict(context)
