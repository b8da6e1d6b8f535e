"""Models of random weights, made where they are used: neither files nor host memory, so a 13B takes a second.

What is measured on them does not depend on what they say, as long as numbers stay numbers: weights are normal, with
a deviation that keeps activations at about one.
"""

import zlib
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.attention import register_attention
from services.executor.model.parallel.layers import LinearShard, VocabParallelHead
from services.executor.model.parallel.rewiring import attention_to_build_with
from services.executor.model.parallel.splitting import apply_plan

SEED = 7
DEVIATION = 0.02


def served_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int = SEED, codec: Any = None
) -> nn.Module:
    """One rank's model as `loader.load_model` returns it, with random weights; with a `codec` its linear layers are
    quantised."""
    register_attention()
    model = _empty(config, dtype, attention_to_build_with(config))
    apply_plan(model, config, ShardLayout.from_config(config, 1, 0), SingleRank())
    filled: nn.Module = fill(model, dtype, device, seed)
    if codec is not None:
        _quantize(filled, codec)
    return filled


def _quantize(model: nn.Module, codec: Any) -> None:
    """One layer after the other, so that both kinds of weights are held of one alone."""
    from services.executor.model.weight_formats import quantize

    for module in model.modules():
        if isinstance(module, LinearShard) and not isinstance(module, VocabParallelHead):
            module.keep_quantized(quantize(module.weight, codec))


def plain_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int = SEED, attention: str = "sdpa"
) -> Any:
    """transformers' own model of the same weights: what has the same name is the same."""
    return fill(_empty(config, dtype, attention), dtype, device, seed)


def _empty(config: Any, dtype: torch.dtype, attention: str) -> Any:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


def fill(model: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Gives every parameter its numbers on `device`; tied ones stay tied. Vectors (norms) are near one, biases near
    nothing. What a parameter gets depends on its name, shape and `seed` alone."""
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in filled:
            numbers = _numbers(name, parameter, dtype, device, seed)
            filled[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, filled[id(parameter)])
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _numbers(
    name: str, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + seed)
    made = torch.empty(parameter.shape, dtype=dtype, device=device)
    made.normal_(0.0, DEVIATION, generator=generator)
    if parameter.dim() == 1 and name.endswith("weight"):
        made += 1.0
    return made
