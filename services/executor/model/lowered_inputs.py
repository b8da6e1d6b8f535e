"""Inputs of layers, lowered: what each layer of Gemma 4 adds of a token beside what it attends to (`native/decoder.h`,
rz_inputs).

    model    table row of the token + norm(projection of its embedding)    [layers, width]
    layer    x + norm(projection(activation(gate(x)) * the layer's input))
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.executor.model.lowered_recurrent import CannotLower
from services.executor.model.parallel.layers import LinearShard, VocabParallelEmbedding


@dataclass(frozen=True)
class InputScales:
    """The numbers of `rz_inputs`, beside its width."""

    table_scale: float
    projection_scale: float
    scale: float  # of both together


@dataclass(frozen=True)
class ModelInputs:
    """What makes the inputs of all layers. Modules are the model's own."""

    table: VocabParallelEmbedding  # [rows of the embedding, layers * width]
    projection: Any  # an `nn.Linear`, whole on each rank: hidden -> layers * width
    norm: Tensor  # float32 [width]
    scales: InputScales


class LayerInput(NamedTuple):
    """What a layer makes of its input."""

    gate: LinearShard
    projection: LinearShard


def lower_inputs(base: Any, dtype: torch.dtype) -> ModelInputs | None:
    """Of the text model `base`, which computes in `dtype`; None: its layers take none. Raises `CannotLower`."""
    width = int(getattr(base, "hidden_size_per_layer_input", None) or 0)
    if not width:
        return None
    table, embedding = base.embed_tokens_per_layer, base.embed_tokens
    split = isinstance(table, VocabParallelEmbedding) and isinstance(embedding, VocabParallelEmbedding)
    if not split or table.span != embedding.span:
        raise CannotLower("the layers' inputs are of other tokens than the embedding")
    if width % 2:
        raise CannotLower(f"inputs of {width} values for each layer do not fit the native kernels")
    return ModelInputs(
        table=table,
        projection=base.per_layer_model_projection,
        norm=base.per_layer_projection_norm.weight.detach().float().contiguous(),
        scales=InputScales(
            table_scale=float(table.embed_scale.to(dtype)),
            projection_scale=float(base.per_layer_model_projection_scale),
            scale=float(base.per_layer_input_scale),
        ),
    )


def lower_layer_input(layer: Any) -> LayerInput | None:
    """Of one layer; None: it takes none."""
    if not getattr(layer, "hidden_size_per_layer_input", None):
        return None
    return LayerInput(layer.per_layer_input_gate, layer.per_layer_projection)
