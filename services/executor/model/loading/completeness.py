"""Whether a checkpoint and the model that its configuration describes have the same weights.

What the model has and the checkpoint lacks would keep the values it was built with; what the checkpoint has and the
model lacks would be missing from what it computes; of two tensors for one weight, one would be dropped. Each is refused
by name.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.executor.model.loading.composition import Composition
from services.executor.model.loading.gguf_weights import GgufWeights
from services.executor.model.loading.output_heads import SCORE
from services.executor.model.loading.prediction_heads import is_of_heads
from services.executor.model.loading.sources import CheckpointSources
from services.executor.model.loading.weight_files import WeightFiles, some_of
from services.executor.model.parallel.layers import held_elsewhere
from services.executor.model.pooling import is_classifier
from shared.errors import ModelLoadError

# Buffers that older versions of transformers saved and newer ones compute; scales of a quantized KV cache.
_NOT_NEEDED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|attn\.[qkv]_(scale|zero_point))$"
)
# Buffers that are built as a checkpoint would have them: hashes of tokens, constants of activations, fixed decays.
_COMPUTED = re.compile(
    r"(^|\.)(ple_embedding\.(layer_multipliers|ngram_heads_\w+)|act_fn\.(beta|eps)"
    r"|(diagonal|key|query)_decay|slope_rate)$"
)


def is_computed(buffer: str) -> bool:
    """Whether the buffer of this name follows from the configuration. Others, such as the corrections of a router, are
    learned."""
    return _COMPUTED.search(buffer) is not None


def check_whole(model: Any, sources: CheckpointSources, directory: Path) -> None:
    """Raises `ModelLoadError` where the checkpoint lacks what `model`, as transformers builds it, has."""
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    missing = [
        held[0] for held in names.values() if not sources.parameters.keys() & set(held) and not is_computed(held[0])
    ]
    if missing:
        raise ModelLoadError(
            f"The weights in {directory} have no tensor {some_of(missing)}, which config.json calls for; "
            "the directory mixes two models or is incomplete, fetch the model again."
        )


def leftovers(model: nn.Module, parameters: Iterable[Sequence[str]], sources: CheckpointSources) -> list[str]:
    """What of the checkpoint neither `model`, split already, holds nor other ranks. `parameters`: what the model calls
    each of its own."""
    known = {name for names in parameters for name in names}
    for name, module in model.named_modules():
        known |= {f"{name}.{leaf}" for leaf in held_elsewhere(module)}
    return sorted(sources.unused | (sources.parameters.keys() - known))


def check_leftovers(
    model: Any,
    parameters: Sequence[Sequence[str]],
    sources: CheckpointSources,
    files: WeightFiles | GgufWeights,
    directory: Path,
) -> None:
    """Raises `ModelLoadError` where the checkpoint holds weights that the model has no place for; `parameters` as of
    `leftovers`."""
    config = model.config
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name in leftovers(model, parameters, sources):
        if _NOT_NEEDED.search(name) or any(pattern.search(name) for pattern in ignored):
            continue
        if is_of_heads(name, config) or (name == SCORE and is_classifier(config.to_dict())):
            continue
        if isinstance(files, WeightFiles) and _is_idle_bias(name, files):
            continue  # quantizers give every linear layer a bias, of zeros where the model has none
        raise ModelLoadError(
            f"The weights in {directory} hold a tensor {name} that the architecture does not use; "
            "config.json belongs to another model, fetch the model again."
        )


def _is_idle_bias(name: str, files: WeightFiles) -> bool:
    """Whether it is zeros that belong to a coded weight."""
    of = name.removesuffix(".bias") + ".weight"
    return name.endswith(".bias") and of in files.coded and not files.tensor(name).any()


def check_ties(
    parameters: Sequence[Sequence[str]], sources: CheckpointSources, files: WeightFiles, directory: Path
) -> None:
    """Raises `ModelLoadError` where weights that config.json ties are stored twice, and differ."""
    for names in parameters:
        held = [name for name in dict.fromkeys(names) if name in sources.parameters]
        for other in held[1:]:
            if not _are_same(sources.parameters[held[0]], sources.parameters[other], files):
                raise ModelLoadError(
                    f"config.json in {directory} ties {held[0]} and {other}, and the weights hold two that differ; "
                    "set tie_word_embeddings there to what the model was trained with, or fetch the model again."
                )


def _are_same(one: Composition, other: Composition, files: WeightFiles) -> bool:
    """Whether two tensors of the files, each as it is, are equal; others are not compared."""
    first, second = one.parts[0].source, other.parts[0].source
    if first in files.coded or second in files.coded or len(one.parts) + len(other.parts) > 2:
        return one == other
    a, b = files.tensor(first), files.tensor(second)
    same = a.data_ptr() == b.data_ptr() or torch.equal(a, b)
    files.release(first, a)
    files.release(second, b)
    return same
