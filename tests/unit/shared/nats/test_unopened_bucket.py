"""A bucket that nobody has opened says so, whatever it is asked for."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client

from shared.config import CommonSettings
from shared.errors import InternalError
from shared.messages import SessionPin
from shared.messages.training import TrainingEvent
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.training import TrainingEvents


def unconnected() -> Bus:
    return Bus(Client(), CommonSettings())


async def test_events_of_jobs() -> None:
    event = TrainingEvent("job", 1, "step", "info", "Step 1", created=1.0)
    with pytest.raises(InternalError, match=r"bucket training_events .* not opened; await its ensure"):
        await TrainingEvents(unconnected()).add("tenant", event)


PIN = SessionPin("group", 1)
CALLS: dict[str, Callable[[Bucket[Any]], Awaitable[object]]] = {
    "get": lambda bucket: bucket.get("key"),
    "put": lambda bucket: bucket.put("key", PIN),
    "create": lambda bucket: bucket.create("key", PIN),
    "update": lambda bucket: bucket.update("key", PIN, 1),
    "delete": lambda bucket: bucket.delete("key"),
    "change": lambda bucket: bucket.change("key", lambda known: None),
    "items": lambda bucket: bucket.items(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call(call: str) -> None:
    bucket = Bucket(unconnected(), "pins", SessionPin)
    with pytest.raises(InternalError, match=r"bucket pins .* not opened"):
        await CALLS[call](bucket)
