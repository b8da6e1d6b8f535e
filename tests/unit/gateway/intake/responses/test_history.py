"""A conversation is read as far back as it can matter, whatever its responses have kept."""

import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.gateway.intake.responses.history import History, room_of
from services.gateway.intake.responses.intake import _hopeless
from services.gateway.intake.responses.items import droppable
from services.gateway.lifecycle.answer import PREFIXES
from services.gateway.persistence.store import inflated
from shared import limits
from shared.errors import ContextLengthExceeded, PayloadTooLarge

CONTEXT = 1024
ROOM = room_of(CONTEXT)


class Lookup:
    """Responses 1 to `count`, each with one item of `size` characters that goes on with the one before."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.read = count, size, 0

    async def find(self, public_id: str, tenant: str) -> Any:
        number = int(public_id.removeprefix(PREFIXES["responses"]))
        items = msgspec.json.encode([{"id": f"i{number}", "type": "message", "text": "a" * self.size}])
        previous = str(number - 1) if number > 1 else ""
        return SimpleNamespace(
            record=SimpleNamespace(response=SimpleNamespace(items=items, previous=previous))
        )

    async def items(self, found: Any) -> Any:
        self.read += 1
        return msgspec.json.decode(found.record.response.items), {
            "status": "completed",
            "output": [],
            "id": "x",
        }

    async def refresh(self, found: Any) -> None:
        pass


async def read(lookup: Lookup, *, newest: bool) -> list[str]:
    history = History(lookup, None)  # type: ignore[arg-type]
    previous = PREFIXES["responses"] + str(lookup.count)
    return [item["id"] for item in await history.chain(previous, "t", CONTEXT, newest=newest)]


async def test_a_short_conversation_is_read_whole() -> None:
    lookup = Lookup(300, 10)
    assert await read(lookup, newest=False) == [f"i{number}" for number in range(1, 301)]


async def test_of_a_long_one_the_newest_are_read() -> None:
    lookup = Lookup(300, ROOM // 4)
    assert await read(lookup, newest=True) == ["i298", "i299", "i300"]
    assert lookup.read == 3


async def test_a_long_one_is_refused_before_it_is_read_whole() -> None:
    lookup = Lookup(300, ROOM // 4)
    with pytest.raises(ContextLengthExceeded, match="limit response_history: 64 bytes") as caught:
        await read(lookup, newest=False)
    assert caught.value.param == "previous_response_id"
    assert lookup.read == 3


@pytest.mark.parametrize("size", [1, limits.RESPONSE_BYTES.value - 1])
def test_what_was_kept_is_inflated(size: int) -> None:
    assert len(inflated(zlib.compress(bytes(size)))) == size


def test_no_more_is_inflated_than_was_ever_kept() -> None:
    with pytest.raises(PayloadTooLarge, match="limit response_bytes"):
        inflated(zlib.compress(bytes(limits.RESPONSE_BYTES.value + 1)))


def message(size: int) -> dict[str, Any]:
    return {"type": "message", "text": "a" * size}


@pytest.mark.parametrize(
    ("items", "first"),
    [
        ([message(10)] * 5, 0),
        ([message(10), message(ROOM), message(10), message(10)], 2),
        ([message(ROOM)] * 3, 2),
        ([message(ROOM), {"type": "function_call_output"}, message(10)], 2),
        ([message(1)] * (limits.MESSAGES.value + 100), 101),
    ],
)
def test_what_cannot_fit_by_its_size_is_not_tried(items: list[dict[str, Any]], first: int) -> None:
    begins = [0, *droppable(items)]
    room = 16 * ROOM if len(items) > 100 else ROOM
    assert begins[_hopeless(items, begins, room)] == first
