"""The plan of a step: what is in it, in which order, and one at a time."""

import pytest
from msgspec import structs

from services.executor.core.step_plan import as_int32, decode_plan, encode_plan, plan_alone, to_bytes
from shared.errors import InternalError
from tests.unit.executor.scheduler.stepped_ring import Ring, ask, lens


def test_a_step_mixes_decodes_and_prompt_chunks_within_the_budget() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 3), ask("b", 20))
    plan, sampled = ring.schedule()
    assert (lens(plan), plan.num_decodes, [s.request.generation_id for s in sampled]) == ([3, 5], 0, ["a"])
    assert as_int32(plan.sample_rows).tolist() == [2]
    assert as_int32(plan.positions).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert as_int32(plan.context_lens).tolist() == [3, 5]
    assert len(as_int32(plan.block_tables)) == 1 + 2
    ring.finish((plan, sampled))
    plan, sampled = ring.schedule()
    assert (lens(plan), plan.num_decodes, plan.step) == ([1, 7], 1, 2)
    assert as_int32(plan.context_lens).tolist() == [4, 12]
    assert as_int32(plan.positions).tolist() == [3, *range(5, 12)]


def test_a_prompt_chunk_of_one_token_goes_with_the_decodes_and_is_not_sampled() -> None:
    ring = Ring(tokens=4)
    ring.add(ask("a", 3), ask("b", 20))
    plan, sampled = ring.schedule()
    assert lens(plan) == [1, 3]
    assert plan.num_decodes == 1
    assert [s.request.generation_id for s in sampled] == ["a"]
    assert as_int32(plan.sample_rows).tolist() == [3]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 3, max_tokens=10))
    ring.step()
    ring.add(ask("long", 90))
    for _ in range(9):
        assert "a" in [entry.generation_id for entry in ring.step()]


def test_a_step_samples_nothing_inside_a_prompt() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 20))
    plan, sampled = ring.schedule()
    assert (plan.sample_rows, sampled) == (b"", [])
    assert ring.finish((plan, sampled)) == []


def test_one_step_at_a_time() -> None:
    ring = Ring()
    assert ring.batcher.schedule() is None
    ring.add(ask("a"))
    ring.schedule()
    with pytest.raises(InternalError, match="under way"):
        ring.batcher.schedule()
    with pytest.raises(InternalError, match="0 tokens for 1"):
        ring.batcher.update([])


def test_a_plan_travels_with_its_adapters() -> None:
    plan = structs.replace(plan_alone(1, [3], 4), adapters=to_bytes([-1, 5]), adapter_loads=[(5, "/cache/adapters/ab")])
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan(encode_plan(plan_alone(1, [3], 4))).adapter_loads == []
