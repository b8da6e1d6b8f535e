"""Weights in other forms than a plain tensor.

Eight bits: codes, and one scale for each row, which is one output of the layer. A scale of its own per row costs 4
bytes in thousands and keeps one large weight from coarsening the others' rows. A rank's columns of a row-parallel
weight are rows of their own, with scales of their own. Embedding, head and norms are not kept so: of the embedding a
step reads a few rows; the head's errors fall on the logits themselves, where no later layer evens them out, and it is
often the embedding; norms are vectors.

Packed: in the order in which the CPU's matrix kernels read them. oneDNN re-orders a plain bf16 weight on every product,
which costs as much as the product itself when only a few rows are multiplied. Packed once at load, one row runs at the
speed of memory. The two operators are those that torch's own compiler emits for frozen linears.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.executor.kv_cache.codecs import Codec
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import RowsCodec

_AT_ONCE = 1 << 24  # weights that are encoded together: encoding takes four bytes for each, more than once


class Quantized(NamedTuple):
    codes: Tensor  # [out, in], int8 or e4m3
    scales: Tensor  # float32 [out]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantized(self) -> Tensor:
        """float32 [out, in]"""
        return self.codes.float() * self.scales.unsqueeze(1)

    def rows(self, first: int, end: int) -> "Quantized":
        """The outputs [first, end). Shares their memory."""
        return Quantized(self.codes[first:end], self.scales[first:end])


class Packed(Protocol):
    """A weight in the order in which a device's kernels read it, which made it."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        ...


CodedWeight = Quantized | QuantizedRows | DeferredRows | Packed  # [out, in]; of experts all of a layer's, as one
Weight = Tensor | CodedWeight


WeightCodec = Codec | RowsCodec  # a way to quantise a weight: the first on GPUs alone


def empty(shape: Sequence[int], codec: WeightCodec, device: torch.device) -> Quantized | QuantizedRows:
    if isinstance(codec, RowsCodec):
        return codec.empty(shape[0], shape[1])
    codes = torch.empty(tuple(shape), dtype=codec.dtype, device=device)
    return Quantized(codes, torch.empty(shape[0], dtype=torch.float32, device=device))


def encode_into(room: Quantized | QuantizedRows, weight: Tensor, codec: WeightCodec) -> None:
    """Fills `room` from `weight` [out, in], a few rows at a time."""
    if isinstance(room, QuantizedRows):
        assert isinstance(codec, RowsCodec), "the room is the codec's"
        codec.encode_into(room, weight.to(room.codes.device))
        return
    assert isinstance(codec, Codec), "the room is the codec's"
    step = max(1, _AT_ONCE // max(weight.shape[1], 1))
    for first in range(0, len(weight), step):
        codes, scales = codec.encode(weight[first : first + step])
        part = room.rows(first, first + step)
        part.codes.copy_(codes)
        part.scales.copy_(scales)


def quantize(weight: Tensor, codec: WeightCodec) -> Quantized | QuantizedRows:
    """`weight` [out, in] of any floating dtype; with a `RowsCodec` on the host."""
    made = empty(weight.shape, codec, weight.device)
    encode_into(made, weight, codec)
    return made


def joined(weights: Sequence[Weight]) -> Weight:
    """Weights of the same inputs, all plain or all of one codec, with their outputs end to end."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if plain:
        assert len(plain) == len(weights), "some of the weights are quantised and some are not"
        return torch.cat(plain)
    rows = [weight for weight in weights if isinstance(weight, QuantizedRows)]
    if rows:
        return QuantizedRows.joined(rows)
    coded = [weight for weight in weights if isinstance(weight, Quantized)]
    dtype = coded[0].codes.dtype
    # As bytes: not every operator knows e4m3.
    codes = torch.cat([weight.codes.view(torch.uint8) for weight in coded]).view(dtype)
    return Quantized(codes, torch.cat([weight.scales for weight in coded]))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` on `device` gain by packing, and this torch knows how to."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001  # no public name
    )


def packed_weight(weight: Tensor) -> Tensor:
    """`weight` [out, in], bf16, as an opaque tensor for `packed_product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001  # no public name
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., in] times the packed weight, plus `bias` [out]: [..., out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return product
