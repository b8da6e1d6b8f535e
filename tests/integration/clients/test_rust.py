"""The Rust client's own tests, the README's example compiled among them; `resume` is in `test_examples.py`."""

import asyncio

import pytest

from tests.integration.clients.programs import RUST, copied, run_cargo, tool


@pytest.mark.slow
async def test_its_own_tests() -> None:
    tool("cargo")

    def run() -> str:
        with copied(RUST) as (copy, _):
            return run_cargo(copy / "clients" / "rust", "test")

    assert "test result: ok. 7 passed" in await asyncio.to_thread(run)
