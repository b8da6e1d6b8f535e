"""Products with weights of 2 to 8 bits that have scales for groups of inputs: `model/quantized.py` on a GPU.

Codes are packed in tiles of 64 outputs and blocks of 256 inputs, one after the other, so that a program streams:

    block of a row     32 lanes of 8 codes; lane j of part p is input 32 p + j
                       16 lanes, so 128 inputs, where groups are of 16 inputs, or of any that 32 do not divide

        4 bits    a word of 32 bits for each lane, part p in its bits 4 p to 4 p + 3; lowest bits of 5 and 6, too
        2 bits    16 bits for each lane, part p in its bits 2 p and 2 p + 1; lowest bits of 3, and highest of 6
        1 bit     8 bits for each lane, part p in bit p: the highest of 3 and 5
        8 bits    two words for each lane: parts 0 to 3, parts 4 to 7

A part is a tile for the tensor cores, and groups are whole parts: nothing is moved between lanes. Codes
less their zero point are whole numbers that bf16 holds exactly: they are multiplied in bf16 with float32 sums, and a
group's scale is applied to its sum, as it is in the file:

    out[t, n] = sum over groups of (sum of x[t, k] * (code[n, k] - zero) * scale - sum of x[t, k] * minimum) + bias

To bf16 a code of up to six bits comes as the last bits of 128, 0x4300, whose unit in the last place is one.
Many rows are multiplied by weights that are widened to bf16, a part at a time.

Sources: the formats of `model/quantized.py`; Frantar et al., "Marlin", https://arxiv.org/abs/2408.11743, for packing at
load in the order in which programs read; split-K as in `matmul.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.gpu.kernels.matmul import BLOCK_N, MatmulTiles, add_splits, room_for_splits

PARTS = 8
STAGES = 3  # blocks on their way: 4 to 16 KB of weights each
GATHERED = 16  # rows that a program looks up
_ROW_PARTS = ("codes", "high", "scales", "zeros", "mins", "supers", "super_mins")


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A weight [outputs, inputs]: codes and scales of `model/quantized.py`, as the kernels read them."""

    outputs: int
    inputs: int  # of the layer
    columns: int  # of codes
    bits: int
    # int32, of 2 and 3 bits int16 [tiles, blocks, 64, lanes]; of 8 bits int32 [tiles, blocks, 2, 64, lanes]
    codes: Tensor
    high: Tensor | None  # int16 or int8 [tiles, blocks, 64, lanes]: the highest bits
    # [tiles, groups, 64]; so are `zeros`, `mins`, and of fewer groups `supers` and `super_mins`
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    supers: Tensor | None
    super_mins: Tensor | None
    groups: int  # of a block: 1, 2, 4 or 8
    run: int  # blocks of a group, where it is at least one
    super_run: int  # blocks under one of `supers`
    offset: int
    table: tuple[int, ...]  # sixteen, or none
    order: Tensor | None  # int64 [columns]: the input of each column
    idle: Tensor | None  # bool [columns]: columns that stand for no input, where there are some

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def blocks(self) -> int:
        return self.codes.shape[1]

    @property
    def lanes(self) -> int:
        """16 or 32."""
        return self.codes.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for name in _ROW_PARTS if (part := getattr(self, name)) is not None)

    def can_precede(self, other: "PackedRows") -> bool:
        """Whether the outputs of `other` may follow in the same tensors: whole tiles, of one format."""
        return self.outputs % BLOCK_N == 0 and self.layout() == other.layout() and self._same_order(other)

    @classmethod
    def joined(cls, weights: Sequence["PackedRows"]) -> "PackedRows":
        """Their outputs end to end; each `can_precede` the next."""
        return replace(cls.stacked(weights), outputs=sum(weight.outputs for weight in weights))

    @staticmethod
    def stacked(weights: Sequence["PackedRows"]) -> "PackedRows":
        """One after the other, of one format; `outputs` are those of one."""
        first = weights[0]
        parts = {
            name: torch.cat([getattr(weight, name) for weight in weights])
            for name in _ROW_PARTS
            if getattr(first, name) is not None
        }
        return replace(first, **parts)  # type: ignore[arg-type]

    def layout(self) -> tuple[object, ...]:
        """All but the numbers and how many outputs there are."""
        parts = [getattr(self, name) for name in _ROW_PARTS]
        kinds = [None if part is None else (part.dtype, part.shape[1:]) for part in parts]
        sizes = (self.bits, self.inputs, self.columns, self.groups, self.run, self.super_run, self.offset)
        return (*sizes, self.table, *kinds)

    def _same_order(self, other: "PackedRows") -> bool:
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order) and (self.idle is None) == (other.idle is None)


@triton.jit
def words_of(codes, high, place, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """int32: the words of block `place`, SIZE of each kind, at `inside`; then those of the highest bits; of 8 bits, of the
    last four parts. Where all codes are in the first, those again."""
    if BITS == 8:
        low = tl.load(codes + place * (2 * SIZE) + inside)
        top = tl.load(codes + place * (2 * SIZE) + SIZE + inside)
    else:
        low = tl.load(codes + place * SIZE + inside).to(tl.int32)
        top = low
    if BITS == 3 or BITS == 5 or BITS == 6:
        top = tl.load(high + place * SIZE + inside).to(tl.int32)
    return low, top


@triton.jit
def codes_of(low, high, PART: tl.constexpr, BITS: tl.constexpr):
    """int32: the codes of a part, of `words_of` a block."""
    if BITS == 8:
        word = high if PART >= 4 else low
        return (word >> (8 * (PART % 4))) & 255
    if BITS < 4:
        code = (low >> (2 * PART)) & 3
        if BITS == 3:
            code |= ((high >> PART) & 1) << 2
        return code
    code = (low >> (4 * PART)) & 15
    if BITS == 5:
        code |= ((high >> PART) & 1) << 4
    if BITS == 6:
        code |= ((high >> (2 * PART)) & 3) << 4
    return code


@triton.jit
def of_table(code, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """int32: the entries, of which four lie in each word, lowest byte first."""
    below = tl.where((code & 4) == 0, T0, T1)
    above = tl.where((code & 4) == 0, T2, T3)
    word = tl.where((code & 8) == 0, below, above)
    return (word >> ((code & 3) * 8)) << 24 >> 24


@triton.jit
def _whole_numbers(
    code, zero, OFFSET: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What the codes stand for but for scale and minimum, exactly: in bf16; WIDE: in float32. `zero`: int32, for each
    row."""
    if TABLE:
        number = of_table(code, T0, T1, T2, T3)
        if ZEROS:
            number -= zero[:, None]
        made = number.to(tl.float32)
        if not WIDE:
            made = made.to(tl.bfloat16)
    elif WIDE or BITS == 8:
        number = code - OFFSET
        if ZEROS:
            number -= zero[:, None]
        made = number.to(tl.float32)
        if not WIDE:
            made = made.to(tl.bfloat16)
    else:
        made = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        if ZEROS:
            made -= (zero | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        else:
            made -= 128.0 + OFFSET
    return made


@triton.jit
def grouped_sums(
    of_x, codes, high, scales, zeros, mins, supers, super_mins,
    tile, begin, end, columns, blocks, run, super_run,
    BLOCK_T: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32 [TILE, BLOCK_T]: the outputs of `tile` for tokens at `of_x` [1, BLOCK_T], over the blocks from `begin` to
    `end`; all else as of `few_rows_grouped_kernel`."""
    row, lane = tl.arange(0, TILE), tl.arange(0, LANES)
    inside = row[:, None] * LANES + lane[None, :]
    ones = tl.full([TILE, LANES], 1.0, tl.float32 if WIDE else tl.bfloat16)
    of_groups = tl.cdiv(blocks, run) * GROUPS
    of_supers = tl.cdiv(blocks, super_run)
    first = tile.to(tl.int64) * blocks
    sums = tl.zeros([TILE, BLOCK_T], tl.float32)
    for block in range(begin, end):
        low, top = words_of(codes, high, first + block, inside, LANES * TILE, BITS)
        if SUPERS:
            place = (tile * of_supers + block // super_run) * TILE + row
            over = tl.load(supers + place).to(tl.float32)
            if MINS:
                under = tl.load(super_mins + place).to(tl.float32)
        for part in tl.static_range(8):
            if part % (8 // GROUPS) == 0:
                at = (tile * of_groups + (block // run) * GROUPS + part // (8 // GROUPS)) * TILE + row
                scale = tl.load(scales + at).to(tl.float32)
                zero = row
                if ZEROS:
                    zero = tl.load(zeros + at).to(tl.int32)
                if MINS:
                    least = tl.load(mins + at).to(tl.float32)
                    total = tl.zeros([TILE, BLOCK_T], tl.float32)
                inner = tl.zeros([TILE, BLOCK_T], tl.float32)
            k = block * (8 * LANES) + part * LANES + lane
            if EVEN:
                values = tl.load(of_x + k[:, None])
            else:
                values = tl.load(of_x + k[:, None], mask=(k < columns)[:, None], other=0.0)
            if WIDE:
                values = values.to(tl.float32)
            code = codes_of(low, top, part, BITS)
            weights = _whole_numbers(code, zero, OFFSET, ZEROS, BITS, TABLE, T0, T1, T2, T3, WIDE)
            inner = tl.dot(weights, values, inner, input_precision="ieee")
            if MINS:
                # Sums of activations for all rows of the tile: adding them up between threads takes longer.
                total = tl.dot(ones, values, total, input_precision="ieee")
            if part % (8 // GROUPS) == 8 // GROUPS - 1:
                if SUPERS:
                    scale *= over
                sums += inner * scale[:, None]
                if MINS:
                    if SUPERS:
                        least *= under
                    sums -= least[:, None] * total
    return sums


@triton.jit(do_not_specialize=["rows", "splits"])  # else a step of 16 rows compiles what one of 15 has
def few_rows_grouped_kernel(
    x, codes, high, scales, zeros, mins, supers, super_mins, bias, out, parts, arrivals,
    rows, outputs, columns, blocks, run, super_run, x_stride, splits,
    BLOCK_T: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(rows, BLOCK_T), tiles, splits). `x` bf16 [rows, columns], rows `x_stride` apart; the weight as
    `PackedRows` has it; `out` bf16 [rows, outputs]; `parts` and `arrivals` as of `few_rows_kernel`. EVEN: whole
    blocks of `columns`. WIDE: products in float32, for the interpreter."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * TILE + tl.arange(0, TILE)
    t = group * BLOCK_T + tl.arange(0, BLOCK_T)
    share = tl.cdiv(blocks, splits)
    begin = split * share
    end = tl.minimum(begin + share, blocks)
    # Rows beyond the last are the last one again: their products are nowhere stored.
    of_x = x + tl.minimum(t, rows - 1).to(tl.int64)[None, :] * x_stride
    sums = grouped_sums(
        of_x, codes, high, scales, zeros, mins, supers, super_mins, tile, begin, end, columns, blocks, run, super_run,
        BLOCK_T, TILE, LANES, BITS, GROUPS, ZEROS, MINS, SUPERS, OFFSET, TABLE, T0, T1, T2, T3, EVEN, WIDE,
    )  # fmt: skip
    add_splits(
        sums, bias, bias, out, parts, arrivals, t, n, rows, outputs, splits, tile * tl.num_programs(0) + group, split,
        SPLIT, 3, BIAS,
    )  # fmt: skip


@triton.jit
def widen_rows_kernel(
    index, codes, high, scales, zeros, mins, supers, super_mins, out,
    first, rows, columns, blocks, run, super_run,
    ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(rows, ROWS), blocks): row i of `out` [rows, columns] is the weight's row `first` + i; where INDEX, that
    of `index` [rows]."""
    i, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    block = tl.program_id(1)
    n = first + i
    if INDEX:
        n = tl.load(index + i, mask=i < rows, other=0).to(tl.int32)
    tile, row = n // TILE, n % TILE
    if not INDEX:  # rows of tiles that end with them
        n = tl.minimum(n, first + rows - 1)
        tile, row = n // TILE, n % TILE
    place = tile.to(tl.int64) * blocks + block
    inside = row[:, None] * LANES + lane[None, :]
    low, top = words_of(codes, high, place[:, None], inside, LANES * TILE, BITS)
    of_groups = tl.cdiv(blocks, run) * GROUPS
    of_supers = tl.cdiv(blocks, super_run)
    for part in tl.static_range(8):
        at = (tile * of_groups + (block // run) * GROUPS + part // (8 // GROUPS)) * TILE + row
        scale = tl.load(scales + at).to(tl.float32)
        above = (tile * of_supers + block // super_run) * TILE + row
        if SUPERS:
            scale *= tl.load(supers + above).to(tl.float32)
        zero = row
        if ZEROS:
            zero = tl.load(zeros + at).to(tl.int32)
        code = codes_of(low, top, part, BITS)
        values = _whole_numbers(code, zero, OFFSET, ZEROS, BITS, TABLE, T0, T1, T2, T3, True) * scale[:, None]
        if MINS:
            least = tl.load(mins + at).to(tl.float32)
            if SUPERS:
                least *= tl.load(super_mins + above).to(tl.float32)
            values -= least[:, None]
        k = block * (8 * LANES) + part * LANES + lane
        tl.store(
            out + i.to(tl.int64)[:, None] * columns + k[None, :],
            values.to(out.dtype.element_ty),
            mask=(i < rows)[:, None] & (k < columns)[None, :],
        )


def multiply_grouped(
    x: Tensor, weight: PackedRows, bias: Tensor | None, arrivals: Tensor, cut: MatmulTiles, out: Tensor
) -> None:
    """Fills `out` [T, outputs], contiguous, from `x` [T, columns], T up to `MOST_ROWS` and at least one, times `weight`, plus
    `bias`. `arrivals` as of `multiply_few`."""
    rows, parts = len(x), room_for_splits(out, cut.splits)
    few_rows_grouped_kernel[(triton.cdiv(rows, cut.block_t), cut.tiles, cut.splits)](
        x, *tensors_of(weight), out if bias is None else bias, out, parts, arrivals,
        rows, weight.outputs, weight.columns, weight.blocks, weight.run, weight.super_run, x.stride(0), cut.splits,
        BLOCK_T=cut.block_t, TILE=BLOCK_N, LANES=weight.lanes, SPLIT=cut.splits > 1, num_stages=STAGES, **constants_of(weight),
        EVEN=weight.columns % (PARTS * weight.lanes) == 0, BIAS=bias is not None, WIDE=x.device.type == "cpu",
    )  # fmt: skip


def widened(weight: PackedRows, first: int, out: Tensor, index: Tensor | None = None) -> None:
    """Fills `out` [rows, columns] with rows of `weight`: those from `first` on, or those of `index`, integers [rows]."""
    rows = len(out)
    if not rows:
        return
    step = BLOCK_N if index is None else GATHERED
    widen_rows_kernel[(triton.cdiv(rows, step), weight.blocks)](
        weight.codes if index is None else index, *tensors_of(weight), out,
        first, rows, weight.columns, weight.blocks, weight.run, weight.super_run,
        ROWS=step, TILE=BLOCK_N, LANES=weight.lanes, INDEX=index is not None, **constants_of(weight),
    )  # fmt: skip


def tensors_of(weight: PackedRows) -> list[Tensor]:
    """In the kernels' order; one that there is not is never read."""
    parts = (weight.high, weight.scales, weight.zeros, weight.mins, weight.supers, weight.super_mins)
    return [weight.codes, *(weight.scales if part is None else part for part in parts)]


def constants_of(weight: PackedRows) -> dict[str, int | bool]:
    words = [0, 0, 0, 0]
    for at, entry in enumerate(weight.table):
        words[at // 4] |= (entry & 255) << (8 * (at % 4))
    signed = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
    return {
        "BITS": weight.bits,
        "GROUPS": weight.groups,
        "ZEROS": weight.zeros is not None,
        "MINS": weight.mins is not None,
        "SUPERS": weight.supers is not None,
        "OFFSET": weight.offset,
        "TABLE": bool(weight.table),
        **{f"T{at}": word for at, word in enumerate(signed)},
    }
