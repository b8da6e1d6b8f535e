"""Every rank of a ring makes a store of as many blocks, compressed alike."""

import re

import pytest
import torch

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.layer_state import LayerState, LayerStates, Pages, StateTensor, attention
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.kv_cache import capacity
from services.executor.kv_cache.capacity import BlockCounts, StoreShape, check_room, plan_store, writable_reserve
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.platforms.cpu import Cpu
from services.executor.platforms.cuda import Cuda
from shared.config import load_settings
from shared.errors import ConfigurationError
from tests.unit.executor.model.ring import CPU, on_ring

HEADS = HeadCounts(q_heads=9, kv_heads=3, head_dim=64)  # three KV heads for two ranks: each holds two


def plan(
    settings: ExecutorSettings, collectives: Collectives, context: int = 1024, native: bool = False
) -> tuple[StoreShape, BlockCounts]:
    layout = ShardLayout.of(HEADS, collectives.world_size, collectives.rank)
    states = (attention(layout.kv_heads.size, layout.head_dim),) * 4
    return plan_store(settings, states, torch.bfloat16, native, context, CPU, collectives)


def agree(settings: ExecutorSettings, native: bool = False) -> list[BlockCounts]:
    def one(collectives: Collectives) -> BlockCounts:
        return plan(settings, collectives, native=native)[1]

    return on_ring(2, one)


def test_uncompressed_all_blocks_are_writable() -> None:
    # Either share: 4 layers, 2 heads, 16 tokens of 64 values, keys and values, two bytes each.
    assert (
        agree(load_settings(ExecutorSettings, kv_memory=1000 * 4 * 2 * 16 * 64 * 2 * 2)) == [BlockCounts(1000, 0)] * 2
    )


def test_compressed_the_budget_goes_to_quantized_blocks() -> None:
    settings = load_settings(ExecutorSettings, kv_memory=500_000_000, kv_dtype="int8")
    first, second = agree(settings)
    assert first == second
    assert first.writable == writable_reserve(settings.max_sequences, settings.max_batch_tokens, settings.block_size)
    plain = agree(load_settings(ExecutorSettings, kv_memory=500_000_000))[0]
    assert sum(first) > 1.9 * plain.writable


def test_auto_compresses_where_the_native_kernels_compute() -> None:
    for native, codecs in ((True, (INT8,) * 4), (False, (None,) * 4)):
        shape, blocks = plan(load_settings(ExecutorSettings), SingleRank(), native=native)
        assert shape.codecs == codecs
        assert bool(blocks.quantized) == native


def test_auto_does_without_where_some_rank_has_too_little_memory() -> None:
    settings = load_settings(ExecutorSettings, kv_memory=70 * 4 * 2 * 16 * 64 * 2 * 2)
    assert agree(settings, native=True) == [BlockCounts(70, 0)] * 2


def test_layers_are_compressed_as_the_settings_say() -> None:
    settings = load_settings(ExecutorSettings, kv_dtype="int8", kv_dtype_layers="0=bf16,-1=fp8")
    shape, _ = plan(settings, SingleRank())
    assert shape.codecs == (None, INT8, INT8, FP8)
    wrong = load_settings(ExecutorSettings, kv_dtype_layers="4=int8")
    with pytest.raises(ConfigurationError, match="names layer 4, which the model does not have; choose 0 to 3"):
        plan(wrong, SingleRank())


LATENT = (LayerState("latent", (Pages(1, 1, 576),)),) * 4
RECURRENT = LayerState("recurrent", slot=(StateTensor("recurrent", (64, 128, 128)),))
MIXED = (RECURRENT, attention(2, 64), RECURRENT)


def check(states: LayerStates, weights: int = 0, **settings: object) -> None:
    asked = load_settings(ExecutorSettings, **settings)
    check_room(asked, states, torch.bfloat16, 1024, CPU, weights)


@pytest.mark.parametrize(
    ("states", "one_sequence"),
    [((attention(2, 64),) * 4, 4 * 1024 * 2 * 2 * 64 * 2), (LATENT, 4 * 1024 * 576 * 2)],
    ids=["full", "latent"],
)
def test_blocks_that_do_not_hold_a_sequence_are_refused_before_weights_are_read(
    states: LayerStates, one_sequence: int
) -> None:
    check(states, kv_memory=one_sequence)
    with pytest.raises(
        ConfigurationError,
        match=rf"holds 1008 tokens, fewer than one sequence of 1024 .* set RYZANSTEIN_KV_MEMORY .* "
        rf"to {one_sequence} bytes or more, "
        r"or RYZANSTEIN_CONTEXT_LENGTH .* to 1008",
    ):
        check(states, kv_memory=one_sequence - 1)


def test_slots_that_do_not_hold_a_sequence_are_refused_before_weights_are_read() -> None:
    slot = 2 * 64 * 128 * 128 * 4
    with pytest.raises(ConfigurationError, match=rf"hold that of 1 sequences where 2 are .* to {4 * slot} bytes"):
        check(MIXED, kv_memory=4 * slot - 1)


@pytest.mark.parametrize("states", [MIXED, (RECURRENT,)], ids=["beside attention", "alone"])
@pytest.mark.parametrize("kv_memory", [1 << 20, 40 << 20])
def test_what_the_error_asks_for_is_enough(states: LayerStates, kv_memory: int) -> None:
    """Slots leave room for the blocks of one sequence, however many sequences might run."""
    sizes = {"kv_dtype": "bf16", "max_sequences": 512, "max_batch_tokens": 1 << 16}
    with pytest.raises(ConfigurationError) as refused:
        check(states, kv_memory=kv_memory, **sizes)
    found = re.search(r"set RYZANSTEIN_KV_MEMORY .* to (\d+) bytes", str(refused.value))
    check(states, kv_memory=int(found[1]), **sizes)
    with pytest.raises(ConfigurationError):
        check(states, kv_memory=int(found[1]) - 1, **sizes)


def test_blocks_in_a_file_take_memory_for_what_is_read_at_once() -> None:
    """Full blocks lie in the file; in memory are those that are written, scales, and a window of two layers."""
    states = (attention(2, 64),) * 4
    few = {"max_sequences": 1, "max_batch_tokens": 16, "kv_dtype": "int8"}
    block, blocks = 4 * 2 * 2 * 16 * 64, 200
    reserve = writable_reserve(1, 16, 16)
    window, scales = 64 * block // 2, blocks * 4 * 2 * 2 * 4
    least = reserve * block * 2 + scales + window
    settings = load_settings(ExecutorSettings, kv_memory=least, kv_mapped_memory=blocks * block + 1, **few)
    shape, counts = plan_store(settings, states, torch.bfloat16, True, 1024, CPU, SingleRank())
    assert counts == BlockCounts(reserve, blocks)
    assert shape.is_mapped
    assert capacity.mapped_window(shape, 1024) == window
    with pytest.raises(ConfigurationError, match=rf"budget of {least - 1} bytes .* and {window} for .* to {least} "):
        check(states, kv_memory=least - 1, kv_mapped_memory=blocks * block, **few)
    with pytest.raises(ConfigurationError, match=rf"MAPPED_MEMORY .* takes {64 * block}; set it to that"):
        check(states, kv_memory=least, kv_mapped_memory=64 * block - 1, **few)


def test_slots_behind_drafts_take_an_eighth_of_what_the_cache_has() -> None:
    shape = capacity.store_shape(ExecutorSettings(), "bf16", MIXED, torch.bfloat16)
    size, share = shape.slot_bytes, int(1 / capacity.DRAFTS_SHARE)
    assert capacity.plan_draft_slots(shape, 400 * size, 10, 3) == 12, "four sequences' drafts"
    assert capacity.plan_draft_slots(shape, 5 * share * size, 10, 15) == 5
    assert capacity.plan_draft_slots(shape, 100 * size, 10, 0) == 0, "no drafts are wanted"
    assert capacity.plan_draft_slots(shape, 100 * size, 10, 15, 88 * size) == 2, "blocks go before them"
    assert capacity.plan_draft_slots(shape, 100 * size, 10, 15, 95 * size) == 0
    assert capacity.plan_draft_slots(shape, 100 * size, 0, 15) == 0, "there is no state"


@pytest.mark.parametrize("mapped", [0, 64 << 20])
def test_slots_behind_drafts_are_planned_with_the_others(mapped: int) -> None:
    sizes = {"kv_memory": 1 << 30, "kv_mapped_memory": mapped, "max_sequences": 4, "max_batch_tokens": 64}
    with_drafts, without = (
        plan_store(
            load_settings(ExecutorSettings, speculation=speculation, **sizes),
            MIXED, torch.bfloat16, True, 1024, CPU, SingleRank(),
        )[1]
        for speculation in ("3", "off")
    )  # fmt: skip
    assert (with_drafts.draft_slots, without.draft_slots) == (12, 0)
    assert with_drafts.slots == without.slots == with_drafts.all_slots - 12
    assert with_drafts.quantized == without.quantized if mapped else with_drafts.quantized < without.quantized


def test_slots_lie_in_memory_beside_a_file() -> None:
    sizes = {"kv_mapped_memory": 64 << 20, "max_sequences": 4, "max_batch_tokens": 64}
    with pytest.raises(ConfigurationError) as refused:
        check(MIXED, kv_memory=1 << 20, **sizes)
    found = re.search(r"state of one sequence .* set RYZANSTEIN_KV_MEMORY .* to (\d+) bytes", str(refused.value))
    check(MIXED, kv_memory=int(found[1]), **sizes)


def test_what_some_dtype_of_blocks_can_hold_is_not_refused() -> None:
    """int8 needs half the bytes of bf16, and blocks for what a step fills besides."""
    few = {"max_sequences": 1, "max_batch_tokens": 16}
    states = (attention(2, 64),) * 4
    fewer = 3 * 4 * 1024 * 2 * 2 * 64 * 2 // 4
    check(states, kv_memory=fewer, **few)
    with pytest.raises(ConfigurationError, match="RYZANSTEIN_KV_MEMORY"):
        check(states, kv_memory=fewer, kv_dtype="bf16", **few)


def test_weights_that_are_not_there_yet_leave_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "free_memory", lambda self, device: (1 << 30, 1 << 30))
    states = (attention(2, 64),) * 4
    check(states, weights=(1 << 30) - (1 << 24))
    with pytest.raises(ConfigurationError, match="holds 0 tokens"):
        check(states, weights=1 << 30)


def test_weights_that_leave_a_gpu_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, gpu = 1 << 30, torch.device("cuda", 0)
    monkeypatch.setattr(Cuda, "free_memory", lambda self, device: (23 * gib, 24 * gib))
    for states in (LATENT, MIXED, (attention(2, 64),) * 4):
        settings = load_settings(ExecutorSettings)
        check_room(settings, states, torch.bfloat16, 1024, gpu, 16 * gib)
        with pytest.raises(
            ConfigurationError, match=r"Of the 24\.0 GiB of the GPU 1\.0 are free with the weights .* --tp"
        ):
            check_room(settings, states, torch.bfloat16, 1024, gpu, 22 * gib)


def test_auto_leaves_blocks_that_pytorch_reads_on_a_gpu_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels read keys and values of one shape: not a latent, nor an indexer's keys."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(Cuda, "free_memory", lambda self, device: (20 << 30, 24 << 30))
    monkeypatch.setattr(capacity, "smallest", lambda mine, device, ranks: list(mine))
    settings = load_settings(ExecutorSettings)
    for states, compresses in (((attention(2, 64),) * 4, True), (LATENT, False)):
        shape, _ = plan_store(settings, states, torch.bfloat16, True, 1024, gpu, SingleRank())
        assert shape.compresses is compresses
