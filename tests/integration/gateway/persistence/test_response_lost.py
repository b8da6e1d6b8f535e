"""A gateway is killed: its responses go on elsewhere, event by event, and are kept all the same."""

import asyncio
import json
import signal
import time
from typing import Any

import httpx
import msgspec
import pytest

from shared.config import CommonSettings
from shared.messages import TokenFrame
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until
from tests.integration.gateway.lifecycle.test_gateway_lost import Lost, doomed, mourn, read_until_killed, recorded
from tests.integration.gateway.responding import drop_journal, kept, prompts, text_of
from tests.integration.gateway.resuming import Event, Paced, read_events

__all__ = ["doomed"]

RESPONSES = "/v1/responses"
TEXT = "Ein Strom ist ein Log, und die Antwort auch: \u00e4\u00f6\u00fc."
BODY = {"model": MODEL, "input": "Hi", "stream": True}


def deltas(events: list[Event]) -> str:
    shown = [json.loads(data) for data, _ in events]
    return "".join(event["delta"] for event in shown if event["type"] == "response.output_text.delta")


async def rest_of(gateway: RunningGateway, identity: str, after: str) -> list[Event]:
    """As OpenAI has it, and by this server's own way: the same."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (f"{RESPONSES}/{identity}", {"params": {"stream": "true", "starting_after": after}}),
        (f"/v1/generations/{identity}/stream", {"headers": {"Last-Event-ID": after}}),
    ]

    async def read(http: httpx.AsyncClient, path: str, how: dict[str, Any]) -> list[Event]:
        async with http.stream("GET", path, **how) as answer:
            assert answer.status_code == 200, await answer.aread()
            return await read_events(answer)

    async with gateway.http() as http:
        one, other = await asyncio.gather(*(read(http, path, how) for path, how in ways))
    assert one == other
    return one


def identity_of(events: list[Event]) -> str:
    return str(json.loads(events[0][0])["response"]["id"])


@pytest.mark.slow
async def test_streams_go_on_at_any_event(doomed: Lost, gateway: RunningGateway, ring: FakeRing) -> None:
    """The ring is lost as well."""
    ring.behave = Paced(TEXT.encode("latin-1"), 14)
    streams: list[list[Event]] = [[] for _ in range(6)]
    bodies = [BODY | {"background": number % 2 == 0} for number in range(6)]
    readers = [
        asyncio.create_task(read_until_killed(doomed.http, body, events, RESPONSES))
        for body, events in zip(bodies, streams, strict=True)
    ]
    await until(lambda: all(len(deltas(events)) == 14 for events in streams))
    await doomed.kill()
    await asyncio.gather(*readers)
    await ring.die()
    ring.behave = Paced(TEXT.encode("latin-1"), 1000)
    ring.resume()
    for number, events in enumerate(streams):
        cut = events[: len(events) - number]
        rest = await rest_of(gateway, identity_of(events), cut[-1][1])
        assert deltas(cut + rest) == TEXT
        assert rest[: len(events) - len(cut)] == events[len(cut) :]
        assert [int(identity) for _, identity in cut + rest] == list(range(len(cut + rest)))
        last = json.loads(rest[-1][0])
        assert last["type"] == "response.completed"
    await kept(gateway, identity_of(streams[0]))


async def test_a_background_response_is_driven_to_its_end_and_kept(
    doomed: Lost, bus: Bus, gateway: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT.encode("latin-1"), 5)
    sent = {"model": MODEL, "input": "Hi", "background": True}
    made = (await doomed.http.post(RESPONSES, json=sent)).json()
    assert made["status"] == "queued"
    await until(lambda: ring.requests)
    await doomed.kill()
    await mourn(bus, "doomed")
    paced.allow()
    await kept(gateway, made["id"])
    await drop_journal(bus)
    async with gateway.http() as http:
        shown = (await http.get(f"{RESPONSES}/{made['id']}")).json()
    assert (shown["status"], shown["output"][0]["content"][0]["text"]) == ("completed", TEXT)
    assert not ring.commanded


async def going(lost: str, records: list[GenerationRecord]) -> list[GenerationRecord]:
    """Of none the end is known yet."""
    return records


@pytest.mark.parametrize("late", [False, True])
async def test_an_heir_keeps_what_had_ended(gateway: RunningGateway, nats_settings: CommonSettings, late: bool) -> None:
    """Its gateway was lost between the response's end and the store. `late`: the end comes into the journal when the
    heir has read there what goes on."""
    async with run_gateway(nats_settings) as lost:
        answers, heirs = lost.service.work.answers, gateway.service.work.heirs
        answers._keep = lambda answer: None  # type: ignore[method-assign]
        async with lost.http() as http:
            made = (await http.post(RESPONSES, json={"model": MODEL, "input": "Hi"})).json()
        if late:
            heirs._going = going  # type: ignore[method-assign]
        await heirs._try_to_inherit(lost.service.instance, time.time() + 1)
        stored = await kept(gateway, made["id"])
    assert json.loads(stored.response) == made


@pytest.mark.parametrize("stream", [False, True])
async def test_an_heir_adds_to_a_conversation_what_had_ended(
    doomed: Lost, bus: Bus, gateway: RunningGateway, ring: FakeRing, stream: bool
) -> None:
    """Its gateway is killed between the response's end, which is in the log, and the conversation's turn: it is
    stopped before the end comes, and never goes on."""
    ring.behave = paced = Paced(b"Ada.", 4)
    async with gateway.openai() as client:
        made = await client.conversations.create(items=[{"role": "user", "content": "I am Ada."}])
        sent = {"model": MODEL, "input": "Who am I?", "conversation": made.id, "stream": stream}
        events: list[Event] = []
        reader = asyncio.create_task(read_until_killed(doomed.http, sent, events, RESPONSES))
        if stream:
            await until(lambda: deltas(events) == "Ada.")
        else:
            await until(lambda: ring.requests)
            await recorded(gateway, "doomed")
        doomed.process.process.send_signal(signal.SIGSTOP)
        paced.allow()

        async def has_ended() -> bool:
            last = await bus.jetstream().get_last_msg(subjects.JOURNAL_STREAM, subjects.tokens("doomed"))
            frame = msgspec.msgpack.decode(last.data or b"", type=TokenFrame)
            return frame.entries[-1].finish == "stop"

        await until(lambda: ring.answered)
        await until(has_ended)
        await doomed.kill()
        await reader
        conversations = gateway.service._backend.parts.conversations
        assert len((await conversations.get(made.id, "")).begun) == 1
        await mourn(bus, "doomed")

        async def settled() -> bool:
            return not (await conversations.get(made.id, "")).begun

        await until(settled)
        listed = [item async for item in client.conversations.items.list(made.id, order="asc")]
        said = [item.model_dump()["content"][0]["text"] for item in listed]
        assert said == ["I am Ada.", "Who am I?", "Ada."]
        await client.responses.create(model=MODEL, input="Sure?", conversation=made.id)
    assert prompts(ring) == ["I am Ada.\nWho am I?\n", "I am Ada.\nWho am I?\nAda.\nSure?\n"]


async def test_a_gateway_that_ends_says_where_to_go_on(
    nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(b"Hello.", 2)
    async with (
        run_gateway(nats_settings, drain_timeout=0.1) as ending,
        ending.openai() as client,
        gateway.openai() as elsewhere,
    ):
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if text_of(events) == "He":
                ending.service.end()
        *before, last = events
        assert last.type == "error"
        assert (last.code, last.param) == ("unavailable", None)
        assert "shutting down" in last.message
        assert last.sequence_number == before[-1].sequence_number
        assert before[0].type == "response.created"
        paced.allow()
        rest = await elsewhere.responses.retrieve(
            before[0].response.id, stream=True, starting_after=last.sequence_number
        )
        whole = before + [event async for event in rest]
    assert (text_of(whole), whole[-1].type) == ("Hello.", "response.completed")
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
