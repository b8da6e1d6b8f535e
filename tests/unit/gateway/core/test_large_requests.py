"""Large requests take turns, and leave the event loop to others between two of them."""

import asyncio

import pytest

from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from shared.errors import QueueFull


async def test_tenants_take_turns_and_no_two_large_requests_are_decoded_in_a_row() -> None:
    loop, requests = asyncio.get_running_loop(), LargeRequests()
    decoded: list[str] = []
    passes = [0]
    decoded_in: list[int] = []

    def count() -> None:
        passes[0] += 1
        loop.call_soon(count)

    async def request(tenant: str) -> None:
        await requests.turn(tenant, LARGE_REQUEST + 1)
        decoded.append(tenant)
        decoded_in.append(passes[0])

    loop.call_soon(count)
    await asyncio.gather(*(request(tenant) for tenant in "aaab"))
    assert decoded == ["a", "a", "b", "a"]
    assert len(set(decoded_in)) == 4


async def test_a_small_request_waits_for_nobody() -> None:
    requests = LargeRequests()
    waiting = [asyncio.create_task(requests.turn("a", LARGE_REQUEST + 1)) for _ in range(3)]
    await asyncio.sleep(0)
    await requests.turn("b", LARGE_REQUEST)
    assert not waiting[-1].done()
    await asyncio.gather(*waiting)


async def test_who_goes_away_has_no_turn() -> None:
    requests = LargeRequests()
    first, second, third = (asyncio.create_task(requests.turn("a", LARGE_REQUEST + 1)) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert second.cancelled()


async def test_a_tenant_holds_a_quarter_of_what_may_wait() -> None:
    requests = LargeRequests(waiting_bytes=12 * LARGE_REQUEST)
    waiting = [asyncio.create_task(requests.turn("a", LARGE_REQUEST + 1)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"large requests.*large_waiting"):
        await requests.turn("a", LARGE_REQUEST + 1)
    await asyncio.gather(requests.turn("b", LARGE_REQUEST + 1), *waiting)
