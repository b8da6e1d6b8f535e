"""Weights that are not plain bf16 as the native kernels read them: see `native/quantized.h` and
`native/short_exponents.h`."""

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import msgspec
import torch
from torch import Tensor

from services.executor.model.loading.arena import fresh
from services.executor.model.quantized import E4M3, QuantizedRows
from services.executor.native.library import RzCodes, RzFormat

PANEL = 32  # outputs that are packed together
# Codes, a byte each, that a thread reads and packs together: they stay near its caches.
_CODES_AT_ONCE = 2 << 20
_WIDEST_GROUP = 512
# As `decoder.h` numbers them.
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int8: 4}
_NONE, _MINIMUMS, _ZEROS = 0, 1, 2
_E4M3, _FLOAT_TABLE, _SHORT_EXPONENTS = 1, 2, 3


class PackedFormat(msgspec.Struct, frozen=True, array_like=True):
    """`rz_format` of `decoder.h`, without the permutation."""

    bits: int
    columns: int
    group: int
    per: int
    scale_type: int
    super_type: int
    minimums: int
    offset: int
    table: tuple[int, ...]  # integers, or the bits of bf16 values
    floats: int = 0

    def describe(self, permutation: Tensor | None) -> RzFormat:
        """The structure that the kernels take."""
        numbers = msgspec.structs.asdict(self)
        table = numbers.pop("table")
        made = RzFormat(**numbers, has_table=bool(table) and not self.floats)
        made.permutation = None if permutation is None else permutation.data_ptr()
        (made.float_table if self.floats else made.table)[: len(table)] = table
        return made


def format_of(weight: QuantizedRows) -> PackedFormat:
    """How `weight` is packed, which must be `servable`."""
    minimums = _MINIMUMS if weight.mins is not None else _ZEROS if weight.zeros is not None else _NONE
    floats = 0 if not weight.floats else _E4M3 if weight.floats == E4M3 else _FLOAT_TABLE
    return PackedFormat(
        bits=weight.bits,
        columns=weight.columns_stored,
        group=0 if weight.groups == 1 else weight.group,
        per=0 if weight.supers is None else weight.per,
        scale_type=_TYPES[weight.scales.dtype],
        super_type=0 if weight.supers is None else _TYPES[weight.supers.dtype],
        minimums=minimums,
        offset=weight.offset,
        table=_bits_of(weight.floats) if floats == _FLOAT_TABLE else weight.table,
        floats=floats,
    )


def short_exponents(columns: int) -> PackedFormat:
    """bf16 in 12 bits: see `native/short_exponents.h`."""
    return PackedFormat(12, columns, 0, 0, 0, 0, _NONE, 0, (), _SHORT_EXPONENTS)


def _bits_of(values: tuple[float, ...]) -> tuple[int, ...]:
    """Of bf16"""
    return tuple(torch.tensor(values, dtype=torch.bfloat16).view(torch.uint16).tolist())


def servable(weight: QuantizedRows) -> QuantizedRows:
    """The same values in groups that the kernels know: 16, or a power of two up to 512, or the whole row."""
    if weight.groups == 1:
        return weight
    group = math.gcd(weight.group, _WIDEST_GROUP)
    return weight.regrouped(group)


def activation_span(form: PackedFormat) -> int:
    """Columns whose activations are rounded with one scale: see `native/spans.h`."""
    span, whole = form.per * form.group, form.scale_type in (_TYPES[torch.uint8], _TYPES[torch.int8])
    if 0 < form.group <= 32:
        return span if span and whole and form.bits < 8 and span % 64 == 0 and span <= 256 else 32
    return min(form.group, 128) or 128


def pack_rows(
    library: Any,
    read: Callable[[int, int], QuantizedRows],
    made: PackedFormat,
    outputs: int,
    pool: Executor,
    threads: int,
    into: Tensor | None = None,
) -> Tensor:
    """A weight of `outputs` outputs, of which `read` gives those from one to another, packed by `threads` threads of
    `pool`, each of which reads what it packs. `into`: the room for it, uint8; None: made."""
    described = made.describe(None)
    packed = fresh(library.rz_quantized_bytes(ctypes.byref(described), outputs)) if into is None else into
    place, panel = packed.data_ptr(), library.rz_quantized_bytes(ctypes.byref(described), PANEL)
    panels = -(-outputs // PANEL)
    step = max(1, min(_CODES_AT_ONCE // made.columns // PANEL, -(-panels // threads)))

    def pack(first: int) -> None:
        weight = servable(read(first * PANEL, min((first + step) * PANEL, outputs)))
        _pack_block(library, weight, described, place + first * panel)

    for job in [pool.submit(pack, first) for first in range(0, panels, step)]:
        job.result()
    return packed


def _pack_block(library: Any, weight: QuantizedRows, described: RzFormat, place: int) -> None:
    parts = [_with_dense_rows(getattr(weight, name)) for name in ("codes", *_SCALES)]
    minimums = parts[2] if parts[2] is not None else parts[3]
    held = [parts[0], parts[1], minimums, parts[4], parts[5]]
    codes = RzCodes(
        *(None if part is None else part.data_ptr() for part in held),
        weight.outputs,
        *(0 if part is None else part.stride(0) for part in held),
    )
    panels = -(-weight.outputs // PANEL)
    library.rz_quantized_pack(place, ctypes.byref(described), ctypes.byref(codes), 0, panels)


_SCALES = ("scales", "mins", "zeros", "supers", "super_mins")


def _with_dense_rows(part: Tensor | None) -> Tensor | None:
    return part if part is None or part.stride(1) == 1 else part.contiguous()


def unpacked(library: Any, packed: Tensor, form: PackedFormat, outputs: int) -> Tensor:
    """float32 [outputs, columns]: what the kernels take the weight for."""
    rows = torch.empty(outputs, form.columns)
    described = form.describe(None)
    for output in range(outputs):
        library.rz_quantized_row(rows[output].data_ptr(), ctypes.byref(described), packed.data_ptr(), output)
    return rows
