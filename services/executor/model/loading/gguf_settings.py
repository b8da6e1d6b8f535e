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


COMPUTED: dict[str, Compute] = {"first_dense": _first_dense, "gemma3_rotations": _gemma3_rotations}
