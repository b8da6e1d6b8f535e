"""Paged attention over hot and compressed blocks, one launch for a step's prefill chunks and decodes alike.

    tile     up to BLOCK_M rows of one sequence: (token, query head of one KV head), heads of a token together
    program  one tile of one KV head, over all keys that its rows see, or over one of `splits` parts of them

A block that is compressed is read as its codes: int8 and e4m3 codes are numbers that bf16 holds exactly, so they go
into the matrix product as they are, and their scales are applied to its result:

    scores[m, n] = (q[m] . code_k[n]) * scale_k[n] * scale      out[m] += (p[m, n] * scale_v[n]) * code_v[n]

The softmax is taken online, in float32; split-K leaves unscaled sums that `_merge` puts together. Sources: Dao et al.,
"FlashAttention-2", https://arxiv.org/abs/2307.08691; Kwon et al., "PagedAttention", https://arxiv.org/abs/2309.06180;
Dao et al., "Flash-Decoding", https://pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from services.executor.triton_kernels.codes import code_to_float

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1.0e30)
"""Scores of keys that a row does not see. Not -inf: a row that sees none of a part would be inf - inf."""


@triton.jit
def _read(
    hot, codes, scales, block, at_key, head, inside, num_hot, side: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Keys (side 0) or values (1) [BLOCK_N, BLOCK_D] of `block` and the place in it `at_key`, both [BLOCK_N], and
    the factors [BLOCK_N] by which they are too small. CODE: 0 all blocks are hot, 1 int8, 2 e4m3, 3 as they are."""
    columns = tl.arange(0, BLOCK_D)
    wide = inside[:, None] & (columns < WIDTH)[None, :]
    row = (block.to(tl.int64) * 2 + side) * KV_HEADS + head
    is_hot = inside & (block < num_hot)
    place = (row * SIZE + at_key) * WIDTH
    data = tl.load(hot + place[:, None] + columns[None, :], mask=wide & is_hot[:, None], other=0.0)
    factor = tl.full(block.shape, 1.0, tl.float32)
    if CODE != 0:
        is_cold = inside & (block >= num_hot)
        cold_row = row - num_hot.to(tl.int64) * (2 * KV_HEADS)
        cold_place = (cold_row * SIZE + at_key) * WIDTH
        raw = tl.load(codes + cold_place[:, None] + columns[None, :], mask=wide & is_cold[:, None], other=0)
        data = tl.where(is_cold[:, None], code_to_float(raw, CODE).to(data.dtype), data)
        if CODE != 3:
            factor = tl.load(scales + cold_row, mask=is_cold, other=1.0)
    return data, factor


@triton.jit
def attend(
    query, out, parts, weights, hot, codes, scales, tables, table_starts, query_starts, context_lens,
    tile_sequence, tile_first, sinks, slopes, scale, softcap, window, num_hot, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CODE: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, splits).

    WIDE: products in float32 whatever the tensors are, for the interpreter, which knows no bf16.

    `query`, `out` [T, KV_HEADS, GROUP, WIDTH]; `parts` float32 [SPLITS, T, KV_HEADS, GROUP, WIDTH] and `weights`
    float32 [2, SPLITS, T, KV_HEADS, GROUP] (largest score, sum) take the place of `out` where SPLITS > 1.
    `hot`, `codes` [blocks, 2, KV_HEADS, SIZE, WIDTH], `scales` float32 [blocks, 2, KV_HEADS]; `tables` int32, each
    sequence's from its `table_starts`; `query_starts` int32 [S + 1]; `window` 0: none; `sinks`, `slopes` float32
    [KV_HEADS * GROUP]; `num_rows` is T. BLOCK_N is a multiple of SIZE, or divides it.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    context = tl.load(context_lens + sequence)
    table = tables + tl.load(table_starts + sequence)

    lanes = tl.arange(0, BLOCK_M)
    token = first + lanes // GROUP
    member = lanes % GROUP
    real = (token < query_len) & (lanes < (BLOCK_M // GROUP) * GROUP)
    position = context - query_len + token
    columns = tl.arange(0, BLOCK_D)
    row = ((query_start + token).to(tl.int64) * KV_HEADS + head) * GROUP + member
    wide = real[:, None] & (columns < WIDTH)[None, :]
    q = tl.load(query + row[:, None] * WIDTH + columns[None, :], mask=wide, other=0.0)

    if WIDE:
        q = q.to(tl.float32)

    oldest = context - query_len + first
    newest = tl.minimum(oldest + BLOCK_M // GROUP, context)
    begin = tl.where(window > 0, tl.maximum(oldest - window + 1, 0), 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(newest - begin, BLOCK_N), SPLITS) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, newest)

    largest = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # Counted once: a row's sink belongs to the first part of its keys.
        sink = tl.load(sinks + head * GROUP + member).to(tl.float32) * LOG2E
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, 1.0, total)
    slope = tl.load(slopes + head * GROUP + member) if SLOPES else 0.0
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        block = tl.load(table + key // SIZE, mask=inside, other=0)
        k, k_factor = _read(
            hot,
            codes,
            scales,
            block,
            key % SIZE,
            head,
            inside,
            num_hot,
            0,
            KV_HEADS,
            SIZE,
            WIDTH,
            BLOCK_D,
            CODE,
        )
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (k_factor * scale)[None, :]
        if CAPPED:
            squashed = tl.exp2(scores * (2.0 * LOG2E / softcap))
            scores = softcap * (1.0 - 2.0 / (squashed + 1.0))
        if SLOPES:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        seen &= (window <= 0) | (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * LOG2E, NEVER)
        higher = tl.maximum(largest, tl.max(scores, 1))
        p = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        keep = tl.exp2(largest - higher)
        total = total * keep + tl.sum(p, 1)
        v, v_factor = _read(
            hot,
            codes,
            scales,
            block,
            key % SIZE,
            head,
            inside,
            num_hot,
            1,
            KV_HEADS,
            SIZE,
            WIDTH,
            BLOCK_D,
            CODE,
        )
        p = (p * v_factor[None, :]).to(v.dtype)
        if WIDE:
            v = v.to(tl.float32)
            p = p.to(tl.float32)
        sums = sums * keep[:, None] + tl.dot(p, v, input_precision=PRECISION)
        largest = higher

    if SPLITS == 1:
        sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + row[:, None] * WIDTH + columns[None, :], sums.to(out.dtype.element_ty), mask=wide)
    else:
        stride = num_rows.to(tl.int64) * (KV_HEADS * GROUP)
        place = split * stride + row
        tl.store(parts + place[:, None] * WIDTH + columns[None, :], sums, mask=wide)
        tl.store(weights + place, largest, mask=real)
        tl.store(weights + SPLITS * stride + place, total, mask=real)


@triton.jit
def merge(
    parts, weights, out, first_row, num_rows,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HEADS), from row `first_row` on: puts the parts of `attend` together. BLOCK_S: SPLITS, up to a power of two."""
    row = (first_row + tl.program_id(0)).to(tl.int64) * HEADS + tl.program_id(1)
    stride = num_rows.to(tl.int64) * HEADS
    split = tl.arange(0, BLOCK_S)
    there = split < SPLITS
    largest = tl.load(weights + split * stride + row, mask=there, other=NEVER)
    total = tl.load(weights + SPLITS * stride + split * stride + row, mask=there, other=0.0)
    factor = tl.exp2(largest - tl.max(largest, 0))
    columns = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (columns < WIDTH)[None, :]
    sums = tl.load(parts + (split * stride + row)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    all_of_it = tl.sum(total * factor, 0)
    value = tl.sum(sums * factor[:, None], 0) / tl.where(all_of_it > 0.0, all_of_it, 1.0)
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=columns < WIDTH)
