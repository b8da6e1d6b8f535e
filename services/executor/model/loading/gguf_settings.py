"""Settings of config.json that follow from several keys of a GGUF file, from a list by layer, or from its tensors, by
the names that rows of `families/gguf_architectures.py` have for them. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Any

Said = Mapping[str, Any]  # the file's keys behind the architecture's name, numbers and lists of numbers
Shapes = Mapping[str, tuple[int, ...]]  # of the file's tensors, rows first
Compute = Callable[[Said, Shapes], dict[str, Any]]


def _first_dense(said: Said, shapes: Shapes) -> dict[str, Any]:
    """How many layers are dense before those of experts."""
    return {"first_k_dense_replace": int(said.get("leading_dense_block_count", 0))}


def _gemma3_rotations(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Windows turn positions by a base of their own, 10,000 where a file says none."""
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    rope = {kind: {"rope_type": "default", "rope_theta": float(said.get(key, 10_000.0))} for kind, key in bases.items()}
    return {"rope_parameters": rope}


def _gated_delta(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers of a gated delta rule, between which each fourth has attention where a file says nothing else; behind
    them may be heads that predict several tokens, which `block_count` counts."""
    layers = int(said["block_count"]) - int(said.get("nextn_predict_layers", 0))
    every = max(1, int(said.get("full_attention_interval", 4)))
    recurrent = said.get("attention.recurrent_layers")
    if not isinstance(recurrent, list | tuple):
        recurrent = [(layer + 1) % every for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_value_head_dim": int(said["ssm.inner_size"]) // max(1, int(said["ssm.time_step_rank"])),
    }


COMPUTED: dict[str, Compute] = {
    "first_dense": _first_dense,
    "gemma3_rotations": _gemma3_rotations,
    "gated_delta": _gated_delta,
}
