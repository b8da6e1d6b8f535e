"""A tenant beside another one: what is measured."""

import pytest

from benchmarks.gateway.neighbours import measured, sheet


@pytest.mark.slow
async def test_a_tenant_is_answered_beside_one_that_asks_as_fast_as_it_can() -> None:
    (waits,) = await measured(0.5, "short requests")
    assert waits.requests > 0
    assert 0 < waits.median_ms <= waits.longest_ms
    assert waits.answers["200"] > 0
    assert "x 200" in sheet([waits]).rows[0][1]
