"""Quantizes weights while they are loaded: what `--weight-dtype` means on CPUs.

    int8    one scale per row                                              8 bits a weight
    q8_0    one float16 scale per 32 inputs                                8.5
    q6_k    one 8-bit scale per 16 inputs, one float16 per 256             6.56
    q4_k    one 6-bit scale and minimum per 32 inputs, two float16 per 256 4.5
    int4    one float16 scale and a zero point per 64 inputs               4.375

The `q` formats are GGUF's: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h. Where a row is no multiple of 256
inputs, fewer of them share the float16. Scales are searched for: of several near the one that spans the values, the one
with the least squared error, large values counting for more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.model.quantized import QuantizedRows

_TINY = 1e-30
_SHRINKS = (1.0, 0.95, 0.9, 0.84, 0.78)
_TRIALS_OF_MINIMUMS = (-6, -2, 2, 6)
"""In tenths of a code. More of them gain little: each costs as long as rounding."""
_TRIALS_OF_SIGNED = (-4, 0)
_AT_ONCE = 1 << 20
"""Values that are quantized together: they stay in the cache while scales are tried."""


@dataclass(frozen=True)
class RowsCodec:
    """One way to quantize rows."""

    name: str
    bits: int
    group: int
    """Inputs that share a scale; 0: the row."""
    encode: Callable[[Tensor, "RowsCodec"], QuantizedRows]
    """Of float32 [rows, groups, inputs of a group]"""
    vocabulary: str
    """Of the codec that embedding and head get: their errors no later layer evens out."""

    def for_vocabulary(self) -> "RowsCodec":
        return CODECS[self.vocabulary]

    def empty(self, outputs: int, inputs: int) -> QuantizedRows:
        """Room for a weight, of zeros."""
        like = self._encoded(torch.zeros(1, inputs))
        return like.picked(torch.zeros(outputs, dtype=torch.long))

    def encode_into(self, room: QuantizedRows, weight: Tensor) -> None:
        """Fills `room` from `weight` [out, in], a few rows at a time."""
        step = max(1, _AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            room.rows(first, first + step).copy_from(self._encoded(weight[first : first + step].float()))

    def _encoded(self, rows: Tensor) -> QuantizedRows:
        inputs = rows.shape[1]
        if self.group and inputs % self.group:
            finer = next((group for group in (64, 32, 16) if inputs % group == 0), 0)
            if not finer or finer > self.group:
                return CODECS["int8"]._encoded(rows)  # noqa: SLF001
            return self.encode(rows.view(len(rows), -1, finer), self)
        return self.encode(rows.view(len(rows), -1, self.group or inputs), self)


def _symmetric(rows: Tensor, codec: RowsCodec) -> QuantizedRows:
    """Eight bits, a scale per group: the largest value is code 127."""
    outputs, groups, group = rows.shape
    dtype = torch.float32 if groups == 1 else torch.float16
    scales = (rows.abs().amax(2) / 127).to(dtype)
    codes = _quotient(rows, scales.float()).round_().clamp_(-127, 127) + 128
    return QuantizedRows(codes.to(torch.uint8).view(outputs, -1), 8, group, scales, offset=128)


def _with_zero_points(rows: Tensor, codec: RowsCodec) -> QuantizedRows:
    """A scale and a zero point per group."""
    outputs, _, group = rows.shape
    most = (1 << codec.bits) - 1
    low, high = rows.amin(2).clamp_(max=0), rows.amax(2).clamp_(min=0)
    weight = _importance(rows)
    best = torch.full_like(low, float("inf"))
    kept = [torch.zeros_like(low), torch.zeros_like(low)]
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / most)).half().float()
        zero = (-low * shrink * _inverse(scale)).round_().clamp_(0, most)
        codes = (_quotient(rows, scale).round_() + zero.unsqueeze(2)).clamp_(0, most)
        error = (weight * ((codes - zero.unsqueeze(2)) * scale.unsqueeze(2) - rows).square_()).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        kept = [torch.where(better, new, old) for new, old in zip((scale, zero), kept, strict=True)]
    scale, zero = kept
    codes = (_quotient(rows, scale).round_() + zero.unsqueeze(2)).clamp_(0, most)
    return QuantizedRows(
        codes.to(torch.uint8).view(outputs, -1),
        codec.bits,
        group,
        scale.half(),
        zeros=zero.to(torch.uint8),
    )


def _with_minimums(rows: Tensor, codec: RowsCodec) -> QuantizedRows:
    """Scales and minimums of 6 bits under a float16 each: value = scale * code - minimum."""
    outputs, groups, group = rows.shape
    most, steps = (1 << codec.bits) - 1, 63
    scale, least = _scale_and_minimum(rows, most)
    per = _per(groups, 256 // group)
    supers = (_blocks(scale, per).amax(2) / steps).half()
    super_mins = (_blocks(least, per).amax(2) / steps).half()
    scales = _quotient(_blocks(scale, per), supers.float()).round_().clamp_(0, steps)
    mins = _quotient(_blocks(least, per), super_mins.float()).round_().clamp_(0, steps)
    whole = (scales * supers.float().unsqueeze(2)).view(outputs, groups)
    lowest = (mins * super_mins.float().unsqueeze(2)).view(outputs, groups)
    codes = _quotient(rows + lowest.unsqueeze(2), whole).round_().clamp_(0, most)
    return QuantizedRows(
        codes.to(torch.uint8).view(outputs, -1),
        codec.bits,
        group,
        scales.to(torch.uint8).view(outputs, groups),
        mins=mins.to(torch.uint8).view(outputs, groups),
        supers=supers,
        super_mins=super_mins,
        per=per,
    )


def _scale_and_minimum(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """For each group the (scale, minimum), none negative, whose codes are nearest to the values: the codes of several
    scales, each with the scale and minimum that fit them best (weighted least squares)."""
    low, high = rows.amin(2).clamp_(max=0), rows.amax(2)
    weight = _importance(rows)
    total, sum_x = weight.sum(2), (weight * rows).sum(2)
    scale, least = (high - low) / most, -low
    codes = _quotient(rows - low.unsqueeze(2), scale).round_().clamp_(0, most)
    best = (weight * (codes * scale.unsqueeze(2) - least.unsqueeze(2) - rows).square_()).sum(2)
    for step in _TRIALS_OF_MINIMUMS:
        trial = (high - low) / (most + step / 10)
        codes = _quotient(rows - low.unsqueeze(2), trial).round_().clamp_(0, most)
        weighted = weight * codes
        sum_c, sum_cc, sum_cx = weighted.sum(2), (weighted * codes).sum(2), (weighted * rows).sum(2)
        spread = total * sum_cc - sum_c * sum_c
        fitted = (total * sum_cx - sum_c * sum_x) / spread.clamp_(min=_TINY)
        lowest = (sum_c * sum_cx - sum_cc * sum_x) / spread
        below = lowest < 0
        fitted = torch.where(below, sum_cx / sum_cc.clamp(min=_TINY), fitted)
        lowest = lowest.clamp_(min=0)
        error = (weight * (codes * fitted.unsqueeze(2) - lowest.unsqueeze(2) - rows).square_()).sum(2)
        better = (error < best) & (fitted > 0)
        best = torch.where(better, error, best)
        scale, least = torch.where(better, fitted, scale), torch.where(better, lowest, least)
    return scale, least


def _with_signed_scales(rows: Tensor, codec: RowsCodec) -> QuantizedRows:
    """Scales of 8 bits, with their sign, under a float16: value = scale * (code - half of the codes)."""
    outputs, groups, group = rows.shape
    half = 1 << (codec.bits - 1)
    scale = _signed_scale(rows, half)
    per = _per(groups, 256 // group)
    by_super = _blocks(scale, per)
    largest = by_super.gather(2, by_super.abs().argmax(2, keepdim=True)).squeeze(2)
    supers = (largest / -128).half()
    scales = _quotient(by_super, supers.float()).round_().clamp_(-128, 127)
    whole = (scales * supers.float().unsqueeze(2)).view(outputs, groups)
    codes = _quotient(rows, whole).round_().clamp_(-half, half - 1) + half
    return QuantizedRows(
        codes.to(torch.uint8).view(outputs, -1),
        codec.bits,
        group,
        scales.to(torch.int8).view(outputs, groups),
        offset=half,
        supers=supers,
        per=per,
    )


def _signed_scale(rows: Tensor, half: int) -> Tensor:
    """For each group the scale whose codes in [-half, half) are nearest to the values."""
    largest = rows.gather(2, rows.abs().argmax(2, keepdim=True)).squeeze(2)
    weight = rows.square()
    best = torch.full_like(largest, -1.0)
    scale = torch.zeros_like(largest)
    for step in _TRIALS_OF_SIGNED:
        trial = largest / -(half + step / 10)
        codes = _quotient(rows, trial).round_().clamp_(-half, half - 1)
        weighted = weight * codes
        sum_cx, sum_cc = (weighted * rows).sum(2), (weighted * codes).sum(2)
        gain = sum_cx.square() / sum_cc.clamp(min=_TINY)
        better = (gain > best) & (sum_cc > 0)
        best = torch.where(better, gain, best)
        scale = torch.where(better, sum_cx / sum_cc.clamp(min=_TINY), scale)
    return scale


def _importance(rows: Tensor) -> Tensor:
    """What an error counts for: more where values are large."""
    return rows.square().mean(2, keepdim=True).sqrt_() + rows.abs()


def _quotient(rows: Tensor, scales: Tensor) -> Tensor:
    """`rows` [..., n] over `scales` [...]; 0 where a scale is 0."""
    return rows * _inverse(scales).unsqueeze(-1)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _per(groups: int, most: int) -> int:
    """Groups that share a float16: at most as many as in the format."""
    return next(per for per in range(min(most, groups), 0, -1) if groups % per == 0)


def _blocks(values: Tensor, per: int) -> Tensor:
    return values.view(len(values), -1, per)


CODECS = {
    codec.name: codec
    for codec in (
        RowsCodec("int8", 8, 0, _symmetric, "int8"),
        RowsCodec("q8_0", 8, 32, _symmetric, "q8_0"),
        RowsCodec("q6_k", 6, 16, _with_signed_scales, "q6_k"),
        RowsCodec("q4_k", 4, 32, _with_minimums, "q6_k"),
        RowsCodec("int4", 4, 64, _with_zero_points, "q6_k"),
    )
}
"""What `--weight-dtype` names on CPUs."""
