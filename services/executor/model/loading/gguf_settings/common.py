"""What many architectures have alike: layers with windows, rotary positions, heads behind. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import ModelLoadError

Said = Mapping[str, Any]  # the file's keys behind the architecture's name, numbers and lists of numbers
Shapes = Mapping[str, tuple[int, ...]]  # of the file's tensors, rows first
Compute = Callable[[Said, Shapes], dict[str, Any]]


def first_dense(said: Said, shapes: Shapes) -> dict[str, Any]:
    """How many layers are dense before those of experts."""
    return {"first_k_dense_replace": int(said.get("leading_dense_block_count", 0))}


def gemma3_rotations(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Windows turn positions by a base of their own, 10,000 where a file says none."""
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    rope = {kind: {"rope_type": "default", "rope_theta": float(said.get(key, 10_000.0))} for kind, key in bases.items()}
    return {"rope_parameters": rope}


def by_layer(said: Said, key: str) -> list[Any]:
    """The value for each layer, of which files say one for all, or each. Raises `ModelLoadError`."""
    value, layers = said[key], int(said["block_count"])
    if not isinstance(value, list | tuple):
        return [value] * layers
    if len(value) != layers:
        raise ModelLoadError(f"The file has {len(value)} values of {key} for {layers} layers; fetch it again.")
    return list(value)


def window_types(said: Said) -> list[str]:
    sliding = by_layer(said, "attention.sliding_window_pattern")
    return ["sliding_attention" if one else "full_attention" for one in sliding]


FULL, WIDTH = "full_attention", "feed_forward_length"


def magnitudes(said: Said, times: float, of_turned: float | None = None) -> dict[str, Any]:
    """Rotary positions. YaRN has a magnitude of scores, as files say it but for a factor, and one of what is turned:
    `of_turned`; None: the same."""
    rope = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base", 10_000.0))}
    if magnitude := said.get("rope.scaling.yarn_log_multiplier"):
        of_scores = round(times * magnitude, 6)
        rope |= {"mscale": of_scores if of_turned is None else of_turned, "mscale_all_dim": of_scores}
    return rope


def scaled_queries(said: Said, scale: float) -> dict[str, Any]:
    original = said["rope.scaling.original_context_length"]
    if (length := said.get("attention.temperature_length", original)) != original:
        raise ModelLoadError(
            f"The file scales queries each {length} positions (attention.temperature_length) and has an original "
            f"context of {original}, which no model of its architecture that can be served does; choose another."
        )
    return {"llama_4_scaling_beta": round(scale, 6), "original_max_position_embeddings": original}


def without_heads_behind(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Layers but for those that predict several tokens, which `block_count` counts."""
    return {"num_hidden_layers": int(said["block_count"]) - int(said.get("nextn_predict_layers", 0))}


def _normed_heads(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}


def _biases_of_all(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Of queries, keys and values, which may be one tensor."""
    return {"attention_bias": "blk.0.attn_qkv.bias" in shapes or "blk.0.attn_q.bias" in shapes}


def fourth_full(said: Said, layers: int) -> dict[str, Any]:
    """Windows in all layers but each fourth, where a file says nothing else of them."""
    pattern = said.get("attention.sliding_window_pattern", 4)
    if not isinstance(pattern, list | tuple):
        pattern = [(layer + 1) % max(1, int(pattern)) for layer in range(layers)]
    if len(pattern) < layers:
        raise ModelLoadError(
            f"The file has {len(pattern)} values of attention.sliding_window_pattern for {layers} layers; fetch it "
            "again."
        )
    kinds = ["sliding_attention" if one else FULL for one in pattern[:layers]]
    return {"layer_types": kinds, "sliding_window": said["attention.sliding_window"]}


COMMON: dict[str, Compute] = {
    "first_dense": first_dense,
    "gemma3_rotations": gemma3_rotations,
    "without_heads_behind": without_heads_behind,
    "normed_heads": _normed_heads,
    "biases_of_all": _biases_of_all,
}
