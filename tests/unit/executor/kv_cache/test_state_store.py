"""Slots of recurrent state, and what is kept of them in blocks."""

import numpy as np
import pytest
import torch

from services.executor.core.layer_state import LayerState, Pages, StateTensor, attention, layer_of_pages, page_of
from services.executor.core.settings import ExecutorSettings
from services.executor.kv_cache.capacity import BLOCKS_OF_A_SNAPSHOT, plan_slots, store_shape
from services.executor.kv_cache.store import KvStore
from services.executor.model.step_context import RecurrentPiece, StepContext
from shared.errors import ConfigurationError
from tests.unit.executor.model.ring import CPU, NUM_BLOCKS, Script

RECURRENT = LayerState("recurrent", slot=(StateTensor("conv", (5, 3), fp32=False), StateTensor("recurrent", (2, 4, 3))))
HYBRID = (RECURRENT, attention(2, 8), LayerState("shared", reads=1), RECURRENT)


def store_of(states: tuple[LayerState, ...], slots: int = 3) -> KvStore:
    settings = ExecutorSettings(block_size=4, kv_dtype_layers="")
    shape = store_shape(settings, "bf16", states, torch.bfloat16)
    return KvStore(shape, NUM_BLOCKS, CPU, NUM_BLOCKS, slots)


@pytest.mark.parametrize("states", [HYBRID, (RECURRENT,) * 2])
def test_a_snapshot_comes_back_from_full_blocks(states: tuple[LayerState, ...]) -> None:
    store = store_of(states)
    assert store.states is not None
    layers = [store.states.tensors(layer) for layer in range(2)]
    assert [tensor.dtype for tensor in layers[0].values()] == [torch.bfloat16, torch.float32]
    for number, tensors in enumerate(layers):
        for tensor in tensors.values():
            tensor[1] = torch.randn(tensor.shape[1:]) + number
    before = [{name: tensor[1].clone() for name, tensor in tensors.items()} for tensors in layers]
    blocks = NUM_BLOCKS + np.random.default_rng(0).permutation(NUM_BLOCKS)[: store.blocks_per_snapshot]
    store.save_states(np.array([[1, *blocks]], dtype=np.int32))
    store.states.content(1).fill_(0xFF)
    store.load_states(np.array([[2, *blocks]], dtype=np.int32))
    for tensors, kept in zip(layers, before, strict=True):
        for name, tensor in tensors.items():
            assert torch.equal(tensor[2], kept[name])


def test_a_model_without_attention_has_blocks_for_snapshots() -> None:
    large = LayerState("recurrent", slot=(StateTensor("recurrent", (64, 64, 128)),))
    shape = store_shape(ExecutorSettings(block_size=16), "int8", (large,), torch.bfloat16)
    assert shape.pages == (Pages(1, 1, 128),)
    assert shape.blocks_per_snapshot == BLOCKS_OF_A_SNAPSHOT
    assert shape.moves_full_blocks
    assert not shape.compresses


def test_page_layers_are_counted_without_those_that_keep_none() -> None:
    assert [page_of(HYBRID, layer) for layer in (1, 2)] == [0, 0]
    assert layer_of_pages((RECURRENT, attention(2, 8), attention(1, 4))) == (1, 2)


def test_slots_take_at_most_their_share_of_the_budget() -> None:
    shape = store_of(HYBRID).shape
    assert plan_slots(shape, 10**9, max_sequences=4) == 12
    assert plan_slots(shape, 10 * shape.slot_bytes, max_sequences=64) == 5
    with pytest.raises(
        ConfigurationError, match=r"hold that of 1 sequences where 2 are .*; set RYZANSTEIN_KV_MEMORY .* to"
    ):
        plan_slots(shape, 2 * shape.slot_bytes, max_sequences=64)


def test_chunks_are_cut_where_a_snapshot_is_wanted() -> None:
    from msgspec import structs

    from services.executor.core.step_plan import to_bytes

    script = Script([12, 6, 5])
    script.step({0: 4, 1: 5})
    plan, _ = script.step({1: 1, 0: 6, 2: 5})
    plan = structs.replace(plan, state_snapshots=to_bytes([(0, 1), (3, 2), (6, 0), (11, 3)]))
    batch = StepContext(plan, store_of(HYBRID, 8), lambda: None).recurrent
    long, decoded, new = script.state_slots
    assert batch.slots.tolist() == [decoded]
    assert batch.fresh.tolist() == [False]
    assert batch.copies == [(decoded, 1)]
    assert batch.pieces == [
        RecurrentPiece(1, 4, long, False, (2,)),
        RecurrentPiece(4, 7, long, False, (0,)),
        RecurrentPiece(7, 12, new, True, (3,)),
    ]
