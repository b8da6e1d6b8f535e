"""The Rust client: its own tests, and its README against a real gateway. `resume` is in `test_examples.py`."""

import asyncio

import pytest

from tests.integration.clients.programs import RUST, copied, run, run_cargo, rust, tool
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, saying, stub_card

TEXT = "Once upon a time, a connection was lost, and nobody who listened noticed."


@pytest.mark.slow
async def test_its_own_tests() -> None:
    tool("cargo")

    def run() -> str:
        with copied(RUST) as (copy, _):
            return run_cargo(copy / "clients" / "rust", "test")

    assert "test result: ok. 7 passed" in await asyncio.to_thread(run)


async def test_the_stream_of_the_readme(gateway: RunningGateway, ring: FakeRing) -> None:
    command = await asyncio.to_thread(rust, "readme_0")
    ring.behave = saying(TEXT)
    await ring.add_model(stub_card("SmolLM2-135M-Instruct"))
    async with gateway.http() as http:
        await until_listed(http, "SmolLM2-135M-Instruct")
    assert await run(command, gateway.url) == f"{TEXT}\n"
    assert len(ring.requests) == 1
