"""Chat completions with `store: true`, through the official client: kept, listed, changed, deleted."""

import time

import openai
import pytest

from shared.config import CommonSettings
from shared.errors import QueueFull
from shared.limits import HISTORY_HELD
from shared.messages.records import StoredChat
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import CHATS_BUCKET
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, until
from tests.integration.gateway.responding import kept, until_known

pytestmark = pytest.mark.usefixtures("ring")

MODEL = "org/stub-model"


async def made(client: openai.AsyncOpenAI, text: str, **fields: object) -> str:
    """The id of a stored chat completion."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=3,
        store=True,
        **fields,  # type: ignore[call-overload]
    )
    return str(answer.id)


async def test_one_is_shown_changed_and_deleted(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        chat = await made(client, "Hello", metadata={"topic": "greeting"})
        shown = await client.chat.completions.retrieve(chat)
        assert (shown.id, shown.metadata) == (chat, {"topic": "greeting"})
        changed = await client.chat.completions.update(chat, metadata={"topic": "other", "more": "1"})
        assert changed.choices == shown.choices
        again = await client.chat.completions.retrieve(chat)
        assert again.metadata == {"topic": "other", "more": "1"}
        gone = await client.chat.completions.delete(chat)
        assert (gone.id, gone.deleted, gone.object) == (chat, True, "chat.completion.deleted")
        for call in (client.chat.completions.retrieve, client.chat.completions.delete):
            with pytest.raises(openai.NotFoundError) as error:
                await call(chat)
            assert error.value.code == "chat_completion_not_found"
        assert (await client.chat.completions.list()).data == []
    async with gateway.http() as http:  # nor is it there as a generation, which the journal still has
        assert (await http.get(f"/v1/generations/{chat}")).status_code == 404


async def test_lists_have_pages_and_are_chosen_by_model_and_metadata(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        ids = [await made(client, str(number), metadata={"odd": str(number % 2)}) for number in range(5)]
        await client.chat.completions.create(  # not asked to be stored
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3
        )

        async def all_kept() -> bool | None:  # each is once its answer has been sent
            return [chat.id async for chat in client.chat.completions.list(limit=2)] == ids or None

        await until_known(all_kept)
        page = await client.chat.completions.list(order="desc", limit=3)
        assert ([chat.id for chat in page.data], page.has_more) == (ids[:1:-1], True)
        odd = await client.chat.completions.list(metadata={"odd": "1"}, model=MODEL)
        assert [chat.id for chat in odd.data] == ids[1::2]
        assert (await client.chat.completions.list(model="other")).data == []
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.list(after="chatcmpl-nothing")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.list(limit=1000)


async def test_a_page_ends_before_it_is_too_large(nats_settings: CommonSettings, gateway: RunningGateway) -> None:
    async with run_gateway(nats_settings, history_bytes=1500) as small, small.openai() as client:
        ids = [await made(client, str(number)) for number in range(5)]

        async def all_there() -> bool | None:
            async with gateway.openai() as elsewhere:
                return len((await elsewhere.chat.completions.list()).data) == 5 or None

        await until_known(all_there)
        page = await client.chat.completions.list(order="asc")
        assert 1 <= len(page.data) < 5
        assert page.has_more
        listed = [chat.id async for chat in client.chat.completions.list(order="asc")]
        assert listed == ids


async def test_what_is_read_counts_among_what_the_gateway_holds(gateway: RunningGateway) -> None:
    """Of whatever is stored, decompressed, and before it is."""
    pool = gateway.service._backend.parts.intake.processor.stored.pool
    async with gateway.openai() as client, gateway.http() as http:
        chat = await made(client, "Hello")
        response = (await client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)).id
        await kept(gateway, response)
        await client.chat.completions.retrieve(chat)
        paths = [
            "/v1/chat/completions",
            f"/v1/chat/completions/{chat}",
            f"/v1/chat/completions/{chat}/messages",
            f"/v1/responses/{response}",
            f"/v1/responses/{response}?stream=true",
            f"/v1/responses/{response}/input_items",
        ]
        pool.take("other", HISTORY_HELD.value)
        for path in paths:
            refused = await http.get(path)
            assert refused.status_code == 429, path
            assert "limit history_held" in refused.json()["error"]["message"]
        pool.give_back("other", HISTORY_HELD.value)
        for path in paths:
            assert (await http.get(path)).status_code == 200
    pool.take("other", HISTORY_HELD.value)  # all has been given back: nothing else is beside it
    with pytest.raises(QueueFull, match=f"other requests hold {HISTORY_HELD.value:,}"):
        pool.take("", 1)


async def test_its_messages_are_what_the_request_said(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]},
            ],
            max_tokens=3,
            store=True,
        )
        messages = await client.chat.completions.messages.list(answer.id)
        assert [(one.id, str(one.role), one.content) for one in messages.data] == [
            (f"{answer.id}-0", "system", "Be short."),
            (f"{answer.id}-1", "user", "Hello, you"),
        ]
        assert messages.data[0].content_parts is None
        parts = [part.model_dump(exclude_unset=True) for part in messages.data[1].content_parts or []]
        assert parts == [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
        last = await client.chat.completions.messages.list(answer.id, order="desc", limit=1)
        assert [one.id for one in last.data] == [f"{answer.id}-1"]


async def test_it_is_kept_by_whoever_is_there_and_outlives_its_gateway(
    nats_settings: CommonSettings, bus: Bus, ring: FakeRing
) -> None:
    async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
        chat = await made(client, "Hello", n=2)
    entries = await Bucket.open(bus, CHATS_BUCKET, StoredChat)

    async def kept() -> bool | None:
        return len(await entries.items()) == 1 or None

    await until_known(kept)
    async with run_gateway(nats_settings) as other, other.openai() as client:
        await until(lambda: bool(other.service.work.catalog.listed()))
        shown = await client.chat.completions.retrieve(chat)
        assert len(shown.choices) == 2
        await client.chat.completions.delete(chat)
    assert await entries.items() == {}


async def test_an_heir_keeps_what_had_ended(gateway: RunningGateway, nats_settings: CommonSettings) -> None:
    """Its gateway was lost between the answer's end and the store: no client asks for it by its id."""
    async with run_gateway(nats_settings) as lost:
        answers, heirs = lost.service.work.answers, gateway.service.work.heirs
        answers._keep = lambda answer: None  # type: ignore[method-assign]
        async with lost.openai() as client:
            chat = await made(client, "Hello")
        await heirs._try_to_inherit(lost.service.instance, time.time() + 1)
        async with gateway.openai() as client:

            async def listed() -> bool | None:
                return [one.id for one in (await client.chat.completions.list()).data] == [chat] or None

            await until_known(listed)


async def test_an_answer_without_store_or_of_another_kind_is_not_there(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        plain = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3
        )
        completion = await client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        for identity in (plain.id, completion.id, "chatcmpl-nothing", "x"):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.retrieve(identity)
    async with gateway.http() as http:
        answer = await http.get("/v1/chat/completions", params={"metadata": "x"})
        assert answer.json()["error"]["code"] == "unknown_parameter"
        answer = await http.post(f"/v1/chat/completions/{plain.id}", json={"metadata": {"x" * 65: "y"}})
        assert answer.json()["error"]["param"] == "metadata"
