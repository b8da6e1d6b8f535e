"""Quantizes weights while they are loaded, on the host, to a declared format (`core/weight_formats.py`).

Scales are searched for: of several near the one that spans the values, the one with the least squared error, large
values counting for more (`native/quantize.c`).
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.executor.core.weight_formats import WEIGHT_FORMATS, Scaling, WeightFormat
from services.executor.model.quantized import E4M3, ROW_PARTS, QuantizedRows
from services.executor.native.library import RzCodes, best_level, kernels_at
from shared.data_types import WeightDType
from shared.errors import ConfigurationError

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `decoder.h` numbers them
_PER_SUPER = 256  # inputs under one float16 of two levels, at most
_WORTH_A_THREAD = 1 << 18  # values


@dataclass(frozen=True)
class RowsCodec(WeightFormat):
    """Quantizes rows to a format."""

    def for_vocabulary(self) -> "RowsCodec":
        return CODECS[self.vocabulary]

    def empty(self, outputs: int, inputs: int) -> QuantizedRows:
        """Room for a weight, of zeros."""
        codec, group = self._fitting(inputs)
        groups = inputs // group
        room: dict[str, Any] = {"codes": torch.zeros(outputs, inputs, dtype=torch.uint8)}
        room |= {"bits": codec.bits, "group": group}
        if codec.kind in (Scaling.SIGNED, Scaling.WITH_MINIMUMS):
            per = next(per for per in range(min(_PER_SUPER // group, groups), 0, -1) if groups % per == 0)
            whole = torch.int8 if codec.kind == Scaling.SIGNED else torch.uint8
            small = partial(torch.zeros, outputs, groups, dtype=whole)
            supers = partial(torch.zeros, outputs, groups // per, dtype=torch.float16)
            room |= {"per": per, "scales": small(), "supers": supers()}
            if codec.kind == Scaling.SIGNED:
                return QuantizedRows(offset=1 << (codec.bits - 1), **room)
            return QuantizedRows(mins=small(), super_mins=supers(), **room)
        if codec.kind == Scaling.E4M3:
            room["scales"] = torch.zeros(outputs, groups, dtype=torch.float32)
            return QuantizedRows(floats=E4M3, **room)
        of_rows = codec.kind == Scaling.SYMMETRIC and groups == 1
        room["scales"] = torch.zeros(outputs, groups, dtype=torch.float32 if of_rows else torch.float16)
        if codec.kind == Scaling.SYMMETRIC:
            return QuantizedRows(offset=128, **room)
        return QuantizedRows(zeros=torch.zeros(outputs, groups, dtype=torch.uint8), **room)

    def encode_into(self, room: QuantizedRows, weight: Tensor) -> None:
        """Fills `room` from `weight` [out, in], floats on the host, with as many threads as PyTorch has."""
        if not (level := best_level()):
            raise ConfigurationError(
                "Weights are quantized by the compiled kernels, which this installation or processor lacks; choose "
                "unquantized weights."
            )
        kernels = kernels_at(level)
        codec, group = self._fitting(weight.shape[1])
        weight = weight if weight.dtype in _TYPES and weight.stride(1) == 1 else weight.float().contiguous()
        parts = [getattr(room, name) for name in ROW_PARTS]
        held = [parts[0], parts[1], parts[3] if parts[2] is None else parts[2], parts[4], parts[5]]
        assert all(part is None or part.stride(1) == 1 for part in held), "rooms are whole rows"
        into = RzCodes(
            *(None if part is None else part.data_ptr() for part in held),
            room.outputs,
            *(0 if part is None else part.stride(0) for part in held),
        )
        places = (codec.kind, codec.bits, weight.shape[1], group, room.per if room.supers is not None else 0)
        values = (weight.data_ptr(), _TYPES[weight.dtype], weight.stride(0))

        def rows(first: int, end: int) -> None:
            kernels.rz_quantize(ctypes.byref(into), *places, *values, first, end)

        threads = max(1, min(torch.get_num_threads(), weight.numel() // _WORTH_A_THREAD))
        step = -(-len(weight) // threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="quantize") as pool:
            list(pool.map(lambda first: rows(first, min(first + step, len(weight))), range(0, len(weight), step)))

    def _fitting(self, inputs: int) -> "tuple[RowsCodec, int]":
        """(what quantizes rows of `inputs`, in groups of so many)"""
        if self.kind == Scaling.E4M3 and inputs % 4:
            return CODECS["int8"], inputs
        if not self.group or inputs % self.group == 0:
            return self, self.group or inputs
        finer = next((group for group in (64, 32, 16) if group < self.group and inputs % group == 0), 0)
        return (self, finer) if finer else (CODECS["int8"], inputs)


CODECS = {name: RowsCodec(**vars(one)) for name, one in WEIGHT_FORMATS.items()}


def codec_of(kind: WeightDType) -> RowsCodec | None:
    """How `--weight-dtype` has the weights of linear layers kept on a host; None: as they are computed with."""
    return None if kind in ("auto", "bf16") else CODECS[kind]
