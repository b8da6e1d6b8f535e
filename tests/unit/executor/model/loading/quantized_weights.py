"""Quantized weights as checkpoints hold them, written in numpy from the formats' documents, and what they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


@dataclass
class Written:
    """One weight: its tensors by the names behind the module's, and its values."""

    tensors: dict[str, Tensor]
    values: Array  # float32 [out, in]
    # `quantization_config` of a checkpoint of such weights.
    settings: dict[str, Any] = field(default_factory=dict)


def bit_stream(codes: Array, bits: int) -> Tensor:
    """int32 words of codes [n, k], one after the other from the lowest bit of the first word of a row on."""
    each = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    flat = each.reshape(len(codes), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view("<i4").copy())


def scales_of(made: np.random.Generator, *shape: int) -> Array:
    return np.asarray(made.uniform(0.5, 1.5, shape) * 0.02, dtype=np.float16)


def values_of(codes: Array, zeros: Array, scales: Array, of: Array) -> Array:
    """(code - zero) * scale, of the group `of` [in]; zeros and scales [out, groups]."""
    whole: Array = (codes.astype(np.int32) - zeros.astype(np.int32)[:, of]).astype(np.float32)
    return whole * scales.astype(np.float32)[:, of]


def gptq(
    made: np.random.Generator,
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    ordered: bool = False,
    symmetric: bool = False,
    version: str = "gptq",
) -> Written:
    size = inputs if group == -1 else group
    groups = inputs // size
    of = np.arange(inputs) // size
    if ordered:
        made.shuffle(of)
    codes = made.integers(0, 1 << bits, (outputs, inputs))
    low, shift = (1, 1) if version == "gptq" else (0, 0)
    zeros = made.integers(low, 1 << bits, (outputs, groups))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = scales_of(made, outputs, groups) / np.float16(1 << bits >> 2)
    tensors = {
        "qweight": bit_stream(codes, bits).t().contiguous(),
        "qzeros": bit_stream((zeros - shift).T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(of.astype(np.int32)),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered}
    return Written(tensors, values_of(codes, zeros, scales, of), {**settings, "checkpoint_format": version})


def awq(made: np.random.Generator, outputs: int, inputs: int, group: int = 32) -> Written:
    size = inputs if group == -1 else group
    codes = made.integers(0, 16, (outputs, inputs))
    zeros = made.integers(0, 16, (outputs, inputs // size))
    scales = scales_of(made, outputs, inputs // size)

    def words(nibbles: Array) -> Tensor:
        """[n, out]: of eight outputs nibble i of the word is that of number order[i]."""
        packed = np.zeros((len(nibbles), outputs // 8), dtype=np.uint32)
        for place, number in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed |= nibbles[:, number::8].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(packed.view(np.int32))

    tensors = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": torch.from_numpy(scales.T.copy())}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Written(tensors, values_of(codes, zeros, scales, np.arange(inputs) // size), settings)


def compressed(
    made: np.random.Generator,
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
) -> Written:
    """pack-quantized: int codes in [-2 ** (bits - 1), 2 ** (bits - 1)), to which half of the codes is added."""
    size = inputs if group == -1 else group
    of = np.arange(inputs) // size
    if ordered:
        made.shuffle(of)
    half = 1 << (bits - 1)
    codes = made.integers(-half, half, (outputs, inputs))
    zeros = np.zeros((outputs, inputs // size), dtype=np.int64)
    scales = scales_of(made, outputs, inputs // size) / np.float16(half >> 1)
    tensors = {
        "weight_packed": bit_stream(codes + half, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        zeros = made.integers(-half, half, zeros.shape)
        tensors["weight_zero_point"] = bit_stream((zeros + half).T, bits).t().contiguous()
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    settings = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    return Written(
        tensors,
        values_of(codes, zeros, scales, of),
        {**settings, "quant_method": "compressed-tensors", "ignore": ["lm_head"]},
    )


def integers(made: np.random.Generator, outputs: int, inputs: int, per: str = "channel") -> Written:
    """int-quantized: W8A8."""
    codes = made.integers(-128, 128, (outputs, inputs))
    scales = scales_of(made, outputs if per == "channel" else 1, 1)
    scales = scales / np.float16(8)
    tensors = {
        "weight": torch.from_numpy(codes.astype(np.int8)),
        "weight_scale": torch.from_numpy(scales if per == "channel" else scales[0]),
    }
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": per}
    settings = {"format": "int-quantized", "config_groups": {"group_0": {"weights": weights}}}
    values = codes.astype(np.float32) * scales.astype(np.float32)
    return Written(tensors, values, {**settings, "quant_method": "compressed-tensors"})


def e4m3(octets: Array) -> Array:
    """float32: sign, four bits of exponent with bias 7, three of mantissa; exponent 0: no leading one."""
    sign = np.where(octets & 128, -1.0, 1.0)
    exponent, mantissa = (octets >> 3 & 15).astype(int), (octets & 7) / 8
    found = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return np.asarray(sign * found, dtype=np.float32)


def fp8(made: np.random.Generator, outputs: int, inputs: int, per: str = "block", block: int = 128) -> Written:
    """`per` tensor, channel (compressed-tensors) or block (as DeepSeek and Qwen have it)."""
    octets = made.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    octets[octets & 127 == 127] = 0  # no number
    octets &= 0b10111111  # about 1
    shape = {"tensor": (1,), "channel": (outputs, 1), "block": (-(-outputs // block), -(-inputs // block))}[per]
    scales = made.uniform(0.02, 0.06, shape).astype(np.float32)
    wide = scales
    if per == "block":
        wide = scales.repeat(block, 0)[:outputs].repeat(block, 1)[:, :inputs]
    weight = torch.from_numpy(octets).view(torch.float8_e4m3fn)
    if per == "block":
        settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [block, block]}
        tensors = {"weight": weight, "weight_scale_inv": torch.from_numpy(scales)}
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": per}
        settings = {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}}
        settings["quant_method"] = "compressed-tensors"
        tensors = {"weight": weight, "weight_scale": torch.from_numpy(scales)}
    return Written(tensors, e4m3(octets) * wide, settings)


def mxfp4(made: np.random.Generator, experts: int, outputs: int, inputs: int) -> Written:
    """Values [experts, out, in]; gpt-oss' parameters lie the other way."""
    nibbles = made.integers(0, 16, (experts, outputs, inputs))
    exponents = made.integers(118, 124, (experts, outputs, inputs // 32))
    sign = np.where(nibbles & 8, -1.0, 1.0)
    exponent, mantissa = nibbles >> 1 & 3, (nibbles & 1) / 2
    whole = sign * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))
    values = whole * 2.0 ** (exponents - 127).repeat(32, axis=2)
    blocks = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).astype(np.uint8)
    tensors = {
        "_blocks": torch.from_numpy(blocks.reshape(experts, outputs, inputs // 32, 16)),
        "_scales": torch.from_numpy(exponents.astype(np.uint8)),
    }
    return Written(tensors, values.astype(np.float32), {"quant_method": "mxfp4"})


def nf4(
    made: np.random.Generator, outputs: int, inputs: int, nested: bool = True, block: int = 64, above: int = 256
) -> Written:
    size = outputs * inputs
    table = np.sort(made.uniform(-1, 1, 16)).astype(np.float32)
    codes = made.integers(0, 16, size)
    count = -(-size // block)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": [outputs, inputs]}
    padded = np.pad(codes, (0, size % 2))
    tensors = {
        "weight": torch.from_numpy((padded[::2] << 4 | padded[1::2]).astype(np.uint8)).unsqueeze(1),
        "weight.quant_map": torch.from_numpy(table),
    }
    if nested:
        fine = made.integers(0, 256, count).astype(np.uint8)
        levels = np.sort(made.uniform(-1, 1, 256)).astype(np.float32)
        coarse = made.uniform(0.01, 0.02, -(-count // above)).astype(np.float32)
        offset = 0.0625
        scales = levels[fine] * coarse.repeat(above)[:count] + np.float32(offset)
        state |= {"nested_blocksize": above, "nested_offset": offset}
        tensors |= {
            "weight.absmax": torch.from_numpy(fine),
            "weight.nested_absmax": torch.from_numpy(coarse),
            "weight.nested_quant_map": torch.from_numpy(levels),
        }
    else:
        scales = made.uniform(0.05, 0.1, count).astype(np.float32)
        tensors["weight.absmax"] = torch.from_numpy(scales)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    values = (table[codes] * scales.repeat(block)[:size]).reshape(outputs, inputs)
    return Written(tensors, values, settings)


Write = Callable[[np.random.Generator, int, int], Written]

# Of weights [out, in], multiples of 32.
FORMS: dict[str, Write] = {
    "gptq": gptq,
    "gptq symmetric": lambda *sizes: gptq(*sizes, symmetric=True),
    "gptq act-order": lambda *sizes: gptq(*sizes, ordered=True),
    "gptq v2": lambda *sizes: gptq(*sizes, version="gptq_v2"),
    "gptq of 2 bits": lambda *sizes: gptq(*sizes, bits=2),
    "gptq of 3 bits": lambda *sizes: gptq(*sizes, bits=3),
    "gptq of 8 bits": lambda *sizes: gptq(*sizes, bits=8),
    "gptq per channel": lambda *sizes: gptq(*sizes, group=-1),
    "awq": awq,
    "awq per channel": lambda *sizes: awq(*sizes, group=-1),
    "compressed-tensors": compressed,
    "compressed-tensors asymmetric": lambda *sizes: compressed(*sizes, symmetric=False),
    "compressed-tensors act-order": lambda *sizes: compressed(*sizes, ordered=True),
    "compressed-tensors of 8 bits": lambda *sizes: compressed(*sizes, bits=8, group=-1),
    "int8 per channel": integers,
    "int8 per tensor": lambda *sizes: integers(*sizes, per="tensor"),
    "fp8 by blocks": lambda *sizes: fp8(*sizes, block=32),
    "fp8 per channel": lambda *sizes: fp8(*sizes, per="channel"),
    "fp8 per tensor": lambda *sizes: fp8(*sizes, per="tensor"),
    "nf4": nf4,
    "nf4 with plain scales": lambda *sizes: nf4(*sizes, nested=False),
}
