"""Tensors as safetensors hold them: plain, or as compressed-tensors' `pack-quantized`, as vLLM reads it.

    NAME.weight_packed        int32 [out, in * bits / 32]: codes, the first in the lowest bits
    NAME.weight_scale         [out, groups], of the model's dtype
    NAME.weight_zero_point    int32 [out * bits / 32, groups]: codes that stand for 0, packed like the codes
    NAME.weight_shape         int64 [2]

Sources: https://github.com/huggingface/safetensors, section "Format"; https://github.com/vllm-project/compressed-tensors,
src/compressed_tensors/compressors.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.conversion.models import SourceModel, SourceTensor
from services.executor.model.conversion.partial_file import WrittenTensor
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS, RowsCodec
from shared.errors import ModelLoadError

ALIGNMENT = 1


@dataclass(frozen=True)
class SafetensorsDtype:
    """What `--dtype` means for safetensors."""

    name: str
    plain: torch.dtype = torch.bfloat16  # of what is not quantized, and of scales
    bits: int = 0  # of the weights of linear layers; 0: plain
    group: int = 0  # inputs that share a scale; 0: the row


DTYPES = {
    dtype.name: dtype
    for dtype in (
        SafetensorsDtype("f32", torch.float32),
        SafetensorsDtype("f16", torch.float16),
        SafetensorsDtype("bf16", torch.bfloat16),
        SafetensorsDtype("int8", bits=8),
        SafetensorsDtype("int4-g128", bits=4, group=128),
        SafetensorsDtype("int4-g64", bits=4, group=64),
        SafetensorsDtype("int4-g32", bits=4, group=32),
    )
}
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


@dataclass(frozen=True)
class _Stored:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def finish(self) -> WrittenTensor:
        return WrittenTensor(self.name, self.nbytes, lambda: (_bytes(piece.to(self.dtype)) for piece in self.pieces()))


def _bytes(tensor: Tensor) -> NDArray[np.generic]:
    values: NDArray[np.generic] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return values


def file_of(
    model: SourceModel, dtype: SafetensorsDtype, rows_of: Callable[[SourceTensor], QuantizedRows]
) -> tuple[bytes, list[WrittenTensor]]:
    """The file's header and its tensors, in the order of the layers; `rows_of` quantizes."""
    linear = model.linear_weights() if dtype.bits else frozenset()
    stored: list[_Stored] = []
    for tensor in sorted(model.tensors, key=by_layer):
        if tensor.name in linear:
            stored += _quantized(tensor, dtype, rows_of)
        else:
            stored.append(_Stored(tensor.name, dtype.plain, tensor.shape, tensor.pieces))
    return _header(stored), [one.finish() for one in stored]


def by_layer(tensor: SourceTensor) -> list[tuple[int, str]]:
    """By which tensors are sorted: numbers in their names as such."""
    words = re.split(r"(\d+)", tensor.name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def configuration(dtype: SafetensorsDtype) -> dict[str, Any]:
    """What config.json says of the weights."""
    changes: dict[str, Any] = {"dtype": str(dtype.plain).removeprefix("torch.")}
    if dtype.bits:
        weights = {
            "num_bits": dtype.bits,
            "type": "int",
            "symmetric": dtype.bits == 8,
            "strategy": "group" if dtype.group else "channel",
            "group_size": dtype.group or None,
            "dynamic": False,
            "observer": "minmax",
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        changes["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            # transformers: its other way of loading expects zero points that are not packed (compressed-tensors 0.20).
            **({} if weights["symmetric"] else {"dequantize": True}),
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }
    return changes


def check(model: SourceModel, dtype: SafetensorsDtype) -> None:
    """Raises `ModelLoadError` where linear layers' weights do not come as such, or not in whole groups."""
    if not dtype.bits:
        return
    linear = model.linear_weights()
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    if missing := sorted(linear - shapes.keys()):
        raise ModelLoadError(
            f"The checkpoint has no tensor {missing[0]}, as the model names it, so {dtype.name} cannot be written; "
            "convert to bf16, or load and save the model with transformers first."
        )
    if experts := sorted(name for name, shape in shapes.items() if "experts" in name and len(shape) > 1):
        raise ModelLoadError(
            f"Weights of experts ({experts[0]}) are not written as {dtype.name}; convert to gguf, or to bf16."
        )
    inputs = {shapes[name][1]: name for name in sorted(linear)}
    for count, name in inputs.items():
        if dtype.group and count % dtype.group:
            grouped = [one for one in DTYPES.values() if one.group]
            fits = [one.name for one in grouped if not any(width % one.group for width in inputs)]
            raise ModelLoadError(
                f"{name} has {count} inputs, not a whole number of groups of {dtype.group}; use "
                f"{' or '.join([*fits, 'int8'])}."
            )


def _header(stored: Sequence[_Stored]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for one in stored:
        place = [offset, offset + one.nbytes]
        entries[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": place}
        offset += one.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _quantized(
    tensor: SourceTensor, dtype: SafetensorsDtype, rows_of: Callable[[SourceTensor], QuantizedRows]
) -> list[_Stored]:
    outputs, inputs = tensor.shape
    base = tensor.name.removesuffix(".weight")
    per_word, groups = 32 // dtype.bits, inputs // dtype.group if dtype.group else 1

    @functools.lru_cache(maxsize=1)
    def rows() -> QuantizedRows:
        return rows_of(tensor)

    def zeros() -> Iterator[Tensor]:
        held = rows().zeros
        assert held is not None, "weights in groups have zero points"
        yield packed(held.T, dtype.bits).T

    def shape() -> Iterator[Tensor]:
        rows.cache_clear()  # the last of the weight's tensors
        yield torch.tensor([outputs, inputs])

    parts = [
        _Stored(
            f"{base}.weight_packed",
            torch.int32,
            (outputs, -(-inputs // per_word)),
            lambda: iter((packed(rows().codes, dtype.bits),)),
        ),
        _Stored(f"{base}.weight_scale", dtype.plain, (outputs, groups), lambda: iter((rows().scales,))),
    ]
    if dtype.group:
        shape_of_zeros = (-(-outputs // per_word), groups)
        parts.append(_Stored(f"{base}.weight_zero_point", torch.int32, shape_of_zeros, zeros))
    return [*parts, _Stored(f"{base}.weight_shape", torch.int64, (2,), shape)]


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n] to int32 [rows, n * bits / 32]; the last word is filled with zeros."""
    per_word = 32 // bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).int()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (filled.view(len(codes), -1, per_word) << shifts).sum(2, dtype=torch.int32)


def quantize(tensor: SourceTensor, dtype: SafetensorsDtype) -> QuantizedRows:
    """With scales that `dtype.plain` holds exactly: the codes are the nearest for those."""
    codec = CODECS["int8"] if dtype.bits == 8 else replace(CODECS["int4"], group=dtype.group)
    pieces = [_with_scales_of(codec, piece.float(), dtype.plain) for piece in tensor.pieces()]
    return QuantizedRows.joined(pieces)


def _with_scales_of(codec: RowsCodec, weight: Tensor, plain: torch.dtype) -> QuantizedRows:
    rows = codec.empty(*weight.shape)
    codec.encode_into(rows, weight)
    scales = rows.scales.to(plain)
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float()).unsqueeze(2)
    zero = torch.full_like(rows.scales, rows.offset) if rows.zeros is None else rows.zeros
    codes = (weight.view(len(weight), -1, rows.group) * inverse).round_() + zero.float().unsqueeze(2)
    least = 0 if rows.zeros is not None else 1
    codes = codes.clamp_(least, (1 << rows.bits) - 1).to(torch.uint8).view(weight.shape)
    return replace(rows, codes=codes, scales=scales)
