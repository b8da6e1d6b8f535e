"""Brings an encoder into memory: transformers' own model, without what its task does not need, with this rank's share
of the weights.

    config.json ─▶ model on the meta device, buffers real ─▶ split over the ranks ─▶ slices of the files

A checkpoint may hold other heads (of masked words, a pooler that embeddings do not use): they are not read.
"""

import inspect
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModel, AutoModelForSequenceClassification

from services.executor.collectives.base import Collectives
from services.executor.model.encoders.attention import ATTENTION_NAME, register_text_attention
from services.executor.model.encoders.families import family_of
from services.executor.model.encoders.splitting import split_encoder
from services.executor.model.loading.gguf_pooling import dense_name
from services.executor.model.loading.loader import (
    LOADING,
    build_empty,
    is_gguf,
    move_buffers,
    open_weights,
    parameters_of,
    place,
    plan_reads,
    read_weights,
    sources_in,
)
from services.executor.model.loading.reading import Progress
from services.executor.model.pooling import Dense
from shared.errors import ModelLoadError

log = structlog.get_logger(__name__)


class Encoder(NamedTuple):
    """A rank's share."""

    model: Any  # with its head where it classifies
    base: Any  # what makes states of tokens, within `model` or the same
    dense: nn.Module | None = None  # behind the pooling


def load_encoder(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    collectives: Collectives,
    device: torch.device,
    progress: Progress,
    *,
    classifies: bool,
) -> Encoder:
    """The encoder in `directory`, of this configuration, with its head where it `classifies`. Raises `ModelLoadError`
    and `ConfigurationError`: one sentence with the remedy."""
    if getattr(config, "quantization_config", None):
        raise ModelLoadError(
            f"The encoder in {directory} is quantized, which is not served; choose the model's unquantized weights."
        )
    register_text_attention()
    with LOADING, open_weights(directory) as files:
        model, ties = build_empty(config, dtype, partial(_build, classifies=classifies))
        sources, base = sources_in(files, model), model.base_model
        split_encoder(base, config, collectives)
        plan = plan_reads(parameters_of(model, ties), sources)
        _check_unused(sources.unused, directory)
        reads = [read for _, read in plan]
        for (parameter, _), tensor in zip(plan, read_weights(reads, files, config, device, progress), strict=True):
            place(parameter, tensor)
    move_buffers(model, device)
    return Encoder(model.eval(), base)


_OF_LAYERS = re.compile(r"(^|\.)(\w*layers?|blk)\.\d+\.")


def _check_unused(names: Collection[str], directory: Path) -> None:
    """Raises where the model has no place for tensors of layers: it would compute nonsense."""
    if found := next((name for name in sorted(names) if _OF_LAYERS.search(name)), None):
        raise ModelLoadError(
            f"The weights in {directory} hold a tensor {found} that the architecture does not use; "
            "config.json belongs to another model, fetch the model again."
        )
    if names:
        log.info("weights_left_out", tensors=len(names), reason="they are of other heads than the one in use")


def _build(config: Any, *, classifies: bool, **options: Any) -> Any:
    options["attn_implementation"] = ATTENTION_NAME if family_of(config).is_flat else "eager"
    if classifies:
        return AutoModelForSequenceClassification.from_config(config, **options)
    kind = MODEL_MAPPING[type(config)]
    if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
        options["add_pooling_layer"] = False
    return AutoModel.from_config(config, **options)


def load_dense(layers: tuple[Dense, ...], size: int, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
    """sentence-transformers' layers behind a pooling of `size` numbers; None: there are none. Raises
    `ModelLoadError`."""
    modules: list[nn.Module] = []
    for layer in layers:
        if layer.inputs != size:
            raise ModelLoadError(
                f"The layer in {layer.directory} takes {layer.inputs} numbers and is given {size}; the directory mixes "
                "two models, fetch the model again."
            )
        size = layer.outputs
        linear = nn.Linear(layer.inputs, layer.outputs, layer.bias, dtype=dtype, device="meta")
        in_gguf = is_gguf(layer.directory.parent)
        with open_weights(layer.directory.parent if in_gguf else layer.directory) as files:
            for name, shape in linear.state_dict().items():
                stored = dense_name(layer.directory.name) if in_gguf else f"linear.{name}"
                if files.shapes.get(stored) != tuple(shape.shape):
                    raise ModelLoadError(
                        f"The weights in {layer.directory} have no {stored} of the shape {list(shape.shape)}, "
                        "which its config.json calls for; fetch the model again."
                    )
                value: Tensor = files.tensor(stored).to(device, dtype, copy=True)
                setattr(linear, name, nn.Parameter(value, requires_grad=False))
        modules += [linear, getattr(nn, layer.activation)()]
    return nn.Sequential(*modules).eval() if modules else None
