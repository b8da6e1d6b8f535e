"""Attention and whole models over compressed blocks, on one rank and on two."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.attention import paged_attention
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.step_context import StepContext
from services.executor.worker.runner import ModelRunner, widths_of
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of, make_model, reference_logits

HEADS, GROUP, WIDTH = 4, 2, 8  # KV heads, query heads of each, and their width
LENGTHS = [37, 18, 9]
codecs = pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)


def seal(script: Script, store: KvStore, counts: dict[int, int]) -> None:
    """Compresses the blocks that are full once the sequences have `counts` tokens, as the allocator would."""
    pairs = []
    taken = {block for table in script._tables for block in table}
    free = iter(sorted(set(range(store.num_writable, store.num_blocks)) - taken))
    for sequence, count in counts.items():
        table = script._tables[sequence]
        for position in range(count // BLOCK_SIZE):
            if table[position] < store.num_writable:
                pairs.append((table[position], next(free)))
                table[position] = pairs[-1][1]
    store.compress(pairs)


def reference(query: Tensor, key: Tensor, value: Tensor, position: int, window: int | None) -> Tensor:
    """Plain attention [heads, d] of one token's `query` over its sequence's keys and values [t, kv heads, d]."""
    first = 0 if window is None else max(0, position + 1 - window)
    keys, values = (part[first : position + 1].repeat_interleave(GROUP, 1) for part in (key, value))
    weights = torch.softmax(torch.einsum("hd,thd->ht", query, keys) / WIDTH**0.5, dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


def rounded(codec: Codec, values: Tensor, quantized_tokens: int) -> Tensor:
    """`values` [t, kv heads, d] whose first `quantized_tokens` have been compressed, block by block."""
    out = values.clone()
    for start in range(0, quantized_tokens, BLOCK_SIZE):
        block = values[start : start + BLOCK_SIZE].transpose(0, 1)
        own = codec.decode(*codec.encode(block.flatten(1))).view(block.shape)
        out[start : start + BLOCK_SIZE] = own.transpose(0, 1)
    return out


@codecs
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("world_size", [1, 2])
def test_attention_over_compressed_blocks(codec: Codec, window: int | None, world_size: int) -> None:
    """Decodes and prefill chunks with a compressed history give what a float reference gives on those values."""
    torch.manual_seed(3)
    known = [torch.randn(3, length, HEADS, WIDTH) for length in LENGTHS]
    queries = [torch.randn(length, HEADS * GROUP, WIDTH) for length in LENGTHS]
    local = HEADS // world_size
    outs = []
    for rank in range(world_size):
        heads = slice(rank * local, (rank + 1) * local)
        q_heads = slice(rank * local * GROUP, (rank + 1) * local * GROUP)
        store = KvStore(StoreShape.uniform(1, BLOCK_SIZE, local, WIDTH, torch.float32, (codec,)), NUM_BLOCKS, CPU, 16)
        script = Script(LENGTHS)

        def run(plan: StepPlan, at: list[tuple[int, int]], store: KvStore, heads: slice, q_heads: slice) -> Tensor:
            """The attention's output for rows that hold the tokens `at` (sequence, position)."""
            key, value = (
                torch.stack([known[sequence][part, position] for sequence, position in at])[:, heads] for part in (0, 1)
            )
            query = torch.stack([queries[sequence][position] for sequence, position in at])[:, q_heads]
            out, _ = paged_attention(
                SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
                *(part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)),
                None,
                step=StepContext(plan, store, lambda: None),
                sliding_window=window,
            )
            return out[0]

        first = {0: 29, 1: 17, 2: 2}
        at = [(sequence, position) for sequence in first for position in range(first[sequence])]
        run(script.step(first)[0], at, store, heads, q_heads)
        seal(script, store, first)
        assert store.codes(0).float().any()
        # One decode and two chunks, whose histories end within a block, and with one.
        at = [(1, 17), *((0, position) for position in range(29, 37)), *((2, position) for position in range(2, 9))]
        outs.append(run(script.step({1: 1, 0: 8, 2: 7})[0], at, store, heads, q_heads))
    out = torch.cat(outs, dim=1)
    for row, (sequence, position) in zip(out, at, strict=True):
        quantized = first[sequence] // BLOCK_SIZE * BLOCK_SIZE
        key, value = (rounded(codec, known[sequence][part], quantized) for part in (0, 1))
        expected = reference(queries[sequence][position], key, value, position, window)
        assert (row - expected).abs().max() < 1e-5


@codecs
@pytest.mark.parametrize("window", [None, 6])
def test_a_token_reads_its_own_block_as_written_and_those_before_it_compressed(
    codec: Codec, window: int | None
) -> None:
    """In whatever step it is computed: here in chunks that begin and end within blocks, and alone."""
    torch.manual_seed(4)
    known = [torch.randn(2, length, HEADS, WIDTH) for length in LENGTHS]
    queries = [torch.randn(length, HEADS * GROUP, WIDTH) for length in LENGTHS]
    store = KvStore(
        StoreShape.uniform(2, BLOCK_SIZE, HEADS, WIDTH, torch.float32, (None, codec)), NUM_BLOCKS, CPU, NUM_BLOCKS
    )
    script = Script(LENGTHS, compresses=True)
    for step in ({0: 14, 2: 9}, {0: 1, 1: 11}, {0: 13, 1: 4}, {0: 1, 1: 1}, {0: 8, 1: 2}):
        plan, at = script.step(step, every_token=True)
        key, value = (torch.stack([known[s][part, position] for s, position in at]) for part in (0, 1))
        query = torch.stack([queries[s][position] for s, position in at])
        for layer, rounds in enumerate((lambda values, count: values, partial(rounded, codec))):
            out, _ = paged_attention(
                SimpleNamespace(layer_idx=layer),  # type: ignore[arg-type]
                *(part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)),
                None,
                step=StepContext(plan, store, lambda: None),
                sliding_window=window,
            )
            for row, (sequence, position) in zip(out[0], at, strict=True):
                own = position // BLOCK_SIZE * BLOCK_SIZE
                keys, values = (rounds(known[sequence][part], own) for part in (0, 1))
                expected = reference(queries[sequence][position], keys, values, position, window)
                assert (row - expected).abs().max() < 1e-5


def worst_error(directory: Path, collectives: Collectives, codec: Codec | None, whole: list[Tensor]) -> float:
    """Largest error of the logits of a script whose full blocks are compressed after each step; 0 but on rank 0."""
    config = load_config(directory)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    model = load_model(directory, torch.float32, layout, collectives, CPU, lambda done, total: None)
    layers = config.num_hidden_layers
    heads, width = layout.kv_heads.size, layout.head_dim
    shape = StoreShape.uniform(layers, BLOCK_SIZE, heads, width, torch.float32, (codec,) * layers)
    store = KvStore(shape, NUM_BLOCKS, CPU, NUM_BLOCKS)
    runner = ModelRunner(model, widths_of(model), store, collectives, CPU)
    script = Script(LENGTHS)
    worst = 0.0
    for step in ({0: 16, 1: 9}, {0: 16, 2: 8, 1: 8}, {0: 1, 1: 1, 2: 1}, {0: 4}):
        plan, sampled = script.step(step)
        logits = runner.forward(plan)
        seal(script, store, dict(enumerate(script._done)))
        if logits is not None:
            expected = torch.stack([whole[sequence][position] for sequence, position in sampled])
            worst = max(worst, float((logits - expected).abs().max()))
    return worst


@pytest.mark.parametrize("world_size", [1, 2])
def test_models_over_compressed_blocks(tmp_path: Path, world_size: int) -> None:
    """Quantized blocks without a codec change nothing; codecs change logits, within what they may."""
    directory = make_model(tmp_path, "llama")
    whole = reference_logits(directory, Script(LENGTHS).sequences)

    def error(codec: Codec | None) -> float:
        return on_ring(world_size, lambda collectives: worst_error(directory, collectives, codec, whole))[0]

    spread = float(whole[0].std())
    assert error(None) < 1e-4
    int8, fp8 = error(INT8) / spread, error(FP8) / spread
    assert 1e-4 < int8 < fp8
    assert int8 < 0.1
    assert fp8 < 0.5


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon/alibi"])
def test_chunks_read_what_they_fill(tmp_path: Path, name: str) -> None:
    """Blocks that a chunk fills stand among its keys twice, compressed and as written, each at its own positions."""
    model = build(name, settings_of(name))
    model.save_pretrained(str(tmp_path))
    script = Script([40, 23], compresses=True)
    whole = logits_of(model, script.sequences)
    runner = make_runner(tmp_path, SingleRank(), kv_dtype="int8", num_quantized=NUM_BLOCKS)
    worst = 0.0
    for step in ({0: 14}, {0: 15, 1: 10}, {0: 1, 1: 13}, {0: 10}):
        plan, sampled = script.step(step, every_token=True)
        logits = runner.forward(plan)
        assert isinstance(logits, Tensor)
        expected = torch.stack([whole[sequence][position] for sequence, position in sampled])
        worst = max(worst, float((logits - expected).abs().max()))
    assert worst < 0.1 * float(whole[0].std())
