"""What a client sees when nothing is up yet, or everything is full: its answer, or when to come again.

A real gateway and a real scheduler; only the ring is played.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest, GroupLoad, ModelCard, Refusal, TokenEntry, TokenFrame
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import stub_card
from tests.integration.scheduler.cluster_fixture import MODEL, House, Leader

COMPLETIONS = "/v1/completions"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 2} | changes


@contextlib.asynccontextmanager
async def client(house: House, nats: CommonSettings, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway that knows the model."""
    cards = await Bucket.open(house.bus, subjects.MODELS_BUCKET, ModelCard)
    await cards.put(MODEL, stub_card(MODEL))
    async with run_gateway(nats, **settings) as gateway, gateway.http() as http:
        yield http


async def answer(house: House, leader: Leader, request: GenerationRequest) -> None:
    tokens = list(b"ok")
    entry = TokenEntry(request.generation_id, request.attempt, 0, tokens, finish="length")
    frame = TokenFrame(leader.name, leader.epoch, 1, [entry])
    await house.bus.publish(subjects.tokens(request.consumer), frame)


async def test_requests_wait_for_the_first_ring_and_are_answered_when_it_arrives(
    house: House, nats_settings: CommonSettings
) -> None:
    async with house.scheduler() as service, client(house, nats_settings) as http:
        asked = [asyncio.create_task(http.post(COMPLETIONS, json=body())) for _ in range(5)]
        await house.until_lanes(service._metrics.received, {"interactive": 5})
        leader = await house.leader()
        await house.until(lambda: len(leader.requests) == 5)
        for request in leader.requests:
            await answer(house, leader, request)
        for each in await asyncio.gather(*asked):
            assert (each.status_code, each.json()["choices"][0]["text"]) == (200, "ok")


async def test_past_the_deadline_it_is_503_without_a_ring_and_504_with_a_full_one(
    house: House, nats_settings: CommonSettings
) -> None:
    async with house.scheduler(), client(house, nats_settings, token_timeout=0.5) as http:
        nobody = await http.post(COMPLETIONS, json=body())
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_group_available")
        assert int(nobody.headers["retry-after"]) >= 1

        leader = await house.leader()
        leader.refuse = lambda request: Refusal(request.generation_id, "queue_full", "Full.")
        await leader.record("busy")
        late = await http.post(COMPLETIONS, json=body())
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert int(late.headers["retry-after"]) >= 1


async def test_past_the_bound_it_is_429_and_those_that_waited_are_answered(
    house: House, nats_settings: CommonSettings
) -> None:
    async with house.scheduler(max_waiting=2) as service, client(house, nats_settings) as http:
        asked = [asyncio.create_task(http.post(COMPLETIONS, json=body())) for _ in range(2)]
        await house.until_lanes(service._metrics.received, {"interactive": 2})
        refused = await http.post(COMPLETIONS, json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        leader = await house.leader()
        await house.until(lambda: len(leader.requests) == 2)
        for request in leader.requests:
            await answer(house, leader, request)
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200, 200]


async def test_a_full_ring_is_asked_again_until_it_has_room(house: House) -> None:
    """No record and no reply to a request says so: the scheduler asks."""
    leader = await house.leader()
    leader.load = GroupLoad(running=4, waiting=8, free_blocks=9, total_blocks=10, slots=4)
    await leader.record("busy")
    async with house.scheduler():
        await house.ask("a")
        await house.until(lambda: leader.batches.count(0) >= 3)
        assert leader.requests == []
        leader.load = GroupLoad(running=4, waiting=0, free_blocks=9, total_blocks=10, slots=4)
        await house.until(lambda: leader.ids == ["a"])
        await house.until_settled()


@pytest.mark.parametrize(("load", "sent"), [(GroupLoad(waiting=1, slots=8), 0), (GroupLoad(slots=8), 6)])
async def test_batch_work_fills_idle_places_only(house: House, load: GroupLoad, sent: int) -> None:
    leader = await house.leader()
    leader.load = load
    leader.hold = asyncio.Event() if sent else None
    await leader.record("busy")
    async with house.scheduler(dispatch_timeout=30) as service:
        for index in range(10):
            await house.ask(f"b{index}", lane="batch")
        await house.until_lanes(service._metrics.received, {"batch": 10})
        await house.ask("i")
        if leader.hold is not None:
            group = service._table.get("g")
            async with asyncio.timeout(10):
                while group.sent_requests < sent + 1:
                    await house.bus.flush()
            assert group.sent_requests == sent + 1, "the interactive one finds a place all the same"
            leader.hold.set()
        await house.until(lambda: "i" in leader.ids)
        assert len(leader.ids) >= 1
        if not sent:
            assert leader.ids == ["i"]
        leader.load = GroupLoad(slots=8)
        await house.until(lambda: len(leader.ids) == 11)
        await house.until_settled()
