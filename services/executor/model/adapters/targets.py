"""The linears of a model that an adapter may change, and what of each a rank holds.

A rank cuts an adapter's factors as its base's weights are cut, so that no sum over the ranks is added:

    column parallel    A whole, rows of B            x whole -> B (A x) split
    row parallel       columns of A, B whole         x split -> B (A x) partial, added before the ranks' sum
    experts            the same, of each expert
"""

import re
from typing import Any

import msgspec
import torch
from torch import nn

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.catalogue import is_encoder
from services.executor.model.parallel.experts import expert_leaves
from services.executor.model.parallel.layers import (
    ColumnParallelLinear,
    LatentWeight,
    LinearShard,
    TensorSlice,
    VocabParallelHead,
    expert_weight_of,
    piece_of,
)
from shared.errors import ModelLoadError

# Steps of Mamba 1, by whose weight its code multiplies without a call; what chooses or weights experts, which
# decoders multiply by in one product with others; layers of an output layer, which see the sampled rows alone.
_NOT_SERVED = re.compile(r"(\.(mixer|mamba)\.dt_proj|(^|\.)(gate|router|shared_expert_gate)(\.\w+)?|^lm_head\.\w+)$")

Spans = list[tuple[int, int]]  # half-open ranges of a dimension, end to end


class AdapterTarget(msgspec.Struct, frozen=True):
    """A linear layer of a model, or one that all experts of a layer have."""

    # Of the module: "model.layers.0.self_attn.q_proj"; of experts "model.layers.0.mlp.experts.gate_up_proj".
    name: str
    inputs: int
    outputs: int  # of the whole model
    experts: int = 0  # 0: one linear
    rows: Spans | None = None  # the outputs that this rank holds; None: all
    columns: Spans | None = None  # the inputs that this rank holds


def targets_of(model: Any) -> list[AdapterTarget]:
    """Of a rank's share of a transformers model, split and not packed."""
    found: list[AdapterTarget] = []
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is output or isinstance(module, VocabParallelHead) or _NOT_SERVED.search(name):
            continue
        if isinstance(module, LinearShard):
            found.append(_of_shard(name, module))
        elif isinstance(module, LatentWeight):
            piece = piece_of(module, "weight")
            assert piece is not None, "a share of a linear says of what"
            found.append(AdapterTarget(name, module.weight.shape[1], piece.full, rows=_cut(piece)))
        elif type(module) is nn.Linear:
            found.append(AdapterTarget(name, module.in_features, module.out_features))
        elif takes_adapters(module):
            found += [_of_experts(name, module, leaf) for leaf in expert_leaves(module)]
    return found


def whole_targets(config: Any) -> list[AdapterTarget]:
    """Of the model of this transformers text configuration, which is built without memory for its weights. Raises
    `ModelLoadError` where the architecture is not served, or takes no adapters."""
    if is_encoder(config.to_dict()):
        raise ModelLoadError(
            "Encoders take no LoRA adapters; merge the adapter into its model with PEFT, and serve that."
        )
    from services.executor.model.loading.loader import build_split

    # PyTorch's own default type: another would be that of what a step in another thread makes meanwhile, too.
    model = build_split(config, torch.float32, ShardLayout.from_config(config, 1, 0), SingleRank())
    return targets_of(model)


def takes_adapters(module: Any) -> bool:
    """Whether `module` are experts that `modules.py` computes: transformers' own, that do nothing more."""
    known = all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate"))
    known = known and (module.has_gate or hasattr(module, "act_fn"))
    return known and not module.has_post_expert_norm and not hasattr(module, "identity_expert")


def _of_shard(name: str, linear: LinearShard) -> AdapterTarget:
    piece = piece_of(linear, "weight")
    assert piece is not None, "a share of a linear says of what"
    outputs, inputs = linear.stored.shape
    if isinstance(linear, ColumnParallelLinear):
        return AdapterTarget(name, inputs, piece.full, rows=_cut(piece))
    return AdapterTarget(name, piece.full, outputs, columns=_cut(piece))


def _of_experts(path: str, experts: Any, leaf: str) -> AdapterTarget:
    weight, count = expert_weight_of(experts, leaf), int(experts.num_experts)
    sizes = tuple(weight.shape[1:]) if len(weight.shape) == 3 else (weight.shape[0] // count, weight.shape[1])
    outputs, inputs = reversed(sizes) if experts.is_transposed and len(weight.shape) == 3 else sizes
    name, piece = f"{path}.{leaf}", piece_of(experts, leaf)
    if piece is None:
        return AdapterTarget(name, inputs, outputs, count)
    if leaf == "down_proj":
        return AdapterTarget(name, piece.full, outputs, count, columns=_cut(piece))
    return AdapterTarget(name, inputs, piece.full, count, rows=_cut(piece))


def _cut(piece: TensorSlice) -> Spans | None:
    spans = [(span.start, span.stop) for span in piece.spans]
    return None if spans == [(0, piece.full)] else spans
