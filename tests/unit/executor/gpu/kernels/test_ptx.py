"""The kernels as Triton compiles them for an H200, run by what knows PTX: the interpreter does not show how numbers are
packed, converted, rounded and exchanged between threads, nor in how many bits addresses are counted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")

from services.executor.core.sampling_state import SamplingState
from services.executor.gpu.kernels import sampling
from services.executor.gpu.sampling import params_of
from services.executor.kv_cache.codecs import FP8, SMALLEST_SCALE, Codec
from services.executor.sampling.sampler import Sampler
from shared.messages import SamplingParams
from tests.unit.executor.gpu.kernels.ptx.cases import (
    CASES,
    CHUNK,
    CODECS,
    COLD_BLOCKS,
    GROUP,
    HOT_BLOCKS,
    KV_HEADS,
    ROWS,
    SIZE,
    SPLITS,
    VOCABULARY,
    WIDTH,
    WORDS,
)
from tests.unit.executor.gpu.kernels.ptx.emit import Emitted, emitted
from tests.unit.executor.gpu.kernels.ptx.memory import Memory
from tests.unit.executor.gpu.kernels.ptx.text import parse

Kernels = dict[str, list[Emitted]]
NUMBERS = 2 * KV_HEADS * SIZE * WIDTH
"""Of a block."""
HOT_AT, CODES_AT, SCALES_AT = 0x7E0000000000, 0x7C0000000000, 0x7B0000000000
SCORES = {
    "hot": HOT_AT, "codes": CODES_AT, "words": CODES_AT, "scales": SCALES_AT, "sinks": 0, "slopes": 0,
    "scale": WIDTH**-0.5, "softcap": 1.0, "window": 1 << 30, "num_hot": HOT_BLOCKS, "first_row": 0,
    "head_stride": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return emitted(*CASES)


def bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of a bf16 or fp8 tensor, as integers."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    found: np.ndarray[Any, Any] = tensor.contiguous().view(kind).numpy().copy()
    return found


def bf16(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS.values(), ids=str)
def test_words_become_numbers_in_their_places(kernels: Kernels, codec: Codec) -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, WORDS).astype(np.int32)
    words[:256] = (np.arange(256, dtype=np.uint32) * 0x01010101).view(np.int32)
    out = np.zeros((4, WORDS), np.float16)
    (kernel,) = kernels[f"widen {codec.name}"]

    kernel.run((1,), Memory(), words=words, out=out)

    expected = torch.from_numpy(words.view(np.uint8).reshape(WORDS, 4)).view(codec.dtype).half()
    assert np.array_equal(out, expected.T.numpy(), equal_nan=True)


def rows_of_all_sizes() -> Tensor:
    """bf16 [3 blocks, 2 * KV_HEADS, numbers]: of many sizes, and zeros, denormals, NaN, infinity."""
    rows = normal(3, 2 * KV_HEADS, SIZE * WIDTH) * torch.exp(5 * normal(3, 2 * KV_HEADS, 1, seed=1))
    rows[0, 1] = 0
    rows[0, 2] *= 1e-38
    rows[1, 2, 5] = float("nan")
    rows[2, 0, 3] = float("inf")
    rows[2, 1] = torch.arange(SIZE * WIDTH) - 512
    return rows.bfloat16()


@pytest.mark.parametrize("codec", CODECS.values(), ids=str)
def test_blocks_of_a_large_store_are_compressed_as_the_codec_does(kernels: Kernels, codec: Codec) -> None:
    rows, memory = rows_of_all_sizes(), Memory()
    pairs = np.array([(3, 1), (5_000_000, 11_000_000), (19_999_999, 7)], np.int64)
    hot_stride, code_stride, scale_stride = (
        20_000_000 * NUMBERS,
        12_000_000 * NUMBERS,
        12_000_000 * 2 * KV_HEADS,
    )
    codes, scales = (
        np.zeros((3, 2 * KV_HEADS, SIZE * WIDTH), np.int8),
        np.zeros((3, 2 * KV_HEADS), np.float32),
    )
    for raw, (hot, cold), into, scale in zip(bits(rows), pairs.tolist(), codes, scales, strict=True):
        memory.give(raw, HOT_AT + 2 * (hot_stride + hot * NUMBERS))
        memory.give(into, CODES_AT + cold * NUMBERS)
        memory.give(scale, SCALES_AT + 4 * cold * 2 * KV_HEADS)
    (kernel,) = kernels[f"compress {codec.name}"]
    assert (kernel.signature["hot_layer_stride"], kernel.signature["code_layer_stride"]) == ("i64", "i64")

    kernel.run(
        (3, 1, 2 * KV_HEADS), memory, hot=HOT_AT, codes=CODES_AT, scales=SCALES_AT, pairs=pairs,
        layers=np.array([1], np.int64), hot_layer_stride=hot_stride, code_layer_stride=code_stride,
        scale_layer_stride=scale_stride, limit=codec.limit, smallest=SMALLEST_SCALE,
    )  # fmt: skip

    check_encoded(rows.float(), codes, scales, codec)


def check_encoded(
    rows: Tensor, codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], codec: Codec
) -> None:
    """To the bit, where there are numbers; elsewhere the scale tells."""
    expected, expected_scales = codec.encode(rows)
    fine = expected_scales.isfinite()
    assert not fine.all()
    assert np.array_equal(scales, expected_scales.numpy(), equal_nan=True)
    assert np.array_equal(codes[fine.numpy()], bits(expected)[fine.numpy()])


def test_rows_are_encoded_as_the_codec_does(kernels: Kernels) -> None:
    rows = rows_of_all_sizes().reshape(-1, SIZE * WIDTH)[:, :300]
    rows[6, 5] = float("nan")
    codes, scales = np.zeros(rows.shape, np.int8), np.zeros(len(rows), np.float32)
    (kernel,) = kernels["encode fp8"]
    kernel.run(
        (len(rows),), Memory(), x=bits(rows), codes=codes, scales=scales, inputs=300, x_stride=300,
        limit=FP8.limit, smallest=SMALLEST_SCALE,
    )  # fmt: skip
    check_encoded(rows.float(), codes, scales, FP8)


def coded(rows: int, columns: int, codec: Codec) -> tuple[Tensor, Tensor]:
    codes, scales = codec.encode(normal(rows, columns))
    codes.view(torch.int8)[0, :256] = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    if codec is FP8:
        codes.view(torch.uint8)[0, [0x7F, 0xFF]] = 0  # NaN: the codec makes none
    return codes, scales


@pytest.mark.parametrize("codec", CODECS.values(), ids=str)
def test_rows_are_decoded(kernels: Kernels, codec: Codec) -> None:
    codes, scales = coded(2, 300, codec)
    out = np.zeros((2, 300), np.int16)
    (kernel,) = kernels[f"decode {codec.name}"]
    kernel.run((2, 1), Memory(), codes=bits(codes), scales=scales.numpy(), out=out, inputs=300)
    assert torch.equal(bf16(out), codec.decode(codes, scales).bfloat16())


@pytest.mark.parametrize("codec", CODECS.values(), ids=str)
def test_one_row_is_multiplied(kernels: Kernels, codec: Codec) -> None:
    codes, scales = coded(20, 1040, codec)
    x, bias, out = (
        normal(1, 1040, seed=2).bfloat16(),
        normal(20, seed=3).bfloat16(),
        np.zeros((1, 20), np.int16),
    )
    (kernel,) = kernels[f"one row {codec.name}"]
    kernel.run(
        (2,), Memory(), x=bits(x), codes=bits(codes), scales=scales.numpy(), bias=bits(bias), out=out,
        outputs=20, inputs=1040,
    )  # fmt: skip
    exact = x.double() @ (codes.double() * scales.double()[:, None]).T + bias.double()
    torch.testing.assert_close(bf16(out).double(), exact, rtol=2**-8, atol=1e-3)


def drawing_launches(kernels: Kernels, logits: Tensor, params: np.ndarray[Any, Any]) -> list[int]:
    """The tokens that the launches of `draw` leave, in their order."""
    rows, chunks, memory = ROWS, -(-VOCABULARY // sampling.BLOCK), Memory()
    tokens = np.full(rows, -1, np.int64)
    given = {
        "logits": bits(logits), "largest": logits.float().amax(1).numpy(), "row_params": params, "tokens": tokens,
        "prefixes": np.zeros(2 * rows, np.int32), "needs": np.zeros(rows), "sums": np.zeros((rows, chunks)),
        "tallies": np.full((rows, chunks, 16), np.nan),
    }  # fmt: skip
    at = {key: memory.give(value) for key, value in given.items()}
    shifts, shift = iter(2 * [28, 24, 20, 16]), 0
    for kernel in kernels["draw"]:
        if kernel.kernel == "tally_kernel":
            shift = next(shifts)
        numbers = {"width": VOCABULARY, "stride": VOCABULARY, "rows": rows, "chunks": chunks, "most": 1024}
        grid = (rows, chunks) if kernel.kernel in ("tally_kernel", "weigh_kernel") else (rows,)
        kernel.run(grid, memory, **at, **numbers, shift=shift, first=int(shift == 28))
    return tokens.tolist()


def test_tokens_are_drawn_as_on_the_host_and_a_row_with_nan_is_left_alone(kernels: Kernels) -> None:
    """The largest of numbers and NaN is NaN, as `torch.max` has it: it is asked for, not found here."""
    logits = (normal(ROWS, VOCABULARY) * 3).bfloat16()
    logits[2, 4500] = float("nan")
    states = [
        SamplingState(SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=5), [], []),
        SamplingState(SamplingParams(temperature=1.0, top_p=0.5, min_p=0.02, seed=6), [], []),
        SamplingState(SamplingParams(temperature=1.5, top_k=7, seed=7), [], []),
    ]
    found = drawing_launches(kernels, logits, params_of(states, VOCABULARY))
    assert found == [*(token.token for token in Sampler().sample(logits[:2], states[:2])), -1]


def test_norms_places_and_activations(kernels: Kernels) -> None:
    x, residual, weight = normal(2, 320).bfloat16(), normal(2, 320, seed=1).bfloat16(), normal(320, seed=2)
    kept, out = bits(residual), np.zeros((2, 320), np.int16)
    (kernel,) = kernels["norm"]
    kernel.run(
        (2,), Memory(), x=bits(x), residual=kept, after=weight.numpy(), weight=weight.numpy(), out=out,
        scale=1.0, eps=1e-6, width=320,
    )  # fmt: skip
    summed = (x.float() + residual.float()).bfloat16()
    assert torch.equal(bf16(kept), summed)
    exact = summed.double() * (summed.double().pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(bf16(out).double(), exact, rtol=2**-6, atol=1e-6)

    gate = normal(2, 1200, seed=3).bfloat16()
    out = np.zeros((2, 600), np.int16)
    (kernel,) = kernels["gated"]
    kernel.run((2, 1), Memory(), x=bits(gate), out=out, width=600)
    first, second = gate.double().chunk(2, dim=1)
    exact = torch.nn.functional.gelu(first, approximate="tanh") * second
    torch.testing.assert_close(bf16(out).double(), exact, rtol=2**-7, atol=1e-4)


def test_keys_and_values_go_to_their_slots_of_a_large_store(kernels: Kernels) -> None:
    qkv, angles = normal(2, (4 + 2 * KV_HEADS) * WIDTH).bfloat16(), normal(2, WIDTH // 2, seed=1)
    weight, query = 1 + normal(WIDTH, seed=2), np.zeros((2, 4, WIDTH), np.int16)
    block, memory = HOT_BLOCKS - 2, Memory()
    stored = np.zeros((2, KV_HEADS, SIZE, WIDTH), np.int16)
    memory.give(stored, HOT_AT + 2 * block * NUMBERS)
    (kernel,) = kernels["place"]
    slots = np.array([block * SIZE + 5, -1], np.int32)
    kernel.run(
        (2, 1), memory, qkv=bits(qkv), cosines=angles.cos().numpy(), sines=angles.sin().numpy(), slots=slots,
        query_norm=weight.numpy(), key_norm=weight.numpy(), query=query, hot=HOT_AT, eps=1e-6,
    )  # fmt: skip
    heads = qkv.double().view(2, -1, WIDTH)
    normed = heads * (heads.pow(2).mean(2, keepdim=True) + 1e-6).rsqrt() * weight.double()
    low, high = normed.chunk(2, dim=2)
    cosines, sines = angles.cos().double()[:, None], angles.sin().double()[:, None]
    turned = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=2)
    torch.testing.assert_close(bf16(query).double(), turned[:, :4], rtol=2**-5, atol=2**-5)
    found = bf16(stored).double()
    torch.testing.assert_close(found[0, :, 5], turned[0, 4 : 4 + KV_HEADS], rtol=2**-5, atol=2**-5)
    assert torch.equal(found[1, :, 5], heads[0, 4 + KV_HEADS :])
    assert found.count_nonzero() == 2 * KV_HEADS * WIDTH


@pytest.mark.parametrize("kind", ["hot", "fp8", "int8"])
def test_decodes_attend_to_blocks_of_a_large_store(kernels: Kernels, kind: str) -> None:
    """Two sequences, whose oldest blocks are compressed, and whose keys are split in parts, some without any."""
    contexts, memory = (37, 600), Memory()
    counts = [-(-context // SIZE) for context in contexts]
    tables, keys = give_blocks(memory, sum(counts), CODECS.get(kind), [counts[0] - 1, -2, -1])
    query = normal(2, KV_HEADS, GROUP, WIDTH, seed=3).bfloat16()
    out = np.zeros(query.shape, np.int16)
    parts, weights = (
        np.zeros((SPLITS, *query.shape), np.float32),
        np.zeros((2, SPLITS, *query.shape[:3]), np.float32),
    )
    at = {name: memory.give(array) for name, array in (("out", out), ("parts", parts), ("weights", weights))}
    attend, merge = kernels[f"attend {kind}"]

    attend.run(
        (2, KV_HEADS, SPLITS), memory, **SCORES, **at, query=bits(query), tables=tables,
        slots=(tables[np.cumsum(counts) - 1] * SIZE + (np.array(contexts) - 1) % SIZE).astype(np.int32),
        table_starts=np.array([0, counts[0]], np.int32), query_starts=np.arange(3, dtype=np.int32),
        context_lens=np.array(contexts, np.int32), tile_sequence=np.arange(2, dtype=np.int32),
        tile_first=np.zeros(2, np.int32), num_rows=2, splits=SPLITS,
    )  # fmt: skip
    merge.run((2, KV_HEADS * GROUP), memory, **at, first_row=0, num_rows=2, splits=SPLITS)

    for row, context in enumerate(contexts):
        mine = keys[row * counts[0] : counts[0] + row * counts[1]]
        check_attended(bf16(out)[row], query[row], mine, context)


def test_chunks_attend_to_blocks_of_a_large_store(kernels: Kernels) -> None:
    context, memory = 200, Memory()
    count = -(-context // SIZE)
    tables, keys = give_blocks(memory, count, CODECS["int8"], range(count - 5, count))
    query = normal(CHUNK, KV_HEADS, GROUP, WIDTH, seed=3).bfloat16()
    out, token_of = np.zeros(query.shape, np.int16), 128 // GROUP
    (attend,) = kernels["attend chunk"]

    attend.run(
        (2, KV_HEADS, 1), memory, **SCORES, out=out, parts=0, weights=0, query=bits(query), tables=tables,
        slots=np.array([tables[at // SIZE] * SIZE + at % SIZE for at in range(context - CHUNK, context)], np.int32),
        table_starts=np.zeros(1, np.int32), query_starts=np.array([0, CHUNK], np.int32),
        context_lens=np.array([context], np.int32), tile_sequence=np.zeros(2, np.int32),
        tile_first=np.array([0, token_of], np.int32), num_rows=CHUNK, splits=1,
    )  # fmt: skip

    for token in range(CHUNK):
        check_attended(bf16(out)[token], query[token], keys, context - CHUNK + token + 1)


def check_attended(found: Tensor, query: Tensor, blocks: Tensor, context: int) -> None:
    """`found` and `query` [KV_HEADS, group, WIDTH]; `blocks` [count, 2, KV_HEADS, SIZE, WIDTH]."""
    mine = blocks.double().permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, WIDTH)[:, :, :context]
    scores = query.double() @ mine[0].transpose(1, 2) * WIDTH**-0.5
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ mine[1], rtol=2**-6, atol=2**-7)


def give_blocks(memory: Memory, count: int, codec: Codec | None, hot: Sequence[int]) -> tuple[Any, Tensor]:
    """(a block table, what can be read in its blocks), of which those at `hot` are as they are."""
    tables, found = np.zeros(count, np.int32), torch.zeros(count, 2, KV_HEADS, SIZE, WIDTH)
    stay = {at % count for at in hot}
    for at, block in enumerate(normal(*found.shape).bfloat16()):
        cold = codec is not None and at not in stay
        tables[at] = HOT_BLOCKS + COLD_BLOCKS - 1 - at if cold else HOT_BLOCKS - 1 - at
        found[at] = give_block(memory, block, int(tables[at]), codec if cold else None)
    return tables, found


def give_block(memory: Memory, block: Tensor, at: int, codec: Codec | None) -> Tensor:
    """Has `block` [2, KV_HEADS, SIZE, WIDTH] lie at its place, and returns what can be read there."""
    if codec is None:
        memory.give(bits(block), HOT_AT + 2 * at * NUMBERS)
        return block.float()
    codes, scales = codec.encode(block.flatten(2))
    memory.give(bits(codes), CODES_AT + (at - HOT_BLOCKS) * NUMBERS)
    memory.give(scales.numpy(), SCALES_AT + 4 * (at - HOT_BLOCKS) * 2 * KV_HEADS)
    return codec.decode(codes, scales).view(block.shape)


@pytest.mark.parametrize("codec", CODECS.values(), ids=str)
def test_few_rows_are_multiplied_by_split_inputs_and_leave_no_arrivals(
    kernels: Kernels, codec: Codec
) -> None:
    """Also by a second launch with what the first has left, as a graph that is replayed does."""
    codes, scales = coded(80, 1040, codec)
    x, bias, memory = normal(3, 1040, seed=2).bfloat16(), normal(80, seed=3).bfloat16(), Memory()
    out, parts, arrivals = (
        np.zeros((3, 80), np.int16),
        np.full((2, 3, 80), np.nan, np.float32),
        np.zeros(16, np.int32),
    )
    given = {"x": bits(x), "codes": bits(codes), "scales": scales.numpy(), "bias": bits(bias), "out": out}
    at = {
        name: memory.give(array) for name, array in (given | {"parts": parts, "arrivals": arrivals}).items()
    }
    (kernel,) = kernels[f"few rows {codec.name}"]
    exact = x.double() @ (codes.double() * scales.double()[:, None]).T + bias.double()
    for _ in range(2):
        out[:] = 0
        kernel.run((1, 2, 2), memory, **at, rows=3, outputs=80, inputs=1040, x_stride=1040, splits=2)
        torch.testing.assert_close(bf16(out).double(), exact, rtol=2**-7, atol=2**-6)
        assert not arrivals.any()


def test_parts_are_handed_over_behind_barriers(kernels: Kernels) -> None:
    """PTX ISA, "Memory Consistency Model": the barrier of a program orders the stores of all its threads before the
    arrival of one, which releases them to the GPU; the last to arrive acquires them, and a barrier hands them on. What
    others have stored is then read from the cache that they share (.cg), not from one's own."""
    statements = [one.text for one in parse(kernels["few rows fp8"][0].ptx).statements]
    arrival = next(at for at, text in enumerate(statements) if "atom.global" in text)
    assert "atom.global.gpu.acq_rel.add" in statements[arrival]
    reads = [at for at, text in enumerate(statements) if "ld.global.cg" in text]
    stores = [at for at, text in enumerate(statements[:arrival]) if "st.global" in text]
    resets = [at for at, text in enumerate(statements) if "st.global.b32" in text]
    assert stores
    assert min(reads) > arrival
    assert min(resets) > max(reads)
    assert barriers(statements[max(stores) : arrival])
    assert barriers(statements[arrival : min(reads)])


def barriers(statements: list[str]) -> bool:
    return any(text.startswith("bar.sync") for text in statements)
