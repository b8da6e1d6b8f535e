"""What files say, and what many architectures have alike: layers with windows, rotary positions. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import ModelLoadError

FULL, WIDTH = "full_attention", "feed_forward_length"
_THETA = 10_000.0  # the base of rotary positions where a file says none


class Said(dict[str, Any]):
    """The file's keys behind the architecture's name, numbers and lists of numbers; and `shapes` of its tensors, rows
    first."""

    def __init__(self, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(keys)
        self.shapes = shapes

    def count(self, key: str) -> int:
        """A whole number; 0 where the file says none."""
        return int(self.get(key, 0))

    @property
    def layers(self) -> int:
        """But for those that predict several tokens, which `block_count` counts."""
        return int(self["block_count"]) - self.count("nextn_predict_layers")

    def by_layer(self, key: str) -> list[Any]:
        """The value for each layer, of which files say one for all, or each. Raises `ModelLoadError`."""
        value, layers = self[key], int(self["block_count"])
        if not isinstance(value, list | tuple):
            return [value] * layers
        if len(value) != layers:
            raise ModelLoadError(f"The file has {len(value)} values of {key} for {layers} layers; fetch it again.")
        return list(value)

    def window_types(self) -> list[str]:
        sliding = self.by_layer("attention.sliding_window_pattern")
        return ["sliding_attention" if one else FULL for one in sliding]

    def fourth_full(self, layers: int) -> dict[str, Any]:
        """Windows in all layers but each fourth, where a file says nothing else of them."""
        pattern = self.get("attention.sliding_window_pattern", 4)
        if not isinstance(pattern, list | tuple):
            pattern = [(layer + 1) % max(1, int(pattern)) for layer in range(layers)]
        if len(pattern) < layers:
            raise ModelLoadError(
                f"The file has {len(pattern)} values of attention.sliding_window_pattern for {layers} layers; fetch it "
                "again."
            )
        kinds = ["sliding_attention" if one else FULL for one in pattern[:layers]]
        return {"layer_types": kinds, "sliding_window": self["attention.sliding_window"]}

    def rope(self, key: str = "rope.freq_base", usual: float = _THETA) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": float(self.get(key, usual))}

    def window_rotations(self, usual: float = _THETA) -> dict[str, Any]:
        """Windows turn positions by a base of their own, `usual` where a file says none."""
        return {FULL: self.rope(), "sliding_attention": self.rope("rope.freq_base_swa", usual)}

    def magnitudes(self, times: float, of_turned: float | None = None) -> dict[str, Any]:
        """Rotary positions. YaRN has a magnitude of scores, as files say it but for a factor, and one of what is
        turned: `of_turned`; None: the same."""
        rope = self.rope()
        if magnitude := self.get("rope.scaling.yarn_log_multiplier"):
            of_scores = round(times * magnitude, 6)
            rope |= {"mscale": of_scores if of_turned is None else of_turned, "mscale_all_dim": of_scores}
        return rope

    def scaled_queries(self, scale: float) -> dict[str, Any]:
        original = self["rope.scaling.original_context_length"]
        if (length := self.get("attention.temperature_length", original)) != original:
            raise ModelLoadError(
                f"The file scales queries each {length} positions (attention.temperature_length) and has an original "
                f"context of {original}, which no model of its architecture that can be served does; choose another."
            )
        return {"llama_4_scaling_beta": round(scale, 6), "original_max_position_embeddings": original}


Compute = Callable[[Said], dict[str, Any]]


def _biases_of_all(said: Said) -> dict[str, Any]:
    """Of queries, keys and values, which may be one tensor."""
    return {"attention_bias": "blk.0.attn_qkv.bias" in said.shapes or "blk.0.attn_q.bias" in said.shapes}


COMMON: dict[str, Compute] = {
    "first_dense": lambda said: {"first_k_dense_replace": said.count("leading_dense_block_count")},
    "gemma3_rotations": lambda said: {"rope_parameters": said.window_rotations()},
    "without_heads_behind": lambda said: {"num_hidden_layers": said.layers},
    "normed_heads": lambda said: {"use_qk_norm": "blk.0.attn_q_norm.weight" in said.shapes},
    "biases_of_all": _biases_of_all,
}
