"""Heads for multi-token prediction that a checkpoint carries beside its model: they are no part of it, and may be its
draft model (`draft_heads.py`).

mtp.layers.0.mlp.up_proj.weight             Mellum 2, Qwen3-Next, Qwen3.5, Nemotron 3; `model.mtp.` of MiMo V2
model.layers.61.eh_proj.weight              DeepSeek V3, GLM-4.5 and later: layers after the last
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_NAMED = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
# What configurations call the number of such layers.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


class PredictionHeads(msgspec.Struct, frozen=True):
    """Of a checkpoint."""

    tensors: int = 0
    bytes: int = 0


def is_of_heads(name: str, config: Any) -> bool:
    """Whether the checkpoint's tensor `name` belongs to heads of the model of this text configuration."""
    if _NAMED.search(name):
        return True
    found = _LAYER.search(name)
    layers = getattr(config, "num_hidden_layers", None)
    if found is None or not isinstance(layers, int):
        return False
    counts = (getattr(config, count, None) for count in _COUNTS)
    heads = max((count for count in counts if isinstance(count, int)), default=0)
    return layers <= int(found[2]) < layers + heads


def heads_among(names: Iterable[str], config: Any, bytes_of: Callable[[str], int]) -> PredictionHeads:
    """Of the tensors `names`; `bytes_of` says what each takes in its file."""
    sizes = [bytes_of(name) for name in names if is_of_heads(name, config)]
    return PredictionHeads(len(sizes), sum(sizes))
