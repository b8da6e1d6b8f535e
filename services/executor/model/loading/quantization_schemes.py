"""Which tensors of a checkpoint are the codes and scales of one weight: what `quantization_config` means.

The method says how to read; the tensors say which weights are coded. What a checkpoint leaves as it is (lists called
`modules_to_not_convert` or `ignore`) lies in it as plain tensors, so nobody asks those lists.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, float8_e4m3fn, int8

from services.executor.model.loading.quantized_tensors import (
    Awq,
    CodedTensor,
    Fp8,
    Gptq,
    Integers,
    Mxfp4,
    Nf4,
    Nf4State,
    PackedIntegers,
)
from shared.errors import ModelLoadError

Tensors = Mapping[str, Tensor]  # of a checkpoint, over its mapped bytes, by name

_LONGEST_STATE = 1 << 16  # bytes of a weight's `quant_state` of bitsandbytes, which is a few hundred


Parts = Mapping[str, Tensor]  # what one weight is made of, by names behind its module's


@dataclass(frozen=True)
class StoredCodes:
    """A weight that is coded."""

    name: str  # of the model's parameter
    prefix: str  # of the names of what it is made of
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    make: Callable[[Parts], CodedTensor]  # raises `ValueError` where they do not fit


Find = Callable[[Tensors], Iterator[StoredCodes]]


def scheme_of(config: Any) -> Find | None:
    """How a model of this transformers configuration finds its coded weights; None: it has none.

    Raises `ModelLoadError` where they are coded in a way that is not served.
    """
    described = getattr(config, "quantization_config", None)
    if not described:
        return None
    try:
        settings = dict(described if isinstance(described, Mapping) else described.to_dict())
        method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else ""))
        make = _METHODS.get(method)
        if make is not None:
            return make(settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(f"described by a quantization_config that makes no sense ({error})", _methods()) from error
    raise _refused(f"quantized by the method {method!r}", _methods())


def coded_tensors(find: Find, tensors: Tensors) -> tuple[dict[str, CodedTensor], dict[str, tuple[str, ...]]]:
    """(the coded weights by the parameters' names, which tensors of the checkpoint each is made of).

    Raises `ModelLoadError`, with the weight's name, where tensors are missing or do not fit.
    """
    coded, made_of = {}, {}
    for found in find(tensors):
        missing = [part for part in found.needed if found.prefix + part not in tensors]
        if missing:
            raise ModelLoadError(
                f"The weights have no tensor {found.prefix}{missing[0]}, which the quantized {found.name} needs; "
                "the checkpoint is incomplete or config.json belongs to another one, fetch the model again."
            )
        names = {part: name for part in found.needed + found.optional if (name := found.prefix + part) in tensors}
        try:
            coded[found.name] = found.make({part: tensors[name] for part, name in names.items()})
        except ValueError as error:
            raise unreadable(found.name, error) from error
        made_of[found.name] = tuple(names.values())
    return coded, made_of


def unreadable(name: str, error: ValueError) -> ModelLoadError:
    """Of the coded weight `name`."""
    return ModelLoadError(
        f"The quantized weight {name} cannot be read ({error}); "
        "the checkpoint is damaged or config.json belongs to another one, fetch the model again."
    )


def _gptq(settings: dict[str, Any]) -> Find:
    bits, group = _number(settings, "bits"), _group(settings)
    version = settings.get("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8):
        raise _refused(f"gptq with {bits} bits", "2, 3, 4 and 8 bits")
    if version not in ("gptq", "gptq_v2"):
        raise _refused(f"gptq with checkpoint_format {version!r}", "gptq and gptq_v2")
    if any(not str(rule).startswith("-:") for rule in settings.get("dynamic") or ()):
        raise _refused("gptq with other bits for some modules (dynamic)", "one width for all quantized modules")
    needed = ("qweight", "scales", "qzeros", *(["g_idx"] if settings.get("desc_act") else []))
    shift = 1 if version == "gptq" else 0

    def make(parts: Parts) -> CodedTensor:
        zeros, index = parts["qzeros"], parts.get("g_idx")
        return Gptq(parts["qweight"], parts["scales"], zeros, index, bits, group, shift)

    return lambda tensors: _weights("qweight", tensors, needed, ("g_idx",), make)


def _awq(settings: dict[str, Any]) -> Find:
    bits, group = _number(settings, "bits"), _group(settings)
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise _refused(f"awq with {bits} bits", "4 bits")
    if version != "gemm" or settings.get("zero_point") is False:
        raise _refused(f"awq of version {version!r}, zero_point {settings.get('zero_point')}", "gemm with zero points")

    needed = ("qweight", "scales", "qzeros")

    def make(parts: Parts) -> CodedTensor:
        return Awq(parts["qweight"], parts["scales"], parts["qzeros"], group)

    return lambda tensors: _weights("qweight", tensors, needed, (), make)


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


def _compressed(settings: dict[str, Any]) -> Find:
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = [settings.get("format"), *(group.get("format") for group in groups)]
    for name in filter(None, formats):
        if name not in (*_COMPRESSED, "mixed-precision"):
            raise _refused(f"compressed-tensors of format {name!r}", ", ".join(_COMPRESSED[:3]))
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _refused(f"compressed-tensors with sparsity {sparse!r}", "dense weights")
    if settings.get("transform_config"):
        raise _refused("compressed-tensors with transforms (transform_config)", "weights without")
    weights = [group.get("weights") or {} for group in groups]
    blocks = {tuple(block) for each in weights if (block := each.get("block_structure"))}
    widths = {each.get("num_bits") for each in weights}

    def packed(parts: Parts) -> CodedTensor:
        made = _packed(parts)
        if made.bits not in widths:
            raise ValueError(f"it has codes of {made.bits} bits, which config.json does not name")
        return made

    def fp8(parts: Parts) -> CodedTensor:
        return _fp8_of(parts, blocks)

    def find(tensors: Tensors) -> Iterator[StoredCodes]:
        words = ("weight_packed", "weight_scale", "weight_shape")
        yield from _weights(words[0], tensors, words, ("weight_zero_point", "weight_g_idx", *_ACTIVATIONS), packed)
        optional = ("weight_zero_point", *_ACTIVATIONS)
        for dtype, make in ((int8, _integers), (float8_e4m3fn, fp8)):
            yield from _weights("weight", tensors, ("weight", "weight_scale"), optional, make, dtype)

    return find


# Fixed scales of activations, which are given scales as they come.
_ACTIVATIONS = ("input_scale", "input_zero_point")


def _packed(parts: Parts) -> PackedIntegers:
    stored = parts["weight_shape"]
    if stored.shape != (2,) or stored.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"its weight_shape is {stored.dtype} {list(stored.shape)} where two whole numbers are needed")
    shape = stored.tolist()
    zeros, index = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    return PackedIntegers(parts["weight_packed"], parts["weight_scale"], zeros, index, (shape[0], shape[1]))


def _integers(parts: Parts) -> CodedTensor:
    return Integers(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"))


def _fp8_of(parts: Parts, blocks: set[tuple[int, ...]]) -> CodedTensor:
    weight, scales = parts["weight"], parts["weight_scale"]
    if scales.numel() == 1 or scales.dim() == 1 or scales.shape == (len(weight), 1):
        return Fp8(weight, scales, None)
    if len(blocks) != 1:
        raise ValueError("it has scales for blocks and config.json does not name one block_structure")
    return Fp8(weight, scales, _block(next(iter(blocks))))


def _fp8(settings: dict[str, Any]) -> Find:
    block = None if (size := settings.get("weight_block_size")) is None else _block(size)
    if str(settings.get("fmt", "e4m3")) != "e4m3":
        raise _refused(f"fp8 as {settings['fmt']}", "e4m3")
    if (experts := settings.get("expert_dtype")) not in (None, "fp8"):
        raise _refused(f"fp8 with experts in {experts}", "experts in fp8")
    usual = "weight_scale" if block is None else "weight_scale_inv"

    def find(tensors: Tensors) -> Iterator[StoredCodes]:
        make = partial(_fp8_by, usual, block)
        for found in _weights("weight", tensors, ("weight", usual), _OF_INPUTS, make, float8_e4m3fn):
            if f"{found.prefix}{_DEEPSEEK_SCALE}" in tensors:
                own = partial(_fp8_by, _DEEPSEEK_SCALE, block)
                found = replace(found, needed=("weight", _DEEPSEEK_SCALE), make=own)
            yield found

    return find


_DEEPSEEK_SCALE = "scale"  # what DeepSeek's own checkpoints call what others call `weight_scale_inv`
_OF_INPUTS = ("input_scale", "activation_scale")


def _fp8_by(scale: str, block: tuple[int, int] | None, parts: Parts) -> CodedTensor:
    return Fp8(parts["weight"], parts[scale], block)


def _mxfp4(settings: dict[str, Any]) -> Find:
    needed = ("_blocks", "_scales")

    def find(tensors: Tensors) -> Iterator[StoredCodes]:
        for name in sorted(tensors):
            if name.endswith("_blocks"):
                base = name.removesuffix("_blocks")
                yield StoredCodes(base, base, needed, (), lambda parts: Mxfp4(*(parts[part] for part in needed)))

    return find


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _bitsandbytes(settings: dict[str, Any]) -> Find:
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit") or kind != "nf4":
        what = f"4 bits as {kind}" if settings.get("load_in_4bit") else "8 bits (LLM.int8)"
        raise _refused(f"bitsandbytes with {what}", "nf4")

    needed = ("weight", "weight.absmax", "weight.quant_map", _STATE)
    nested = ("weight.nested_absmax", "weight.nested_quant_map")

    def make(parts: Parts) -> CodedTensor:
        weight, absmax, quant_map, state = (parts[part] for part in needed)
        above = [parts.get(part) for part in nested]
        return Nf4(weight, absmax, quant_map, above[0], above[1], _nf4_state(state))

    return lambda tensors: _weights("weight.absmax", tensors, needed, nested, make)


def _nf4_state(stored: Tensor) -> Nf4State:
    if stored.nbytes > _LONGEST_STATE:
        raise ValueError(f"its quant_state has {stored.nbytes} bytes")
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
        outputs, inputs = (int(size) for size in state["shape"])
        nested = "nested_blocksize" in state
        made = Nf4State(
            shape=(outputs, inputs),
            block=int(state["blocksize"]),
            nested_block=int(state["nested_blocksize"]) if nested else 0,
            nested_offset=float(state["nested_offset"]) if nested else 0.0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("its quant_state is not the description of a weight [out, in]") from error
    if min(*made.shape, made.block) < 1 or made.nested_block < 0:
        raise ValueError("its quant_state names sizes below one")
    return made


# By `quant_method`
_METHODS: dict[str, Callable[[dict[str, Any]], Find]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}


def _methods() -> str:
    names = [f"{name} (nf4)" if make is _bitsandbytes else name for name, make in _METHODS.items()]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _weights(
    sign: str,
    tensors: Tensors,
    needed: tuple[str, ...],
    optional: tuple[str, ...],
    make: Callable[[Parts], CodedTensor],
    dtype: torch.dtype | None = None,
) -> Iterator[StoredCodes]:
    """Of each module that has a tensor `sign`, of `dtype` if that is given."""
    for name in sorted(tensors):
        if name.endswith(f".{sign}") and dtype in (None, tensors[name].dtype):
            base = name.removesuffix(f".{sign}")
            yield StoredCodes(f"{base}.weight", f"{base}.", needed, optional, make)


def _number(settings: dict[str, Any], key: str) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(f"described by a quantization_config whose {key} is {value!r}", f"a whole number of {key}")
    return value


def _group(settings: dict[str, Any]) -> int:
    """0: the row."""
    group = _number(settings, "group_size")
    if group != -1 and (group < 16 or group % 16):
        raise _refused(f"in groups of {group} inputs", "groups of a multiple of 16, and -1 (the row)")
    return max(group, 0)


def _block(described: Any) -> tuple[int, int]:
    sizes = list(described) if isinstance(described, list | tuple) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _refused(f"in blocks of {described!r}", "blocks of two sizes, such as [128, 128]")
    return sizes[0], sizes[1]


def _refused(what: str, served: str) -> ModelLoadError:
    what = re.sub(r"\s+", " ", what)[:200]
    return ModelLoadError(
        f"The checkpoint is {what}, which is not served; served are {served}: choose another quantization of the model."
    )
