"""Brings the base of a job into a trainer: transformers' model, whose weights stay where serving has them.

bf16, fp32 checkpoints      the checkpoint's own mapped file
quantized, on CPUs          the mapped file of packed weights that serving keeps, made where it is not there
other quantized models      codes in memory: on GPUs, and what the native kernels do not compute
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.model.adapters.targets import targets_of
from services.executor.model.attention import ATTENTION_NAME as PAGED
from services.executor.model.attention import SCALES_ATTRIBUTE, WINDOW_ATTRIBUTE
from services.executor.model.catalogue import check_supported, is_encoder
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import is_quantized, load_config, load_frozen
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.parallel.rewiring import attention_to_build_with
from services.executor.model.step_context import Chunks
from services.executor.model.weight_formats import has_fast_bf16
from services.executor.training.base.weights import FrozenWeight, PlainWeight
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class Base:
    model: Any
    """transformers', in evaluation mode; norms and biases in the type of the computation, on its device."""
    weights: Mapping[str, FrozenWeight]
    """Of linears and embeddings, by the module's name; tied ones are the same object."""
    targets: list[str]
    """Names of the linears that adapters may change."""
    dtype: torch.dtype
    """Of the computation."""
    kind: str
    """For the log: where the weights lie."""


def load_base(
    directory: Path,
    settings: ExecutorSettings,
    device: torch.device,
    threads: int,
    compute_dtype: torch.dtype | None = None,
) -> Base:
    """Raises `ModelLoadError`: one sentence that says why the model in `directory` cannot be trained here."""
    config = load_config(directory)
    check_supported(config)
    check_trainable(config)
    dtype = compute_dtype or _dtype_of(settings, config, device)
    if is_quantized(directory, config) or settings.weight_dtype not in ("auto", "bf16"):
        raise ModelLoadError("Quantized models are not trained yet; choose an unquantized one.")
    model: Any = load_frozen(directory, dtype, mapped=True)
    _check_modules(model)
    targets = [target.name for target in targets_of(model)]
    weights = _plain_weights(model, device, dtype)
    return Base(model.to(device), weights, targets, dtype, "checkpoint")


def _dtype_of(settings: ExecutorSettings, config: Any, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    if getattr(config, "dtype", None) in (torch.float32, "float32"):
        return torch.float32
    return torch.bfloat16 if has_fast_bf16(device) else torch.float32


def check_trainable(config: Any) -> None:
    """Raises `ModelLoadError`, one sentence, where models of this text configuration are not trained."""
    if is_encoder(config.to_dict()):
        raise _untrainable("it is an encoder, and fine-tuning is of models that write text")
    kinds = {state.kind for state in layer_states(config, ShardLayout.from_config(config, 1, 0))}
    if others := kinds - {"full", "sliding"}:
        raise _untrainable(
            f"its layers keep {', '.join(sorted(others))} state, and gradients are of attention"
        )
    if attention_to_build_with(config) != PAGED or getattr(config, "is_heterogeneous", False):
        raise _untrainable(f"the attention of {config.model_type!r} is not transformers' common one")


def _check_modules(model: Any) -> None:
    """What only the modules show."""
    for name, module in model.named_modules():
        if hasattr(module, "num_experts") or name.endswith(".experts"):
            raise _untrainable("it is a mixture of experts, and gradients are of dense layers")
        if SCALES_ATTRIBUTE in module.__dict__ or isinstance(module.__dict__.get(WINDOW_ATTRIBUTE), Chunks):
            raise _untrainable("its attention follows positions in a way that gradients are not made of")


def _untrainable(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"This model cannot be fine-tuned here, since {reason}; choose a dense model of attention layers, such as "
        "Llama, Mistral, Qwen or Gemma."
    )


def _plain_weights(model: Any, device: torch.device, dtype: torch.dtype) -> dict[str, FrozenWeight]:
    """Of all modules that hold shares of linears and embeddings, which hold nothing afterwards."""
    made: dict[int, FrozenWeight] = {}
    weights: dict[str, FrozenWeight] = {}
    for name, module in _shards(model):
        held = module.stored
        assert isinstance(held, Tensor), "an unquantized model has plain weights"
        if id(held) not in made:
            data = held.detach()
            made[id(held)] = PlainWeight(data if device.type == "cpu" else data.to(device, dtype))
        weights[name] = made[id(held)]
    for _, module in _shards(model):
        module.keep_quantized(None)
    return weights


def _shards(model: Any) -> list[tuple[str, WeightShard]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, WeightShard)]
