"""A conversation is read as far back as it can matter, whatever its responses have kept."""

import threading
import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.responses.conversation.history import History, room_of
from services.gateway.dialects.responses.conversation.items import Reference, chat_messages, droppable
from services.gateway.dialects.responses.endpoint import _hopeless
from services.gateway.lifecycle.request_state import PREFIXES
from services.gateway.persistence.budget import LARGE, ByteBudget, HistoryBudget, history_pool
from services.gateway.persistence.items import ResponseTurn, split, turn_of
from services.gateway.persistence.responses import StoredTurns
from services.gateway.persistence.store import inflated
from shared import limits
from shared.errors import ContextLengthExceeded, PayloadTooLarge, QueueFull

CONTEXT = 1024
ROOM = room_of(CONTEXT)


class Lookup:
    """Responses 1 to `count`, each with one item of `size` characters that goes on with the one before."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.read = count, size, 0

    async def find(self, public_id: str, tenant: str, reads: ByteBudget) -> Any:
        number = int(public_id.removeprefix(PREFIXES["responses"]))
        items = msgspec.json.encode([{"id": f"i{number}", "type": "message", "text": "a" * self.size}])
        previous = str(number - 1) if number > 1 else ""
        return SimpleNamespace(record=SimpleNamespace(response=SimpleNamespace(items=items, previous=previous)))

    async def turn(self, found: Any) -> ResponseTurn:
        self.read += 1
        return turn_of(found.record.response.items, b'{"status":"completed","output":[],"id":"x"}')

    async def refresh(self, found: Any) -> None:
        pass


MOST = 64 << 20


def stored(responses: Any, most: int, held: int = MOST) -> StoredTurns:
    return StoredTurns(responses, None, most, history_pool(held))  # type: ignore[arg-type]


async def read(lookup: Lookup, *, newest: bool, most: int = MOST) -> list[str]:
    turns = stored(lookup, most)
    previous = PREFIXES["responses"] + str(lookup.count)
    items = await History(turns).chain(previous, "t", CONTEXT, turns.budget("t"), newest=newest)
    return [item["id"] for item in items]


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


async def test_the_requests_own_bytes_bound_a_conversation_too() -> None:
    lookup = Lookup(300, 1000)
    assert await read(lookup, newest=True, most=3200) == ["i298", "i299", "i300"]
    with pytest.raises(ContextLengthExceeded, match="limit history_bytes: 3,200 bytes"):
        await read(lookup, newest=False, most=3200)


# --- items by their id ---------------------------------------------------------------------------


class Shelf:
    """Every response has one item of `text`, in two parts; which of them were read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.read: list[str] = []

    async def find(self, public_id: str, tenant: str, reads: ByteBudget) -> str:
        self.read.append(public_id)
        return public_id

    def json(self, identity: object) -> bytes:
        parts = [{"type": "input_text", "text": self.text}] * 2
        item = {"id": f"msg_{identity:0>32}_in_0", "type": "message", "role": "user", "content": parts}
        return msgspec.json.encode(item)

    async def turn(self, found: str) -> ResponseTurn:
        item = self.json(found.removeprefix(PREFIXES["responses"]))
        return ResponseTurn(found, "completed", split(b"[" + item + b"]"))


def references(count: int, responses: int = 1) -> list[Any]:
    return [Reference(f"input[{number}].id", f"msg_{number % responses:032x}_in_0") for number in range(count)]


async def resolved(shelf: Shelf, given: list[Any], most: int = 10_000) -> list[dict[str, Any]]:
    turns = stored(shelf, most)
    return await History(turns).resolve(given, "t", turns.budget("t"))


async def test_each_use_of_an_item_is_counted() -> None:
    found = await resolved(Shelf("a" * 400), references(8))
    assert [item["id"] for item in found] == [f"msg_{0:032x}_in_0"] * 8
    with pytest.raises(PayloadTooLarge, match=r"limit history_bytes: 10,000 bytes, RYZANSTEIN_HISTORY_BYTES") as caught:
        await resolved(Shelf("a" * 400), references(12))
    assert caught.value.param == "input"


async def test_no_more_responses_are_read_than_may_be_used() -> None:
    shelf = Shelf("a" * 400)
    with pytest.raises(PayloadTooLarge):
        await resolved(shelf, references(1000, responses=1000))
    assert len(shelf.read) == 11


async def test_references_go_to_a_bounded_number_of_responses() -> None:
    many, shelf = limits.RESPONSE_CHAIN.value + 1, Shelf("")
    with pytest.raises(InvalidParameter, match="limit response_chain") as caught:
        await resolved(shelf, references(many, responses=many), most=MOST)
    assert (caught.value.param, shelf.read) == ("input", [])


async def test_what_requests_hold_at_a_time_is_bounded_for_each_tenant_and_for_all() -> None:
    text = Shelf("a" * 400)
    size = len(text.json(0))
    turns = stored(text, 10_000, 12 * size)
    history = History(turns)

    async def asked(tenant: str, count: int) -> HistoryBudget:
        budget = turns.budget(tenant)
        await history.resolve(references(count), tenant, budget)
        return budget

    first = await asked("a", 3)
    with pytest.raises(QueueFull, match=r"your other requests hold.*limit history_held") as caught:
        await asked("a", 1)
    assert caught.value.retry_after == 1
    alone = await asked("b", 8)  # more than a tenant's quarter, and nothing beside it
    with pytest.raises(QueueFull, match=r"other requests hold.*limit history_held"):
        await asked("c", 2)
    await asked("d", 1)
    for budget in (first, alone):
        with budget:
            pass
    await asked("a", 3)


async def test_an_item_that_is_used_many_times_is_one_text() -> None:
    items = await resolved(Shelf("a" * 400), references(8))
    texts = {id(message["content"]) for message in chat_messages(items, None)}
    assert len(texts) == 1


# --- what was kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, LARGE, LARGE + 1, limits.RESPONSE_BYTES.value])
async def test_what_was_kept_is_inflated(size: int) -> None:
    assert len(await inflated(zlib.compress(bytes(size)))) == size


async def test_no_more_is_inflated_than_was_ever_kept() -> None:
    with pytest.raises(PayloadTooLarge, match="limit response_bytes"):
        await inflated(zlib.compress(bytes(limits.RESPONSE_BYTES.value + 1)))


async def test_little_that_becomes_much_is_inflated_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    inflating = zlib.decompressobj
    threads: dict[int, int] = {}

    class Inflater:
        def __init__(self) -> None:
            self._inner = inflating()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            found: bytes = self._inner.decompress(data, most)
            threads[threading.get_ident()] = len(found)
            return found

    monkeypatch.setattr(zlib, "decompressobj", Inflater)
    await inflated(zlib.compress(bytes(4 << 20)))
    assert threads.pop(threading.get_ident()) == LARGE
    assert [*threads.values()] == [(4 << 20) - LARGE]


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
