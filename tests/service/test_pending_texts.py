"""What a resolver is told about arguments of the task API that cannot be."""

from __future__ import annotations

import pytest

from gracekit import Service
from gracekit.testing import InMemoryService
from tests.testing.virtual import virtual


@pytest.mark.parametrize(
    ("verb", "given", "told"),
    [
        ("retry", {"version": "1"}, "version = '1' must be a whole number of at least 1"),
        ("retry", {"version": True}, "version = True must be a whole number of at least 1"),
        ("retry", {"version": 0}, "version = 0 must be a whole number of at least 1"),
        ("cancel", {"version": 1, "reason": 5}, "reason = 5 must be a text"),
        ("retry", {"version": 1, "args": [1]}, "args = [1] must be an object, or left out"),
    ],
)
@virtual
async def test_a_refusal_shows_the_value_with_its_type(
    verb: str, given: dict[str, object], told: str
):
    """A number that was sent as a text is seen to be one."""
    async with InMemoryService(Service("scheduler", task_api=True)) as one:
        tasks = one.prepare(ops=True, namespace="gracekit.tasks", version="1.1")
        with pytest.raises(TypeError) as caught:
            await tasks.call(verb, task_id="t", **given)

    assert str(caught.value) == told
