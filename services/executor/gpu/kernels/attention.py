"""Paged attention over writable and compressed blocks, one launch for a step's prefill chunks or its decodes.

    tile     up to BLOCK_M rows of one sequence: (token, query head of one KV head), heads of a token together
    program  one tile of one KV head, over all keys that its rows see, or over one of `splits` parts of them

A row reads its own block as it was written, and earlier ones as they are kept (docs/adr/0024). A program's keys fall into
runs of turns, BLOCK_N keys each or, where both stores are read or keys are masked, EDGE keys, since that takes
registers; branches within a loop would keep loads from being pipelined. With compressed blocks:

    begin              a                          home of the last row
      │  all quantized   │    either, masked             │
      └ ─ ─ ─ ─ ─ ─ ─ ─ ─└ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘           by the block table
                                │  as written, masked      │
                                └ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘         by the rows' slots
                            home of the first row           end

Without them a block has one form, and the runs are those that every row sees whole, and the masked rest.

The softmax is taken online, in float32, in powers of two; split-K leaves unscaled sums that `merge` puts together.
Sources: Dao et al., "FlashAttention-2", https://arxiv.org/abs/2307.08691; Kwon et al., "PagedAttention",
https://arxiv.org/abs/2309.06180; Dao et al., "Flash-Decoding", https://pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from services.executor.gpu.kernels.attention_inner import (
    ALL,
    BOTH,
    KEPT,
    LOG2E,
    NEVER,
    OWN,
    QUANTIZED,
    WRITABLE,
    quantized_turn,
    turn,
)

ENTRIES = tl.constexpr(256)  # of a block table, looked at together


@triton.jit
def _entries(table, start, end, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_N]: the blocks of the keys from `start` on; beyond `end` the first of all."""
    key = start + tl.arange(0, BLOCK_N)
    return tl.load(table + key // SIZE, mask=key < end, other=0)


@triton.jit
def _own_entries(slots, chunk, start, end, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_N]: the blocks that the keys from `start` on were written to, by `slots` of the sequence's rows, of
    which the first is at position `chunk`; that one's block may have been begun by an earlier step."""
    key = start + tl.arange(0, BLOCK_N)
    row = tl.maximum(key // SIZE * SIZE - chunk, 0)
    return tl.maximum(tl.load(slots + row, mask=key < end, other=0), 0) // SIZE


@triton.jit
def _first_writable(table, begin, end, num_writable, SIZE: tl.constexpr):
    """The first key of a writable block; `end` where there is none."""
    first_writable = end
    for at in range(begin // SIZE, tl.cdiv(end, SIZE), ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        there = entry * SIZE < end
        is_writable = tl.load(table + entry, mask=there, other=0) < num_writable
        first_writable = tl.minimum(first_writable, tl.min(tl.where(there & is_writable, entry * SIZE, end), 0))
    return first_writable


@triton.jit
def _rows(
    query_start, query_len, first, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Which rows [BLOCK_M] of all (token, KV head, query head of it) a tile has, and which of them there are."""
    lanes = tl.arange(0, BLOCK_M)
    token = first + lanes // GROUP
    real = (token < query_len) & (lanes < TOKENS * GROUP)
    return ((query_start + token).to(tl.int64) * KV_HEADS + head) * GROUP + lanes % GROUP, real


@triton.jit
def _question(
    query, row, real, q_unit, first: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_D // STEP]: every STEP-th column of the rows from `first` on, over `q_unit`; HALF: in float16."""
    columns = first + tl.arange(0, BLOCK_D // STEP) * STEP
    wide = real[:, None] & (columns < WIDTH)[None, :]
    q = tl.load(query + row[:, None] * WIDTH + columns[None, :], mask=wide, other=0.0).to(tl.float32) / q_unit
    if HALF:
        q = q.to(tl.float16)
    return q


@triton.jit(
    do_not_specialize=["window", "num_writable", "first_row", "num_rows", "splits", "head_stride"],
    do_not_specialize_on_alignment=["slots", "tables", "table_starts", "query_starts", "context_lens", "tile_sequence", "tile_first"],
)  # fmt: skip
def attend(
    query, out, parts, weights, writable, codes, words, scales, slots, tables, table_starts, query_starts, context_lens,
    tile_sequence, tile_first, sinks, slopes, scale, softcap, window, num_writable, first_row, num_rows, splits,
    head_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, CODE: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, FIRST: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr, WRITABLE_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, `splits`). TOKENS: of a tile; with one alone, and keys that are not split, a row's bits are
    a function of its query, its position and what it reads: turns are cut by its position.

    WIDE: products in float32 whatever the tensors are, for the interpreter, which knows no bf16. HALF: codes become
    float16. WORDS: they are read from `words` int32, which are `codes` four by four.

    `query`, `out` [T, KV_HEADS, GROUP, WIDTH]; with SPLIT `parts` float32 [splits, R, KV_HEADS, GROUP, WIDTH] and
    `weights` float32 [2, splits, R, KV_HEADS, GROUP] (largest score, sum) of the R = `num_rows` rows from `first_row`
    on take the place of `out`; a part has LEAST turns or more, so long as there are keys.
    `writable`, `codes` [blocks, 2, KV_HEADS, SIZE, WIDTH], `scales` float32 [blocks, 2, KV_HEADS]; `slots` int32 [T]; `tables` int32, each
    sequence's from its `table_starts`, `head_stride` later for each KV head; `query_starts` int32 [S + 1]; `sinks`, `slopes` float32 [KV_HEADS * GROUP].
    CODE: 0 all blocks are writable, 1 int8, 2 e4m3, 3 as they are. FIRST: keys at positions before it are seen by their own
    rows alone, for which WINDOWED must be set. A sequence without keys gets zeros.
    """
    # The last tiles of a chunk see the most keys: they go first, so that none is left over at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, split = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    context = tl.load(context_lens + sequence)
    table = tables + tl.load(table_starts + sequence) + head * head_stride

    lanes = tl.arange(0, BLOCK_M)
    member = lanes % GROUP
    position = context - query_len + first + lanes // GROUP
    columns = tl.arange(0, BLOCK_D)
    row, real = _rows(query_start, query_len, first, head, KV_HEADS, GROUP, BLOCK_M, TOKENS)
    wide = real[:, None] & (columns < WIDTH)[None, :]
    q = tl.load(query + row[:, None] * WIDTH + columns[None, :], mask=wide, other=0.0)

    oldest = context - query_len + first
    newest = tl.minimum(oldest + TOKENS, context)
    begin = tl.maximum(oldest - window + 1, 0) // BLOCK_N * BLOCK_N
    end = newest
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(newest - begin, BLOCK_N), splits), LEAST) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, newest)

    if FIRST > 0:
        window = tl.minimum(window, tl.maximum(position + 1 - FIRST, 1))[:, None]
    largest = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if SLOPES:
        slope = tl.load(slopes + head * GROUP + member)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    unit = 0.0
    q_unit = 1.0

    block = _entries(table, begin, end, SIZE, BLOCK_N)
    if CODE != 0:
        chunk = context - query_len
        home = tl.maximum(oldest, 0) // SIZE * SIZE
        full_end = tl.minimum(tl.maximum(newest - 1, 0) // SIZE * SIZE, end)
        first_writable = tl.minimum(_first_writable(table, begin, full_end, num_writable, SIZE), home)
        a = tl.maximum(begin, tl.minimum(first_writable // BLOCK_N * BLOCK_N, end))
        if CODE != 3:
            unit = 1.0e-30
            if q.dtype != tl.float32 and (WORDS or BLOCK_D <= 256):
                # Over the power of two below the largest number, so that float16 holds what bf16 does.
                bits = tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0).to(tl.int32, bitcast=True) & 0x7F800000
                q_unit = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
        if WORDS:
            q0 = _question(query, row, real, q_unit, 0, 4, WIDTH, BLOCK_D, HALF)
            q1 = _question(query, row, real, q_unit, 1, 4, WIDTH, BLOCK_D, HALF)
            q2 = _question(query, row, real, q_unit, 2, 4, WIDTH, BLOCK_D, HALF)
            q3 = _question(query, row, real, q_unit, 3, 4, WIDTH, BLOCK_D, HALF)
            sums0 = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            sums1 = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            sums2 = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            sums3 = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            for start in tl.range(begin, a, BLOCK_N, num_stages=STAGES):
                following = _entries(table, start + BLOCK_N, end, SIZE, BLOCK_N)
                largest, total, sums0, sums1, sums2, sums3, unit = quantized_turn(
                    q0, q1, q2, q3, q_unit, words, scales, block, start, end, head, position, scale, softcap, window,
                    slope, num_writable, largest, total, sums0, sums1, sums2, sums3, unit, KV_HEADS, SIZE, WIDTH, BLOCK_M,
                    BLOCK_N, CODE, CAPPED, WINDOWED, SLOPES, PRECISION, WIDE, HALF,
                )  # fmt: skip
                block = following
            sums = tl.interleave(tl.interleave(sums0, sums2), tl.interleave(sums1, sums3))
        else:
            q_quantized = q
            if CODE != 3 and q.dtype != tl.float32 and BLOCK_D <= 256:  # more would not fit beside them
                q_quantized = _question(query, row, real, q_unit, 0, 1, WIDTH, BLOCK_D, HALF)
            for start in tl.range(begin, a, BLOCK_N, num_stages=STAGES):
                following = _entries(table, start + BLOCK_N, end, SIZE, BLOCK_N)
                largest, total, sums, unit = turn(
                    q_quantized, q_unit, writable, codes, scales, block, start, end, head, position, scale, softcap, window, slope,
                    num_writable, largest, total, sums, unit, KV_HEADS, SIZE, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, CODE, CAPPED,
                    WINDOWED, SLOPES, PRECISION, WIDE, QUANTIZED, WINDOWED, ALL,
                )  # fmt: skip
                block = following
        if CODE != 3:
            sums = sums * unit
        for start in tl.range(a, full_end, EDGE, num_stages=1):
            near = _entries(table, start, full_end, SIZE, EDGE)
            largest, total, sums, unit = turn(
                q, q_unit, writable, codes, scales, near, start, full_end, head, position, scale, softcap, window, slope,
                num_writable, largest, total, sums, unit, KV_HEADS, SIZE, WIDTH, BLOCK_D, BLOCK_M, EDGE, CODE, CAPPED,
                WINDOWED, SLOPES, PRECISION, WIDE, BOTH, True, KEPT,
            )  # fmt: skip
        for start in tl.range(tl.maximum(begin, home), end, EDGE, num_stages=1):
            near = _own_entries(slots + query_start, chunk, start, end, SIZE, EDGE)
            largest, total, sums, unit = turn(
                q, q_unit, writable, codes, scales, near, start, end, head, position, scale, softcap, window, slope, num_writable,
                largest, total, sums, unit, KV_HEADS, SIZE, WIDTH, BLOCK_D, BLOCK_M, EDGE, CODE, CAPPED, WINDOWED,
                SLOPES, PRECISION, WIDE, WRITABLE, True, OWN,
            )  # fmt: skip
    else:
        clear = tl.minimum((oldest + 1) // BLOCK_N * BLOCK_N, end)
        for start in tl.range(begin, clear, BLOCK_N, num_stages=WRITABLE_STAGES):
            following = _entries(table, start + BLOCK_N, end, SIZE, BLOCK_N)
            largest, total, sums, unit = turn(
                q, q_unit, writable, codes, scales, block, start, end, head, position, scale, softcap, window, slope, num_writable,
                largest, total, sums, unit, KV_HEADS, SIZE, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, CODE, CAPPED, WINDOWED,
                SLOPES, PRECISION, WIDE, WRITABLE, WINDOWED, ALL,
            )  # fmt: skip
            block = following
        for start in tl.range(tl.maximum(begin, clear), end, EDGE, num_stages=1):
            near = _entries(table, start, end, SIZE, EDGE)
            largest, total, sums, unit = turn(
                q, q_unit, writable, codes, scales, near, start, end, head, position, scale, softcap, window, slope, num_writable,
                largest, total, sums, unit, KV_HEADS, SIZE, WIDTH, BLOCK_D, BLOCK_M, EDGE, CODE, CAPPED, WINDOWED,
                SLOPES, PRECISION, WIDE, WRITABLE, True, ALL,
            )  # fmt: skip

    if SINKS:
        # Weighed after the keys, whose weights float16 would lose beside a sink a thousand times as large; counted once: a
        # row's sink belongs to the first part of its keys.
        sink = tl.load(sinks + head * GROUP + member).to(tl.float32) * LOG2E
        if SLOPES:
            # Turns count from the row's own position, which changes no weight if all are counted so.
            sink -= slope * LOG2E * position.to(tl.float32)
        higher = tl.where(split == 0, tl.maximum(largest, sink), largest)
        keep = tl.exp2(largest - higher)
        total = total * keep + tl.where(split == 0, tl.exp2(sink - higher), 0.0)
        sums = sums * keep[:, None]
        largest = higher

    # Found anew: kept through all turns, the rows' places would take registers that the sums need.
    again = tl.load(tile_first + tile, volatile=True)
    row, real = _rows(query_start, query_len, again, head, KV_HEADS, GROUP, BLOCK_M, TOKENS)
    wide = real[:, None] & (columns < WIDTH)[None, :]
    if not SPLIT:
        sums = sums / tl.where(total != 0.0, total, 1.0)[:, None]
        tl.store(out + row[:, None] * WIDTH + columns[None, :], sums.to(out.dtype.element_ty), mask=wide)
    else:
        heads = KV_HEADS * GROUP
        stride = num_rows.to(tl.int64) * heads
        place = split * stride + row - first_row.to(tl.int64) * heads
        tl.store(weights + place, largest, mask=real)
        tl.store(weights + splits * stride + place, total, mask=real)
        # What `merge` does not read need not be written: a part whose keys a row does not see has a total of 0.
        tl.store(parts + place[:, None] * WIDTH + columns[None, :], sums, mask=wide & (total != 0.0)[:, None])


@triton.jit(do_not_specialize=["first_row", "num_rows", "splits"], do_not_specialize_on_alignment=["rows"])
def merge(
    parts, weights, out, rows, first_row, num_rows, splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (`num_rows`, HEADS): the parts of `attend`, put together into the rows of `out` from `first_row` on; BOUNDED:
    those from the first to the second of `rows` int32 [2] alone. BLOCK_S: `splits`, up to a power of two."""
    if BOUNDED:
        at = first_row + tl.program_id(0)
        if (at < tl.load(rows)) | (at >= tl.load(rows + 1)):
            return
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    stride = num_rows.to(tl.int64) * HEADS
    split = tl.arange(0, BLOCK_S)
    there = split < splits
    largest = tl.load(weights + split * stride + row, mask=there, other=NEVER)
    total = tl.load(weights + splits * stride + split * stride + row, mask=there, other=0.0)
    there &= total != 0.0
    factor = tl.exp2(largest - tl.max(largest, 0))
    columns = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (columns < WIDTH)[None, :]
    sums = tl.load(parts + (split * stride + row)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    all_of_it = tl.sum(total * factor, 0)
    value = tl.sum(sums * factor[:, None], 0) / tl.where(all_of_it != 0.0, all_of_it, 1.0)
    place = row + first_row.to(tl.int64) * HEADS
    tl.store(out + place * WIDTH + columns, value.to(out.dtype.element_ty), mask=columns < WIDTH)
