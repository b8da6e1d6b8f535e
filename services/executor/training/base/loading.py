"""Brings the base of a job into a trainer: transformers' model, whose weights stay where serving has them.

bf16, fp32 checkpoints      the checkpoint's own mapped file
quantized, on CPUs          the mapped file of packed weights that serving keeps, made where it is not there
other quantized models      codes in memory: on GPUs, and what the native kernels do not compute
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.packed_model import PackedModel
from services.executor.families.registry import family_of
from services.executor.model.adapters.targets import AdapterTarget, targets_of
from services.executor.model.attention import ATTENTION_NAME as PAGED
from services.executor.model.attention import SCALES_ATTRIBUTE, WINDOW_ATTRIBUTE
from services.executor.model.catalogue import check_supported, is_encoder
from services.executor.model.dtypes import choose_dtype
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import is_quantized, keeps_codes, load_config, load_frozen, load_model
from services.executor.model.lowering import CannotLower
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.parallel.module_patches import attention_to_build_with
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import codec_of
from services.executor.model.step_context import Chunks
from services.executor.model.weight_formats import Weight
from services.executor.training.base.packed import packed_model, packed_weights
from services.executor.training.base.weights import CodedWeight, FrozenWeight, PlainWeight
from shared.errors import ModelLoadError

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LoadedBase:
    """What one of the processes has that train together (`training/ranks.py`), which may be all."""

    # transformers', in evaluation mode; norms and biases in the type of the computation, on its device.
    model: Any
    # Of linears and embeddings, by the module's name; tied ones are the same object.
    weights: Mapping[str, FrozenWeight]
    targets: list[AdapterTarget]  # the linears that adapters may change
    dtype: torch.dtype  # of the computation
    kind: str  # for the log: where the weights lie


def load_base(
    directory: Path,
    settings: ExecutorSettings,
    device: torch.device,
    threads: int,
    compute_dtype: torch.dtype | None,
    collectives: Collectives,
) -> LoadedBase:
    """The share of this rank of `collectives`. Raises `ModelLoadError`: one sentence that says why the model in
    `directory` cannot be trained here."""
    config = load_config(directory)
    check_supported(config)
    check_trainable(config)
    dtype = compute_dtype or choose_dtype(settings, device, config, by_kernels=False)
    if not is_quantized(directory, config) and settings.weight_dtype in ("auto", "bf16"):
        return _base(load_frozen(directory, dtype, collectives, mapped=True), "checkpoint", device, dtype)
    if device.type == "cpu" and choose_dtype(settings, device, config) is torch.bfloat16:
        try:
            packed = packed_model(directory, settings, config, threads, collectives)
        except CannotLower as reason:
            log.info("weights_in_memory", reason=str(reason))
        else:
            unfilled = load_frozen(directory, dtype, collectives, mapped=False)
            return _packed_base(unfilled, packed, dtype, threads)
    coded = _load_codes(directory, settings, config, device, dtype, collectives)
    return _base(coded, "codes in memory", device, dtype)


def _base(model: Any, kind: str, device: torch.device, dtype: torch.dtype) -> LoadedBase:
    """Of what the modules of `model` hold."""
    _check_modules(model)
    targets = targets_of(model)
    weights = _held_weights(model, device, dtype)
    return LoadedBase(model.to(device), weights, targets, dtype, kind)


def _packed_base(model: Any, packed: PackedModel, dtype: torch.dtype, threads: int) -> LoadedBase:
    """`model`: without its weights."""
    _check_modules(model)
    targets = targets_of(model)
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    head, embedding = (_name_of(model, one) for one in ends)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="unpack")
    weights = packed_weights(packed, head, embedding, pool, threads)
    for _, module in _shards(model):
        module.keep_quantized(None)
    return LoadedBase(model, weights, targets, dtype, "packed weights")


def _load_codes(
    directory: Path,
    settings: ExecutorSettings,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    collectives: Collectives,
) -> Any:
    """The model with its codes in memory, as they are stored or as `weight_dtype` asks: of values as serving rounds
    them, whatever `dtype` is computed in."""
    keeps = keeps_codes(settings.weight_dtype, config)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    model = load_model(
        directory,
        choose_dtype(settings, device, config),
        layout,
        collectives,
        torch.device("cpu"),
        lambda done, total: None,
        codec_of(settings.weight_dtype),
        keep_codes=keeps,
    )
    for parameter in model.parameters():  # not buffers: rotary frequencies stay as they are
        parameter.data = parameter.data.to(dtype)
    return model


# What configurations call them.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_trainable(config: Any) -> None:
    """Raises `ModelLoadError`, one sentence, where models of this text configuration are not trained."""
    if is_encoder(config.to_dict()):
        raise _untrainable("it is an encoder, and fine-tuning is of models that write text")
    kinds = {state.kind for state in layer_states(config, ShardLayout.from_config(config, 1, 0))}
    if others := kinds - {"full", "sliding"}:
        raise _untrainable(f"its layers keep {', '.join(sorted(others))} state, and only attention can be trained")
    if attention_to_build_with(config) != PAGED or getattr(config, "is_heterogeneous", False):
        raise _untrainable(f"the attention of {config.model_type!r} is not transformers' common one")
    if any(getattr(config, name, None) for name in _EXPERTS):
        raise _untrainable("it is a mixture of experts, and only dense layers can be trained")
    if not family_of(config.model_type).trained:
        raise _untrainable(f"gradients of models of type {config.model_type!r} are not tested")


def _check_modules(model: Any) -> None:
    """What only the modules show."""
    for module in model.modules():
        if SCALES_ATTRIBUTE in module.__dict__ or isinstance(module.__dict__.get(WINDOW_ATTRIBUTE), Chunks):
            raise _untrainable("training does not support its positions in attention")


def _untrainable(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"This model cannot be fine-tuned here, since {reason}; choose a dense model of attention layers, such as "
        "Llama, Mistral, Qwen or Gemma."
    )


def _held_weights(model: Any, device: torch.device, dtype: torch.dtype) -> dict[str, FrozenWeight]:
    """Of all modules that hold shares of linears and embeddings, which hold nothing afterwards."""
    made: dict[int, FrozenWeight] = {}
    weights: dict[str, FrozenWeight] = {}
    for name, module in _shards(model):
        held = module.stored
        if id(held) not in made:
            made[id(held)] = _frozen(held, device, dtype)
        weights[name] = made[id(held)]
    for _, module in _shards(model):
        module.keep_quantized(None)
    return weights


def _frozen(held: Weight, device: torch.device, dtype: torch.dtype) -> FrozenWeight:
    if isinstance(held, DeferredRows):
        held = held.read()
    if isinstance(held, QuantizedRows):
        return _coded(held.to(device))
    assert isinstance(held, Tensor), "others are for GPUs that serve"
    return PlainWeight(held.detach() if device.type == "cpu" else held.detach().to(device, dtype))


def _coded(held: QuantizedRows) -> FrozenWeight:
    """On GPUs with the bits of its format, where Triton unpacks them."""
    if held.codes.device.type != "cpu" and find_spec("triton") is not None:
        from services.executor.training.base.gpu_weights import grouped_weight

        if (packed := grouped_weight(held)) is not None:
            return packed
    return CodedWeight(held)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {one: name for name, one in model.named_modules()}
    return names[module]


def _shards(model: nn.Module) -> list[tuple[str, WeightShard]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, WeightShard)]
