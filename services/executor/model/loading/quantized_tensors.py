"""Tensors that a checkpoint holds as codes and scales: read by boxes, as codes or as the values they stand for.

A `CodedTensor` goes by the name and has the shape of the model's parameter; which tensors of the checkpoint it is made
of is `quantization_schemes.py`'s. Codes and scales are the file's own. Where they fit `QuantizedRows` they are kept so.

    Gptq             qweight, scales, qzeros, g_idx      github.com/AutoGPTQ/AutoGPTQ, ModelCloud/GPTQModel
    Awq              qweight, scales, qzeros             github.com/casper-hansen/AutoAWQ, "GEMM"
    PackedIntegers   weight_packed, weight_scale, ...    github.com/vllm-project/compressed-tensors, "pack-quantized"
    Integers         weight, weight_scale                the same, "int-quantized"
    Fp8              weight, weight_scale(_inv)          the same, "float-quantized"; arxiv.org/abs/2412.19437, 3.3
    Mxfp4            blocks, scales                      OCP Microscaling Formats 1.0; github.com/openai/gpt-oss
    Nf4              weight, absmax, ...                 arxiv.org/abs/2305.14314; github.com/bitsandbytes-foundation
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.executor.core.sharding import ShardRange
from services.executor.model.quantized import E2M1, E4M3, QuantizedRows, half_powers

Box = tuple[slice, ...]  # a slice [start, stop) of each dimension
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WORD = 32  # bits
_ROWS = 256  # that are unpacked at once where it takes eight bytes for each code
_FLOATS_TOGETHER = 4
_STEP = 16  # inputs at whose multiples `QuantizedRows` can be cut


class CodedTensor(ABC):
    """Raises `ValueError`, one sentence without the tensor's name, where it is made of or holds what makes no sense."""

    shape: tuple[int, ...]
    has_products = False  # whether kernels multiply by its codes, of a matrix at least; others are unpacked
    outputs_first = False  # of experts, whether it is [experts, out, in] where the model has [experts, in, out]

    @abstractmethod
    def values(self, box: Box) -> Tensor:
        """float32, finite: what the codes in `box` stand for."""

    def matrix(self, number: int) -> "CodedTensor":
        """One of several, which a tensor of three dimensions is."""
        raise ValueError("it is one matrix")

    def rows(self, rows: ShardRange, columns: ShardRange) -> QuantizedRows | None:
        """The codes of a weight [out, in]; None where they have no products or cannot be cut there."""
        return None


class CodedRows(CodedTensor):
    """A weight [out, in] that fits `QuantizedRows`."""

    shape: tuple[int, int]
    has_products = True
    bits: int
    group: int  # inputs that share a scale
    g_idx: Tensor | None = None  # [in]: the group of each input, where they may lie otherwise

    def rows(self, rows: ShardRange, columns: ShardRange) -> QuantizedRows | None:
        inputs, order = self.shape[1], self._order()
        if self.group == inputs:
            return self._made(rows, self._codes(rows, columns), slice(0, 1), None)
        if columns.start % _STEP or columns.stop % _STEP:
            return None
        if order is not None:
            codes = torch.zeros(rows.size, inputs, dtype=torch.uint8)
            codes[:, columns.start : columns.stop] = self._codes(rows, columns)
            made = self._made(rows, codes[:, order.long()], slice(0, inputs // self.group), order)
            return made if columns.size == inputs else made.columns(columns.start, columns.stop)
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        around = ShardRange(groups.start * self.group, groups.stop * self.group)
        made = self._made(rows, self._codes(rows, around), groups, None)
        if around == columns:
            return made
        return made.columns(columns.start - around.start, columns.stop - around.start)

    def values(self, box: Box) -> Tensor:
        rows, columns = (ShardRange(cut.start, cut.stop) for cut in box)
        first = columns.start // _STEP * _STEP
        around = ShardRange(first, min(-(-columns.stop // _STEP) * _STEP, self.shape[1]))
        held = self.rows(rows, around)
        assert held is not None, "a cut at multiples of 16 is exact"
        return _finite(held.dequantized()[:, columns.start - first : columns.stop - first])

    @abstractmethod
    def _codes(self, rows: ShardRange, columns: ShardRange) -> Tensor:
        """uint8 [rows, columns], in the order of the inputs"""

    @abstractmethod
    def _scales_of(self, rows: ShardRange, groups: slice) -> tuple[Tensor, Tensor]:
        """(scales [rows, groups], zero points int16 [rows, groups])"""

    def _made(self, rows: ShardRange, codes: Tensor, groups: slice, order: Tensor | None) -> QuantizedRows:
        scales, zeros = self._scales_of(rows, groups)
        parts = {"codes": codes.contiguous(), "bits": self.bits, "group": codes.shape[1] // scales.shape[1]}
        parts |= {"scales": scales.contiguous(), "permutation": order}
        if self._zero is not None:
            return QuantizedRows(offset=self._zero, **parts)  # type: ignore[arg-type]
        if bool((zeros < 0).any()) or bool((zeros > 255).any()):
            raise ValueError("its zero points are beyond eight bits")
        return QuantizedRows(zeros=zeros.to(torch.uint8).contiguous(), **parts)  # type: ignore[arg-type]

    @cached_property
    def _zero(self) -> int | None:
        """The zero point of all groups, where they have the same: then all rows have one format."""
        _, zeros = self._scales_of(ShardRange(0, self.shape[0]), slice(0, self.shape[1] // self.group))
        same = int(zeros[0, 0])
        return same if 0 <= same < 256 and bool((zeros == same).all()) else None

    def _order(self) -> Tensor | None:
        """int32 [in]: the inputs by group, where they do not lie so."""
        g_idx, inputs, group = self.g_idx, self.shape[1], self.group
        if g_idx is None or torch.equal(g_idx.long(), torch.arange(inputs) // group):
            return None
        if bool((g_idx == -1).all()):
            return None  # compressed-tensors' where there is no order
        groups = inputs // group
        fits = bool((g_idx >= 0).all()) and bool((g_idx < groups).all())
        if not fits or not bool((g_idx.long().bincount(minlength=groups) == group).all()):
            raise ValueError(f"its g_idx does not give each of {groups} groups {group} of the {inputs} inputs")
        return g_idx.argsort(stable=True).int()


class Gptq(CodedRows):
    """Codes of 2, 3, 4 or 8 bits, packed along the inputs; zero points along the outputs."""

    def __init__(
        self, qweight: Tensor, scales: Tensor, qzeros: Tensor, g_idx: Tensor | None, bits: int, group: int, shift: int
    ) -> None:
        """`group` 0: the row; `shift` is what is added to zero points: 1 in the format's first version."""
        _expect("qweight", qweight, (torch.int32,), (None, None))
        inputs, rest = divmod(qweight.shape[0] * _WORD, bits)
        if rest:
            raise ValueError(f"{qweight.shape[0]} words do not hold whole codes of {bits} bits")
        self.shape = (qweight.shape[1], inputs)
        self.group, groups = _groups(inputs, group)
        _expect("scales", scales, _FLOATS, (groups, self.shape[0]))
        _expect("qzeros", qzeros, (torch.int32,), (groups, _words(self.shape[0], bits)))
        if g_idx is not None:
            _expect("g_idx", g_idx, (torch.int32, torch.int64), (inputs,))
        self.bits, self.g_idx, self._shift = bits, g_idx, shift
        self._qweight, self._scales, self._qzeros = qweight, scales, qzeros

    def _codes(self, rows: ShardRange, columns: ShardRange) -> Tensor:
        packed = self._qweight[_word_span(columns, self.bits), rows.start : rows.stop].t()
        return unpacked(packed, self.bits, _within(columns, self.bits))

    def _scales_of(self, rows: ShardRange, groups: slice) -> tuple[Tensor, Tensor]:
        packed = self._qzeros[groups, _word_span(rows, self.bits)]
        zeros = unpacked(packed, self.bits, _within(rows, self.bits)).t().short() + self._shift
        return self._scales[groups, rows.start : rows.stop].t(), zeros


# In which nibble of a word, the lowest first, each of eight outputs lies.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(CodedRows):
    """Codes of 4 bits and zero points, packed along the outputs, eight in a word in an order of their own."""

    def __init__(self, qweight: Tensor, scales: Tensor, qzeros: Tensor, group: int) -> None:
        """`group` 0: the row."""
        _expect("qweight", qweight, (torch.int32,), (None, None))
        self.shape = (qweight.shape[1] * 8, qweight.shape[0])
        self.group, groups = _groups(self.shape[1], group)
        _expect("scales", scales, _FLOATS, (groups, self.shape[0]))
        _expect("qzeros", qzeros, (torch.int32,), (groups, qweight.shape[1]))
        self.bits = 4
        self._qweight, self._scales, self._qzeros = qweight, scales, qzeros

    def _codes(self, rows: ShardRange, columns: ShardRange) -> Tensor:
        return self._outputs(self._qweight[columns.start : columns.stop], rows)

    def _scales_of(self, rows: ShardRange, groups: slice) -> tuple[Tensor, Tensor]:
        zeros = self._outputs(self._qzeros[groups], rows).short()
        return self._scales[groups, rows.start : rows.stop].t(), zeros

    @staticmethod
    def _outputs(packed: Tensor, rows: ShardRange) -> Tensor:
        """uint8 [rows, n] of words [n, out / 8]"""
        cut = packed[:, rows.start // 8 : -(-rows.stop // 8)]
        nibbles = unpacked(cut, 4, slice(0, cut.shape[1] * 8)).view(len(cut), -1, 8)
        ordered = nibbles[:, :, list(_AWQ_PLACES)].reshape(len(cut), -1)
        return ordered[:, rows.start % 8 : rows.start % 8 + rows.size].t()


class PackedIntegers(CodedRows):
    """Codes of 4 or 8 bits packed along the inputs, unsigned: half of the codes is added to them and to zero points."""

    def __init__(
        self,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        weight_g_idx: Tensor | None,
        shape: tuple[int, int],
    ) -> None:
        outputs, inputs = self.shape = shape
        _expect("weight_packed", weight_packed, (torch.int32,), (outputs, None))
        self.bits = next((bits for bits in (4, 8) if _words(inputs, bits) == weight_packed.shape[1]), 0)
        if not self.bits or not inputs:
            raise ValueError(f"{weight_packed.shape[1]} words do not hold {inputs} codes of 4 or 8 bits")
        self._scales = _by_group(weight_scale, outputs)
        self.group, groups = _groups(inputs, *divmod(inputs, self._scales.shape[1]))
        if weight_zero_point is not None and weight_zero_point.dtype is torch.int8:
            _expect("weight_zero_point", weight_zero_point, (torch.int8,), (outputs, groups))
        elif weight_zero_point is not None:
            _expect("weight_zero_point", weight_zero_point, (torch.int32,), (_words(outputs, self.bits), groups))
        if weight_g_idx is not None:
            _expect("weight_g_idx", weight_g_idx, (torch.int32, torch.int64), (inputs,))
        self._packed, self._zeros, self.g_idx = weight_packed, weight_zero_point, weight_g_idx

    def _codes(self, rows: ShardRange, columns: ShardRange) -> Tensor:
        packed = self._packed[rows.start : rows.stop, _word_span(columns, self.bits)]
        return unpacked(packed, self.bits, _within(columns, self.bits))

    def _scales_of(self, rows: ShardRange, groups: slice) -> tuple[Tensor, Tensor]:
        half = 1 << (self.bits - 1)
        scales = self._scales[rows.start : rows.stop, groups]
        if self._zeros is None:
            return scales, torch.full(scales.shape, half, dtype=torch.int16)
        if self._zeros.dtype is torch.int8:
            return scales, self._zeros[rows.start : rows.stop, groups].short() + half
        packed = self._zeros[_word_span(rows, self.bits), groups].t()
        return scales, unpacked(packed, self.bits, _within(rows, self.bits)).t().short()


class Integers(CodedRows):
    """Codes that are int8, with scales per tensor, output or group."""

    def __init__(self, weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None) -> None:
        _expect("weight", weight, (torch.int8,), (None, None))
        outputs, inputs = self.shape = (weight.shape[0], weight.shape[1])
        self._scales = _by_group(weight_scale, outputs)
        self.group, groups = _groups(inputs, *divmod(inputs, self._scales.shape[1]))
        if weight_zero_point is not None:
            weight_zero_point = _by_group(weight_zero_point, outputs)
            _expect("weight_zero_point", weight_zero_point, (torch.int8,), (outputs, groups))
        self.bits = 8
        self._weight, self._zeros = weight, weight_zero_point

    def _codes(self, rows: ShardRange, columns: ShardRange) -> Tensor:
        codes = self._weight[rows.start : rows.stop, columns.start : columns.stop]
        return (codes.short() + 128).to(torch.uint8)

    def _scales_of(self, rows: ShardRange, groups: slice) -> tuple[Tensor, Tensor]:
        scales = self._scales[rows.start : rows.stop, groups]
        if self._zeros is None:
            return scales, torch.full(scales.shape, 128, dtype=torch.int16)
        return scales, self._zeros[rows.start : rows.stop, groups].short() + 128


class Fp8(CodedTensor):
    """e4m3 with scales per tensor, output or block."""

    has_products = True

    def __init__(self, weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> None:
        """`block` [outputs, inputs]; None: `scales` are one, or one per output."""
        _expect("weight", weight, (torch.float8_e4m3fn,), (None, None))
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.float()  # powers of two (DeepSeek V4's)
        outputs, inputs = self.shape = (weight.shape[0], weight.shape[1])
        if block is None:
            scales = _by_group(scales, outputs)
            block = (1, inputs)
        _expect("weight_scale", scales, _FLOATS, (-(-outputs // block[0]), -(-inputs // block[1])))
        self._weight, self._scales, self._block = weight, scales, block

    def values(self, box: Box) -> Tensor:
        places = [torch.arange(cut.start, cut.stop) // size for cut, size in zip(box, self._block, strict=True)]
        scales = self._scales[places[0]].float()[:, places[1]]
        return _finite(self._weight[box].float() * scales)

    def rows(self, rows: ShardRange, columns: ShardRange) -> QuantizedRows | None:
        high, wide = self._block
        group = _cut_group(wide, columns)
        if group is None:
            return None
        codes = self._weight.view(torch.uint8)[rows.start : rows.stop, columns.start : columns.stop].clone()
        if bool((codes & 127 == 127).any()):
            raise ValueError("its codes or scales hold NaN or infinite values")
        scales = self._scales[torch.arange(rows.start, rows.stop) // high]
        scales = scales[:, torch.arange(columns.start, columns.stop, group) // wide]
        return QuantizedRows(codes, 8, group, scales, floats=E4M3)


_E8M0_BIAS, _E8M0_NAN = 127, 255


class Mxfp4(CodedTensor):
    """Experts' weights [experts, out, in]: nibbles of e2m1, the lower first, and an exponent for each 32 inputs. The
    model has them [experts, in, out]."""

    GROUP = 32
    has_products = True
    outputs_first = True

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        _expect("blocks", blocks, (torch.uint8,), (None, None, None, self.GROUP // 2))
        experts, outputs, groups = blocks.shape[:3]
        _expect("scales", scales, (torch.uint8,), (experts, outputs, groups))
        self.shape = (experts, outputs, groups * self.GROUP)
        self._blocks, self._scales = blocks, scales

    def values(self, box: Box) -> Tensor:
        experts, outputs, inputs = box
        codes, exponents, first = self._parts((experts, outputs), inputs)
        values = torch.tensor(E2M1, dtype=torch.float32)[codes.int()].view(*exponents.shape, self.GROUP)
        values = torch.ldexp(values, (exponents.int() - _E8M0_BIAS - 1).unsqueeze(-1)).flatten(-2)
        return _finite(values[..., inputs.start - first : inputs.stop - first])

    def matrix(self, number: int) -> "Mxfp4":
        return Mxfp4(self._blocks[number : number + 1], self._scales[number : number + 1])

    def rows(self, rows: ShardRange, columns: ShardRange) -> QuantizedRows | None:
        """Of the one expert that there is."""
        if columns.start % _STEP or columns.stop % _STEP:
            return None
        codes, exponents, first = self._parts((0, slice(rows.start, rows.stop)), slice(columns.start, columns.stop))
        made = QuantizedRows(codes, 4, self.GROUP, half_powers(exponents), table=E2M1)
        return made.columns(columns.start - first, columns.stop - first)

    def _parts(self, rows: tuple[int | slice, slice], inputs: slice) -> tuple[Tensor, Tensor, int]:
        """(codes, a byte each; their groups' exponents; the first one's input) of whole groups."""
        groups = slice(inputs.start // self.GROUP, -(-inputs.stop // self.GROUP))
        blocks, exponents = self._blocks[(*rows, groups)], self._scales[(*rows, groups)]
        if bool((exponents == _E8M0_NAN).any()):
            raise ValueError("its scales hold NaN or infinite values")
        return torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3), exponents, groups.start * self.GROUP


@dataclass(frozen=True)
class Nf4State:
    """How a weight was quantised: `quant_state` of bitsandbytes."""

    shape: tuple[int, int]
    block: int  # values that share a scale, row after row
    nested_block: int = 0  # scales that share a scale; 0: they are float32 themselves
    nested_offset: float = 0.0


class Nf4(CodedTensor):
    """Indices of 4 bits, the higher nibble first, into 16 values between -1 and 1."""

    has_products = True

    def __init__(
        self,
        weight: Tensor,
        absmax: Tensor,
        quant_map: Tensor,
        nested_absmax: Tensor | None,
        nested_quant_map: Tensor | None,
        state: Nf4State,
    ) -> None:
        self.shape = state.shape
        size = math.prod(state.shape)
        if weight.numel() != -(-size // 2) or weight.dtype is not torch.uint8:
            raise ValueError(f"its {weight.numel()} bytes of {weight.dtype} do not hold {size} codes of 4 bits")
        scales = -(-size // state.block)
        _expect("quant_map", quant_map, (torch.float32,), (16,))
        _expect("absmax", absmax, (torch.uint8,) if state.nested_block else (torch.float32,), (scales,))
        if state.nested_block:
            if nested_absmax is None or nested_quant_map is None:
                raise ValueError("its scales are quantised and it has no nested_absmax or nested_quant_map")
            _expect("nested_absmax", nested_absmax, (torch.float32,), (-(-scales // state.nested_block),))
            _expect("nested_quant_map", nested_quant_map, (torch.float32,), (256,))
        self._weight, self._absmax, self._map, self._state = weight.flatten(), absmax, quant_map, state
        self._nested_absmax, self._nested_map = nested_absmax, nested_quant_map

    def values(self, box: Box) -> Tensor:
        rows, columns = box
        inputs, block = self.shape[1], self._state.block
        first, end = rows.start * inputs, rows.stop * inputs
        scales = self._scales(first // block, -(-end // block)).repeat_interleave(block)
        skip = first % block
        values = self._map[self._codes(first, end).int()] * scales[skip : skip + end - first]
        return _finite(values.view(-1, inputs)[:, columns])

    def rows(self, rows: ShardRange, columns: ShardRange) -> QuantizedRows | None:
        """With the 16 values rounded to bf16."""
        inputs, block = self.shape[1], self._state.block
        group = _cut_group(math.gcd(block, inputs), columns)
        if group is None:
            return None
        codes = self._codes(rows.start * inputs, rows.stop * inputs).view(-1, inputs)
        first = rows.start * inputs // block
        scales = self._scales(first, -(-rows.stop * inputs // block))
        begins = torch.arange(rows.start, rows.stop).unsqueeze(1) * inputs
        of = (begins + torch.arange(columns.start, columns.stop, group)) // block - first
        floats = tuple(_finite(self._map.bfloat16()).tolist())
        codes = codes[:, columns.start : columns.stop].contiguous()
        return QuantizedRows(codes, 4, group, scales[of], floats=floats)

    def _codes(self, first: int, end: int) -> Tensor:
        """uint8: of the values [first, end), row after row"""
        packed = self._weight[first // 2 : -(-end // 2)]
        return torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[first % 2 : first % 2 + end - first]

    def _scales(self, first: int, end: int) -> Tensor:
        """float32: of the blocks [first, end)"""
        absmax = self._absmax[first:end]
        if self._nested_absmax is None or self._nested_map is None or not self._state.nested_block:
            return absmax
        above = self._nested_absmax[torch.arange(first, end) // self._state.nested_block]
        return self._nested_map[absmax.int()] * above + self._state.nested_offset


def unpacked(words: Tensor, bits: int, kept: slice) -> Tensor:
    """uint8 [n, kept]: the codes numbered `kept` of int32 words [n, w], each of which, the lowest bits first, holds
    `32 // bits` codes; 32 codes of 3 bits lie across three words."""
    if bits == 3:
        parts = [words[first : first + _ROWS] for first in range(0, len(words), _ROWS)]
        return torch.cat([_threes(part, kept) for part in parts])
    # A copy: with a dimension of 1 a tensor counts as contiguous, whatever its strides, and has no view as bytes.
    octets = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
    fields = [(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)] if bits < 8 else [octets]
    return torch.stack(fields, dim=-1).flatten(1)[:, kept]


def _threes(words: Tensor, kept: slice) -> Tensor:
    wide = words.long() & 0xFFFFFFFF
    places = torch.arange(kept.start, kept.stop) * 3
    word, shift = places // _WORD, places % _WORD
    following = wide[:, (word + 1).clamp(max=wide.shape[1] - 1)]
    return ((wide[:, word] >> shift | following << (_WORD - shift)) & 7).to(torch.uint8)


def _words(codes: int, bits: int) -> int:
    """That hold so many codes."""
    return -(-codes * bits // _WORD)


def _codes_together(bits: int) -> int:
    """Codes that fill whole words."""
    return _WORD // math.gcd(bits, _WORD)


def _word_span(codes: ShardRange, bits: int) -> slice:
    """The words that hold `codes`."""
    together = _codes_together(bits)
    words = together * bits // _WORD
    return slice(codes.start // together * words, -(-codes.stop // together) * words)


def _within(codes: ShardRange, bits: int) -> slice:
    """`codes`, counted from the first in `_word_span`."""
    first = codes.start % _codes_together(bits)
    return slice(first, first + codes.size)


def _groups(inputs: int, group: int, rest: int = 0) -> tuple[int, int]:
    """(inputs of a group, groups); `group` 0: the row."""
    group = group or inputs
    if rest or not group or inputs % group:
        raise ValueError(f"its {inputs} inputs do not divide into groups of {group}")
    return group, inputs // group


def _cut_group(group: int, columns: ShardRange) -> int | None:
    """Inputs that share a scale among `columns` of a weight that has one for each `group`; None: too few, or no
    columns that codes of floats may have."""
    if columns.size % _FLOATS_TOGETHER:
        return None
    if columns.start // group == (columns.stop - 1) // group:
        return columns.size
    cut = math.gcd(group, columns.start, columns.stop)
    return None if cut % _STEP else cut


def _by_group(scales: Tensor, outputs: int) -> Tensor:
    """[out, groups] of scales for a tensor, for each output, or for groups."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.dim() != 2 or len(scales) != outputs or not scales.shape[1]:
        raise ValueError(f"its scales {list(scales.shape)} are not one for each of {outputs} outputs")
    return scales


def _expect(part: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """Raises `ValueError` where `tensor` is of none of `dtypes` or of another shape; None: of any size but 0."""
    fits = tensor.dim() == len(shape) and all(
        size == expected if expected is not None else size > 0
        for size, expected in zip(tensor.shape, shape, strict=False)
    )
    if not fits or tensor.dtype not in dtypes:
        wanted = [size if size is not None else "any" for size in shape]
        raise ValueError(
            f"its {part} is {_name(tensor.dtype)} {list(tensor.shape)} where {' or '.join(map(_name, dtypes))} "
            f"[{', '.join(map(str, wanted))}] is needed"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ValueError("its codes or scales hold NaN or infinite values")
    return values
