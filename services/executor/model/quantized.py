"""A weight of integer codes with scales per group of inputs: one form for every file that holds such weights.

    value[o, i] = s(o, g) * T(code[o, i]) - m(o, g)        g = i // group

    T(c)         table[c] or floats[c] where there is such a table, else c - offset
    one level    s = scales[o, g]                          m = mins[o, g], or s * zeros[o, g], or 0
    two levels   s = supers[o, g // per] * scales[o, g]    m = super_mins[o, g // per] * mins[o, g], or 0

Codes and scales are a file's own, bit for bit: nothing is rounded again. The native kernels take them as they are
(`native/quantized.h`); `dequantized` is the reference that they, and every reader of files, are held to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SMALLEST_GROUP = 16  # inputs. What the kernels can give a scale of its own


_E4M3_ABOVE_ZERO = [math.ldexp(*((8 + m, e - 10) if e else (m, -9))) for e in range(16) for m in range(8)]
# What codes of fp8 stand for: Micikevicius et al., https://arxiv.org/abs/2209.05433, section 3. Two of them are
# NaN, which readers of files refuse and products take for 480.
E4M3 = (*_E4M3_ABOVE_ZERO, *(-value for value in _E4M3_ABOVE_ZERO))
# Twice what codes of e2m1 stand for, which are halves: OCP Microscaling Formats 1.0, section 5.3.3
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def half_powers(exponents: Tensor) -> Tensor:
    """bf16: half of 2 ** (e - 127) for each of uint8 `exponents` (e8m0), of which 255 is NaN."""
    wide = exponents.short()
    # By the bits of a bf16: below 2 ** -126 there is no exponent.
    bits = torch.where(wide < 2, 0x20 << wide.clamp(max=1), (wide - 1) << 7)
    bits[wide == 255] = 0x7FC0
    return bits.short().view(torch.bfloat16)


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A weight [out, in] as it was stored. Raises `ValueError`, one sentence, where the parts do not fit."""

    # uint8 [out, columns], below 2 ** bits. Codes that a file keeps signed are kept plus `offset`.
    codes: Tensor
    bits: int
    # Columns that share a scale: 16 or a multiple, which divides them; or all of them, however many.
    group: int
    scales: Tensor  # [out, groups] float16, bfloat16 or float32; with two levels uint8 or int8
    offset: int = 0
    mins: Tensor | None = None  # [out, groups], of the dtype of `scales`; with two levels uint8
    zeros: Tensor | None = None  # uint8 [out, groups], with one level: codes that stand for 0
    # [out, groups / per] float16, bfloat16 or float32, where there are two levels
    supers: Tensor | None = None
    super_mins: Tensor | None = None  # as `supers`, where there are `mins`
    per: int = 1  # groups under one of `supers`; divides them
    table: tuple[int, ...] = ()  # int8, one per code
    # What codes stand for that are no integers: `E4M3`, or 16 values that bf16 holds. They have a multiple of 4
    # columns, scales of one level, and nothing else.
    floats: tuple[float, ...] = ()
    # int32 [columns]: code column i is the layer's input permutation[i]; -1: none, its codes count for nothing
    permutation: Tensor | None = None
    # Of the layer, where there is a permutation; None: as many as there are columns
    of_inputs: int | None = None

    def __post_init__(self) -> None:
        if reason := self._flaw():
            raise ValueError(reason)

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        """Of the layer."""
        return self.columns_stored if self.of_inputs is None else self.of_inputs

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight that it stands for."""
        return self.outputs, self.inputs

    @property
    def columns_stored(self) -> int:
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Of a row."""
        return self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Codes at their width, and scales."""
        rest = (self.scales, self.mins, self.zeros, self.supers, self.super_mins)
        return self.codes.numel() * self.bits // 8 + sum(part.nbytes for part in rest if part is not None)

    def rows(self, first: int, end: int) -> "QuantizedRows":
        """The outputs [first, end). Shares their memory."""
        return self._of_each_row(lambda part: part[first:end])

    def columns(self, first: int, end: int) -> "QuantizedRows":
        """The inputs [first, end), which are inputs [0, end - first) of what is returned.

        Cuts at multiples of 16 inputs are exact whatever the group (where one is cut, its parts are groups of their
        own); a scale that covers the row may be cut anywhere. Others raise `ValueError`.
        """
        if not 0 <= first < end <= self.inputs:
            raise ValueError(f"a weight of {self.inputs} inputs has no inputs {first} to {end}")
        if self.permutation is not None:
            return self._permuted_columns(first, end)
        if end - first == self.inputs:
            return self
        if self.groups == 1:
            return replace(self, codes=self.codes[:, first:end], group=end - first)
        group = math.gcd(self.group, first, end)
        if group < _SMALLEST_GROUP:
            raise ValueError(
                f"a weight quantized in groups of {self.group} inputs cannot be cut at {first} and {end}: a cut must "
                f"be at a multiple of {_SMALLEST_GROUP}"
            )
        finer = self.regrouped(group)
        return _cut_groups(finer, first // group, end // group)

    def rearranged(self, order: Tensor, width: int) -> "QuantizedRows":
        """Blocks of `width` inputs, which divide them, in another order: int64 [blocks]. Raises `ValueError` where
        groups of fewer than 16 inputs would be needed."""
        group = math.gcd(self.group, width)
        if group < _SMALLEST_GROUP or self.permutation is not None:
            raise ValueError(f"a weight quantized in groups of {self.group} inputs cannot be put in blocks of {width}")
        finer = self.regrouped(group)
        per = math.gcd(finer.per, width // group)
        parts = {}
        for name, part in _held(finer).items():
            shared = finer.per // per if "super" in name else 1
            blocks = part.repeat_interleave(shared, dim=1).view(len(part), len(order), -1)
            parts[name] = blocks[:, order].flatten(1)
        return replace(finer, per=per, **parts)  # type: ignore[arg-type]

    def copy_from(self, other: "QuantizedRows") -> None:
        """Takes over the rows of `other`, as many and of the same format, into the memory of this one."""
        for name, part in _held(self).items():
            part.copy_(getattr(other, name))

    def picked(self, outputs: Tensor) -> "QuantizedRows":
        """The outputs of those numbers, int64 [n], in that order. A copy."""
        return self._of_each_row(lambda part: part.index_select(0, outputs))

    def every(self, first: int, step: int) -> "QuantizedRows":
        """The outputs first, first + step, ..."""
        return self._of_each_row(lambda part: part[first::step])

    def same_format(self, other: "QuantizedRows") -> bool:
        """Whether rows of the two can be one weight's."""
        return _format(self) == _format(other) and _same(self.permutation, other.permutation)

    @staticmethod
    def joined(weights: Sequence["QuantizedRows"]) -> "QuantizedRows":
        """Their outputs end to end. Raises `ValueError` where they are not of `same_format`."""
        first = weights[0]
        if not all(first.same_format(other) for other in weights[1:]):
            raise ValueError("weights of different formats cannot be joined")
        parts = {name: torch.cat([getattr(weight, name) for weight in weights]) for name in _held(first)}
        return replace(first, **parts)  # type: ignore[arg-type]

    def plain(self, bits: int, group: int) -> "QuantizedRows":
        """The same values, to float32's rounding, with codes of `bits` bits or of 8 and one level of scales in groups
        of `group`, which divides this one's."""
        finer = self.regrouped(group)
        scales, mins = finer.level_scales()
        codes, offset = finer.codes, finer.offset
        if self.table:
            offset = max(0, -min(self.table))
            table = torch.tensor(self.table, dtype=torch.int32, device=codes.device)
            codes = (table[codes.int()] + offset).to(torch.uint8)
        shift = torch.full_like(scales, float(offset)) if finer.zeros is None else finer.zeros.float() + offset
        least = scales * shift if mins is None else mins + scales * shift
        return QuantizedRows(
            codes,
            8 if self.table else bits,
            group,
            scales,
            mins=least,
            permutation=self.permutation,
            of_inputs=self.of_inputs,
        )

    @staticmethod
    def of_one_format(weights: Sequence["QuantizedRows"]) -> "list[QuantizedRows] | None":
        """The same values, to float32's rounding, in one format; None where there is none."""
        first = weights[0]
        if all(first.same_format(other) for other in weights[1:]):
            return list(weights)
        group = math.gcd(*(weight.group for weight in weights))
        if (
            any(weight.floats for weight in weights)
            or group % _SMALLEST_GROUP
            or not all(_same(first.permutation, other.permutation) for other in weights)
        ):
            return None
        bits = max(8 if weight.table else weight.bits for weight in weights)
        return [weight.plain(bits, group) for weight in weights]

    def level_scales(self) -> tuple[Tensor, Tensor | None]:
        """(s, m) float32 [out, groups], m without `zeros`: what a kernel multiplies by."""
        scales, mins = self.scales.float(), None if self.mins is None else self.mins.float()
        if self.supers is not None:
            scales = scales * self.supers.float().repeat_interleave(self.per, dim=1)
        if self.super_mins is not None and mins is not None:
            mins = mins * self.super_mins.float().repeat_interleave(self.per, dim=1)
        return scales, mins

    def dequantized(self) -> Tensor:
        """float32 [out, in]"""
        scales, mins = self.level_scales()
        by_group = (self.outputs, self.groups, self.group)
        codes = self.codes.reshape(by_group)
        table = torch.tensor(self.floats or self.table, dtype=torch.float32, device=codes.device)
        values = table[codes.int()] if len(table) else codes.float() - self.offset
        if self.zeros is not None:
            values -= self.zeros.float().unsqueeze(2)
        values *= scales.unsqueeze(2)
        if mins is not None:
            values -= mins.unsqueeze(2)
        values = values.reshape(self.codes.shape)
        if self.permutation is None:
            return values
        there = self.permutation >= 0
        # Whatever the default is while a model is built.
        ordered = torch.zeros(self.shape, dtype=torch.float32, device=values.device)
        ordered[:, self.permutation[there].long()] = values[:, there]
        return ordered

    def to(self, device: torch.device) -> "QuantizedRows":
        if self.codes.device == device:
            return self
        order = None if self.permutation is None else self.permutation.to(device)
        return replace(self._of_each_row(lambda part: part.to(device)), permutation=order)

    def _flaw(self) -> str:
        """Why it is no weight; nothing where it is one."""
        if self.bits not in BITS or self.codes.dtype is not torch.uint8 or self.codes.dim() != 2:
            return f"codes of {self.bits} bits kept as {self.codes.dtype} are not served"
        columns, groups = self.columns_stored, self.scales.shape[-1]
        if not self.outputs or not columns:
            return "a weight without outputs or inputs is not served"
        if self.group * groups != columns or (groups > 1 and self.group % _SMALLEST_GROUP):
            return (
                f"{columns} columns do not divide into {groups} groups of {self.group}, which must be a multiple of "
                f"{_SMALLEST_GROUP}"
            )
        if self.table and len(self.table) != 1 << self.bits:
            return f"a table of {len(self.table)} values does not serve codes of {self.bits} bits"
        if not 0 <= self.offset < 256 or any(not -128 <= value < 128 for value in self.table):
            return f"an offset of {self.offset} or a value of the table is beyond eight bits"
        if self.zeros is not None and self.bits < 8 and bool((self.zeros > 1 << self.bits).any()):
            return f"a zero point is beyond what {self.bits} bits hold"
        return self._flaw_of_floats() or self._flaw_of_scales(groups) or self._flaw_of_order()

    def _flaw_of_floats(self) -> str:
        if not self.floats:
            return ""
        others = (self.mins, self.zeros, self.supers, self.permutation)
        if any(part is not None for part in others) or self.table or self.offset:
            return "codes of floats have scales of one level and nothing else"
        exact = torch.tensor(self.floats).bfloat16().tolist() == list(self.floats)
        if not exact or self.bits != (8 if self.floats == E4M3 else 4) or len(self.floats) != 1 << self.bits:
            return f"codes of {self.bits} bits for {len(self.floats)} such floats are not served"
        return f"{self.columns_stored} columns are not a multiple of 4" if self.columns_stored % 4 else ""

    def _flaw_of_scales(self, groups: int) -> str:
        two = self.supers is not None
        if self.per < 1 or groups % self.per or (self.per > 1 and not two):
            return f"{groups} groups do not divide into {self.per} each"
        if two and (self.zeros is not None or (self.mins is None) != (self.super_mins is None)):
            return "scales of two levels have minimums of two levels or none"
        if self.mins is not None and self.zeros is not None:
            return "a weight has minimums or zero points, not both"
        small, supers = (self.outputs, groups), (self.outputs, groups // self.per)
        floats = _FLOATS if self.supers is None else (self.supers.dtype,)
        kinds = (torch.uint8, torch.int8) if two else _FLOATS
        expected = (
            (self.scales, small, kinds),
            (self.mins, small, (torch.uint8,) if two else (self.scales.dtype,)),
            (self.zeros, small, (torch.uint8,)),
            (self.supers, supers, tuple(set(floats) & set(_FLOATS))),
            (self.super_mins, supers, floats),
        )
        for part, shape, dtypes in expected:
            if part is None:
                continue
            if tuple(part.shape) != shape or part.dtype not in dtypes:
                return f"scales of {part.dtype} {list(part.shape)} do not fit {groups} groups of {self.outputs} rows"
            if part.is_floating_point() and not bool(part.isfinite().all()):
                return "its scales hold NaN or infinite values"
        return ""

    def _flaw_of_order(self) -> str:
        order = self.permutation
        if order is None:
            return "" if self.of_inputs is None else "a weight's inputs are its columns where nothing permutes them"
        if tuple(order.shape) != (self.columns_stored,) or order.dtype is not torch.int32:
            return f"a permutation of {order.dtype} {list(order.shape)} does not fit {self.columns_stored} columns"
        used = order[order >= 0]
        if bool((order < -1).any()) or bool((used >= self.inputs).any()) or bool((used.bincount() > 1).any()):
            return f"its permutation does not name each of {self.inputs} inputs once"
        return ""

    def _of_each_row(self, select) -> "QuantizedRows":  # type: ignore[no-untyped-def]
        return replace(self, **{name: select(part) for name, part in _held(self).items()})

    def regrouped(self, group: int) -> "QuantizedRows":
        """The same values in groups of `group`, which divides those that there are."""
        times = self.group // group
        if times == 1:
            return self
        parts = {name: part.repeat_interleave(times, dim=1) for name, part in _held(self, _BY_GROUP).items()}
        per = self.per * times if self.supers is not None else 1
        return replace(self, group=group, per=per, **parts)  # type: ignore[arg-type]

    def _permuted_columns(self, first: int, end: int) -> "QuantizedRows":
        """Each group keeps the columns that are asked for, filled up to a multiple of 16."""
        order = self.permutation
        assert order is not None, "the columns of others are where their inputs are"
        kept: list[Tensor] = []
        groups: list[int] = []
        for number, members in enumerate(torch.split(order, self.group)):
            asked = ((members >= first) & (members < end)).nonzero().flatten() + number * self.group
            chunks = -(-len(asked) // _SMALLEST_GROUP)
            filled = torch.full((chunks * _SMALLEST_GROUP,), -1, dtype=torch.long)
            filled[: len(asked)] = asked
            kept.append(filled)
            groups += [number] * chunks
        columns, of = torch.cat(kept), torch.tensor(groups)
        parts = {name: part[:, of] for name, part in _held(self, _BY_GROUP).items()}
        parts |= {name: part[:, of // self.per] for name, part in _held(self, _ABOVE_GROUPS).items()}
        return replace(
            self,
            codes=self.codes[:, columns.clamp(min=0)],
            group=_SMALLEST_GROUP,
            per=1,
            permutation=torch.where(columns < 0, -1, order[columns.clamp(min=0)] - first).int(),
            of_inputs=end - first,
            **parts,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class DeferredRows:
    """A weight that lies in its files until it is packed, since codes take a byte each until then."""

    like: QuantizedRows  # its first row: the format
    first: int
    end: int  # its outputs, of those that `reader` reads
    reader: Callable[[int, int], QuantizedRows]

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.first, self.like.inputs

    def rows(self, first: int, end: int) -> "DeferredRows":
        """The outputs [first, end)."""
        return replace(self, first=self.first + first, end=self.first + end)

    def every(self, first: int, step: int) -> "DeferredRows":
        """The outputs first, first + step, ..., of a multiple of `step`."""

        def reader(start: int, stop: int) -> QuantizedRows:
            return self.rows(start * step, stop * step).read().every(first, step)

        return DeferredRows(self.like, 0, (self.end - self.first) // step, reader)

    def read(self) -> QuantizedRows:
        """Reads them, each time anew."""
        return self.reader(self.first, self.end)


_BY_GROUP, _ABOVE_GROUPS = ("scales", "mins", "zeros"), ("supers", "super_mins")
ROW_PARTS = ("codes", *_BY_GROUP, *_ABOVE_GROUPS)


def _held(weight: QuantizedRows, names: Sequence[str] = ROW_PARTS) -> dict[str, Tensor]:
    """Of these parts those that there are."""
    return {name: part for name in names if (part := getattr(weight, name)) is not None}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _format(weight: QuantizedRows) -> tuple[object, ...]:
    dtypes = ((name, part.dtype) for name, part in _held(weight).items())
    sizes = (weight.bits, weight.group, weight.per, weight.inputs, weight.columns_stored)
    return (*sizes, weight.offset, weight.table, weight.floats, *dtypes)


def _cut_groups(weight: QuantizedRows, first: int, end: int) -> QuantizedRows:
    """The groups [first, end) of a weight without a permutation."""
    per = math.gcd(weight.per, first, end)
    parts = {"codes": weight.codes[:, first * weight.group : end * weight.group]}
    parts |= {name: part[:, first:end] for name, part in _held(weight, _BY_GROUP).items()}
    for name, part in _held(weight, _ABOVE_GROUPS).items():
        parts[name] = part.repeat_interleave(weight.per // per, dim=1)[:, first // per : end // per]
    return replace(weight, per=per, **parts)  # type: ignore[arg-type]
