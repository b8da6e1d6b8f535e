"""What a rank computes before it is ready: each kernel that requests will need, as it is compiled for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.served import Served, served
from services.executor.core.step_plan import as_int32
from services.executor.gpu.kernels import attention_launch, matmul
from services.executor.gpu.kernels.tiles import rows_for, splits_of
from services.executor.gpu.steps import SequenceChunk, warmup_chunks, warmup_plans
from shared.messages import SparseAttention
from tests.pretend_gpu.device import pretend_gpu
from tests.unit.executor.gpu.texts import DRAWN, GREEDY, ONE_LAYER, requests, texts

PROCESSORS = 132


def attention(chunk: SequenceChunk, group: int, kv_heads: int, tiles: int = 1) -> tuple[int, bool]:
    """What attention's kernel is compiled by."""
    return rows_for(group, chunk.tokens), parts(chunk, kv_heads, tiles) > 1


def parts(chunk: SequenceChunk, kv_heads: int, tiles: int = 1) -> int:
    return splits_of(tiles * kv_heads, chunk.context, PROCESSORS)


@given(
    budget=st.integers(1, 2048),
    context_length=st.integers(1, 32768),
    group=st.integers(1, 128),
    kv_heads=st.integers(1, 64),
    data=st.data(),
)
def test_every_chunk_of_a_step_is_computed_as_one_of_them(
    budget: int, context_length: int, group: int, kv_heads: int, data: st.DataObject
) -> None:
    rehearsed = warmup_chunks(budget, context_length, group)
    context = data.draw(st.integers(1, context_length))
    chunk = SequenceChunk(data.draw(st.integers(1, min(budget, context))), context)
    others = data.draw(st.integers(0, 200))  # tiles of other sequences
    tiles = -(-chunk.tokens // max(1, rows_for(group, chunk.tokens) // group)) + others
    assert attention(chunk, group, kv_heads, tiles) in {attention(one, group, kv_heads) for one in rehearsed}
    assert parts(chunk, kv_heads, tiles) in {1} | {parts(one, kv_heads) for one in rehearsed}


@given(budget=st.integers(1, 2048), context_length=st.integers(1, 32768), data=st.data())
def test_every_product_is_cut_as_one_of_them(budget: int, context_length: int, data: st.DataObject) -> None:
    def cut(rows: int) -> object:
        if rows == 1 or rows > matmul.MOST_ROWS:
            return min(rows, matmul.MOST_ROWS + 1)
        cut = matmul.tiles_of(rows, 4096, 4096, PROCESSORS)
        return cut.block_t, cut.splits > 1

    rows = data.draw(st.integers(1, min(budget, context_length)))
    assert cut(rows) in {cut(chunk.tokens) for chunk in warmup_chunks(budget, context_length, 4)}


@given(budget=st.integers(1, 2048), context_length=st.integers(1, 32768), group=st.integers(1, 128))
def test_the_longest_comes_first_and_none_is_too_long(budget: int, context_length: int, group: int) -> None:
    found = warmup_chunks(budget, context_length, group)
    assert found[0].tokens == min(budget, context_length)
    assert len(set(found)) == len(found) <= 30
    assert all(1 <= tokens <= context <= context_length for tokens, context in found)


def test_they_write_nothing_but_the_first_quantized_block() -> None:
    found = warmup_plans([SequenceChunk(20, 40), SequenceChunk(1, 300)], 16, (0, 7))
    assert [list(as_int32(plan.compressions)) for plan in found] == [[0, 7], []]
    for plan, (tokens, context, decodes) in zip(found, [(20, 40, 0), (1, 300, 1)], strict=True):
        assert plan.num_decodes == decodes
        assert list(as_int32(plan.slots)) == [-1] * tokens
        assert list(as_int32(plan.positions)) == list(range(context - tokens, context))
        assert list(as_int32(plan.block_tables)) == [0] * -(-context // 16)


# --- a whole engine ------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What launches would have had compiled: kernels, and what they are specialised by."""
    seen: set[tuple[Any, ...]] = set()
    run: Callable[[attention_launch.AttentionCall], None] = attention_launch.AttentionCall.run

    def noted(call: attention_launch.AttentionCall) -> None:
        kinds = tuple((name, value.dtype) for name, value in call.arguments.items() if isinstance(value, torch.Tensor))
        seen.add((call.kernel.__name__, kinds, tuple(call.constants.items()), call.warps, call.stages))
        run(call)

    monkeypatch.setattr(attention_launch.AttentionCall, "run", noted)
    return seen


SPARSE = SparseAttention(threshold=16, sinks=0, recent=8, budget=16, share=0.0, dense_layers=0)


def serve(ring: Served) -> None:
    """Prompts of several lengths at once, in chunks and beside decodes; blocks that fill up are compressed. The longest
    one's tokens read some blocks only."""
    prompts = [[7 * at % 250 + 3 for at in range(length)] for length in (45, 21, 3)]
    wanted = requests(prompts, (GREEDY, DRAWN, GREEDY), 3)
    found, _ = texts(ring, [structs.replace(wanted[0], sparse=SPARSE), *wanted[1:]], ahead=True)
    assert all(found)


@pytest.mark.nightly
@pytest.mark.parametrize("warm_up", ["auto", "off"])
def test_requests_have_nothing_compiled_after_it(compiled: set[tuple[Any, ...]], warm_up: str) -> None:
    options = {"kv_dtype": "int8", "kv_memory": 1 << 20, "max_sequences": 3, "context_length": 64}
    options |= {"sparse_attention": True}
    with (
        pretend_gpu(),
        served(ONE_LAYER, torch.device("cuda", 0), max_batch_tokens=40, warm_up=warm_up, **options) as ring,
    ):
        before = set(compiled)
        serve(ring)
    kernels = {"attend", "compress", "summarise_kernel", "score_kernel", "choose_kernel"}
    assert {name for name, *_ in compiled} == kernels
    assert (compiled == before) is (warm_up == "auto")
