"""Conversations, as the official client has them: responses read them and add to them, once."""

import asyncio
from typing import Any

import openai
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.persistence import conversations
from services.gateway.persistence.budget import ByteBudget
from services.gateway.persistence.conversations import Conversations, turns_behind
from services.gateway.persistence.items import encoded
from services.gateway.persistence.store import inflated
from shared import limits
from shared.messages.records import ConversationTurn
from shared.nats.bus import Bus
from shared.nats.tenants import Quota
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, saying, silence
from tests.integration.gateway.responding import prompts, status, until_known


async def texts(client: openai.AsyncOpenAI, conversation: str) -> list[str]:
    found = [item async for item in client.conversations.items.list(conversation, order="asc", limit=2)]
    return [str(item.model_dump()["content"][0]["text"]) for item in found]


async def test_a_conversation_is_made_described_and_forgotten(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI
) -> None:
    items: Any = [{"role": "user", "content": "I am Ada."}, {"role": "assistant", "content": "Hello."}]
    made = await client.conversations.create(items=items, metadata={"topic": "names"})
    shown = await elsewhere.conversations.retrieve(made.id)
    assert (shown, shown.metadata) == (made, {"topic": "names"})
    changed = await elsewhere.conversations.update(made.id, metadata={"topic": "towns"})
    assert changed.metadata == {"topic": "towns"}
    more: Any = [{"role": "user", "content": "I live in Rome."}]
    added = await elsewhere.conversations.items.create(made.id, items=more)
    assert await texts(client, made.id) == ["I am Ada.", "Hello.", "I live in Rome."]
    (item,) = added.data
    assert item.id is not None
    found = await client.conversations.items.retrieve(item.id, conversation_id=made.id)
    assert found == item
    assert (await client.conversations.items.delete(item.id, conversation_id=made.id)).id == made.id
    assert await texts(client, made.id) == ["I am Ada.", "Hello."]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.get(f"/conversations/{made.id}/items/{item.id}?include=nonsense", cast_to=object)
    assert refused.value.param == "include"
    for wrong in (item.id, "msg_1"):
        with pytest.raises(openai.NotFoundError, match="not found in the conversation"):
            await client.conversations.items.delete(wrong, conversation_id=made.id)
        with pytest.raises(openai.NotFoundError, match="not found in the conversation"):
            await client.conversations.items.retrieve(wrong, conversation_id=made.id)
    assert (await client.conversations.delete(made.id)).deleted
    for ask in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(made.id)
        assert caught.value.code == "conversation_not_found"


async def test_responses_read_it_and_add_to_it_at_any_gateway(
    client: openai.AsyncOpenAI, elsewhere: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    made = await client.conversations.create()
    ring.behave = saying("Hello.")
    first = await client.responses.create(model=MODEL, input="I am Ada.", conversation=made.id)
    assert first.conversation.id == made.id
    ring.behave = saying("Ada.")
    stream = await elsewhere.responses.create(model=MODEL, input="Who am I?", conversation={"id": made.id}, stream=True)
    async for _ in stream:
        pass
    assert prompts(ring)[-1] == "I am Ada.\nHello.\nWho am I?\n"
    counted = await elsewhere.responses.input_tokens.count(model=MODEL, conversation=made.id, input="So?")
    assert counted.input_tokens == len("I am Ada.\nHello.\nWho am I?\nAda.\nSo?\n")
    assert await texts(client, made.id) == ["I am Ada.", "Hello.", "Who am I?", "Ada."]
    await client.responses.delete(first.id)
    assert len(await texts(client, made.id)) == 4


async def test_what_fails_or_is_cancelled_adds_nothing(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    made = await client.conversations.create()
    ring.behave = silence
    job = await client.responses.create(model=MODEL, input="a", conversation=made.id, background=True)
    assert await texts(client, made.id) == []
    await client.responses.cancel(job.id)
    await status(client, job.id, "cancelled")
    ring.behave = failing("internal_error", "broken")
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model=MODEL, input="b", conversation=made.id)
    ring.behave = saying("Hello.")
    await client.responses.create(model=MODEL, input="c", conversation=made.id)
    assert await texts(client, made.id) == ["c", "Hello."]
    assert prompts(ring)[-1] == "c\n"


async def test_many_at_once_are_all_added_each_as_a_whole(
    client: openai.AsyncOpenAI, gateway: RunningGateway, ring: FakeRing
) -> None:
    made = await client.conversations.create()
    ring.behave = saying("Yes.")
    asked = [f"Q{number}" for number in range(8)]
    await asyncio.gather(*(client.responses.create(model=MODEL, input=one, conversation=made.id) for one in asked))
    found = await texts(client, made.id)
    assert sorted(found[::2]) == asked
    assert found[1::2] == ["Yes."] * 8

    async def settled() -> bool | None:
        head = await gateway.service._backend.parts.conversations.get(made.id, "")
        return None if head.begun else True

    await until_known(settled)


async def test_a_turn_that_was_deleted_does_not_come_back(client: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
    """Two gateways may keep one response."""
    made = await client.conversations.create()
    response = await client.responses.create(model=MODEL, input="x", conversation=made.id)
    async for item in client.conversations.items.list(made.id):
        assert item.id is not None
        await client.conversations.items.delete(item.id, conversation_id=made.id)
    again = encoded([{"id": "msg_1", "type": "message"}])
    identity = response.id.removeprefix("resp_")
    await gateway.service._backend.parts.conversations.end(made.id, "", identity, again)
    assert await texts(client, made.id) == []


async def test_its_bounds_are_told(client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    many: Any = [{"role": "user", "content": "x"}] * 21
    with pytest.raises(openai.BadRequestError, match="items"):
        await client.conversations.create(items=many)
    made = await client.conversations.create(items=many[:20])
    with pytest.raises(openai.BadRequestError, match="items"):
        await client.conversations.items.create(made.id, items=[])
    bound = limits.Limit(21, "entries", "items", name="conversation_items")
    monkeypatch.setattr(limits, "CONVERSATION_ITEMS", bound)
    await client.conversations.items.create(made.id, items=many[:1])
    with pytest.raises(openai.APIStatusError, match="conversation_items"):
        await client.conversations.items.create(made.id, items=many[:1])
    with pytest.raises(openai.APIStatusError, match="conversation_items"):
        await client.responses.create(model=MODEL, input="x", conversation=made.id)


async def test_one_that_is_longer_than_the_context_is_refused_or_cut(
    client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    made = await client.conversations.create(items=[{"role": "user", "content": "x" * 140_000}])
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="Hi", conversation=made.id)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "conversation")
    await client.responses.create(model=MODEL, input="Hi", conversation=made.id, truncation="auto")
    assert prompts(ring)[-1] == "Hi\n"


# --- pages ---------------------------------------------------------------------------------------


@pytest.fixture
async def kept(bus: Bus) -> Conversations:
    shelf = Conversations(bus, 60.0, Quota(1 << 30, 10_000))
    await shelf.bucket.ensure()
    return shelf


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each turn that was inflated."""
    sizes: list[int] = []

    async def counting(data: bytes) -> bytes:
        found = await inflated(data)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(conversations, "inflated", counting)
    return sizes


def said(*names: str, size: int = 1 << 20) -> Any:
    return encoded([{"id": name, "type": "message", "text": "a" * size} for name in names])


async def test_a_page_reads_the_turns_that_it_shows_alone(kept: Conversations, read: list[int]) -> None:
    made, _ = await kept.create("t", {}, said("a0", "a1"))
    for turn in range(1, 10):
        await kept.add(made, "t", said(f"b{turn}", f"c{turn}"))
    budget = ByteBudget(limits.HISTORY_BYTES)
    page, more = await kept.page(made, "t", budget, after=None, limit=1, ascending=False)
    assert ([item.id for item in page], more, len(read)) == (["c9"], True, 1)
    assert budget.used == read[0]
    page, more = await kept.page(made, "t", budget, after="a0", limit=2, ascending=True)
    assert ([item.id for item in page], more, len(read)) == (["a1", "b1"], True, 3)
    page, more = await kept.page(made, "t", budget, after="b1", limit=9, ascending=False)
    assert ([item.id for item in page], more, len(read)) == (["a1", "a0"], False, 4)
    page, more = await kept.page(made, "t", budget, after="a0", limit=9, ascending=False)
    assert (page, more, len(read)) == ([], False, 4)


async def test_a_page_ends_before_it_is_too_large(kept: Conversations, read: list[int]) -> None:
    made, _ = await kept.create("t", {}, said("a"))
    for name in "bcde":
        await kept.add(made, "t", said(name))
    shown, after = [], None
    while True:
        budget = ByteBudget(limits.HISTORY_BYTES, 5 << 19)
        page, more = await kept.page(made, "t", budget, after=after, limit=100, ascending=True)
        shown.append("".join(item.id for item in page))
        if not more:
            break
        after = page[-1].id
    assert shown == ["ab", "cd", "e"]
    tiny = ByteBudget(limits.HISTORY_BYTES, 1)
    page, more = await kept.page(made, "t", tiny, after=None, limit=100, ascending=True)
    assert ([item.id for item in page], more) == (["a"], True)


async def test_turns_that_have_made_room_are_left_out(kept: Conversations) -> None:
    made, _ = await kept.create("t", {}, said("a", size=1))
    for name in "bc":
        await kept.add(made, "t", said(name, size=1))
    oldest = (await kept.get(made, "t")).turns[0]
    entry = await kept.bucket.get("t", f"{made.removeprefix('conv_')}-{oldest.name}")
    await kept.bucket.purge(entry.key)
    budget = ByteBudget(limits.HISTORY_BYTES)
    page, more = await kept.page(made, "t", budget, after=None, limit=1, ascending=True)
    assert ([item.id for item in page], more) == (["b"], True)
    page, more = await kept.page(made, "t", budget, after="a", limit=5, ascending=True)
    assert ([item.id for item in page], more) == (["b", "c"], False)


def test_where_a_page_begins() -> None:
    turns = [ConversationTurn("1", ["a", "b"], 9), ConversationTurn("2", [], 9), ConversationTurn("3", ["c"], 9)]
    first, _, last = turns
    assert turns_behind(turns, None, ascending=True) == [(first, 0), (last, 0)]
    assert turns_behind(turns, "a", ascending=True) == [(first, 1), (last, 0)]
    assert turns_behind(turns, "b", ascending=True) == [(last, 0)]
    assert turns_behind(turns, "b", ascending=False) == [(first, 1)]
    assert turns_behind(turns, "a", ascending=False) == []
    with pytest.raises(InvalidParameter, match="no item 'd'"):
        turns_behind(turns, "d", ascending=True)
