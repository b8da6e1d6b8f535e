"""Rotary embeddings whose frequencies follow the length of the text: LongRoPE and dynamic NTK.

transformers chooses them in each forward pass, by the longest sequence of the batch, so that a text would depend on its
neighbours and a token on what comes behind it. Here they are fixed when the model is loaded, by the longest sequence
that it is served with, as vLLM does: all sequences turn by the same, however long they are, and what a token reads
depends on its position alone.

    longrope   up to the length of first training the short factors, beyond it the long ones
    dynamic    up to max_position_embeddings the plain frequencies, beyond it those of the served length
    yarn, linear, llama3, proportional   as the configuration says, whatever is served
"""

import copy
import math
from typing import Any, Literal

import msgspec
from torch import nn

from services.executor.model.catalogue import ORIGINAL_LENGTH, longest_context, ropes_of

_FOLLOWING = frozenset({"dynamic", "longrope"})
_FIXED = "fixed"  # stands for the type of a rotary embedding whose frequencies no forward pass may change


class RotaryScaling(msgspec.Struct, frozen=True):
    """How the frequencies of a model follow the longest sequence that it is served with."""

    kind: Literal["", "dynamic", "longrope"] = ""  # empty: they do not
    trained: int = 0  # tokens up to which they are those of shorter sequences
    longest: int = 0  # most tokens that may be served; at least the model's own length

    def made_for(self, context: int) -> str:
        """What sets the frequencies for sequences of up to `context` tokens apart from others; empty: nothing."""
        if not self.kind or context <= self.trained:
            return ""
        return "longrope-long" if self.kind == "longrope" else f"dynamic-{context}"


def rotary_scaling(config: Any) -> RotaryScaling:
    """Of the model of this text configuration. Raises `ModelLoadError` where it does not say how long texts may be."""
    length = longest_context(config)
    kind: Literal["", "dynamic", "longrope"] = ""
    trained, longest = 0, length
    for rope in ropes_of(config):
        named = rope.get("rope_type")
        factor = _factor(rope)
        original = rope.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None) or length
        if named == "longrope":
            kind, trained = "longrope", int(original)
        elif named == "dynamic" and factor > 1 and not rope.get("alpha"):  # alpha: Hunyuan's, of any length
            kind, trained = "dynamic", int(config.max_position_embeddings)
            longest = max(longest, int(factor * trained))
        elif named == "yarn":
            longest = max(longest, int(factor * original))
    if getattr(config, "keep_window_size", None):  # which keys are attended to would change
        longest = length
    return RotaryScaling(kind, trained, longest)


def _factor(rope: dict[str, Any]) -> float:
    """How many times as long as the first texts the model's may be; 1 where that is not said."""
    factor = rope.get("factor")
    return factor if isinstance(factor, int | float) and math.isfinite(factor) else 1.0


def fix_frequencies(model: nn.Module, context: int) -> None:
    """Gives the rotary embeddings of `model`, as transformers built it, the frequencies for sequences of up to
    `context` tokens, for good."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind in _FOLLOWING:
                    _fix(module, f"{layer_type}_", kind, context, layer_type=layer_type)
            module.rope_type = {  # type: ignore[assignment]
                layer_type: _FIXED if kind in _FOLLOWING else kind for layer_type, kind in kinds.items()
            }
        elif kinds in _FOLLOWING:
            _fix(module, "", str(kinds), context)
            module.rope_type = _FIXED  # type: ignore[assignment]


def _fix(module: Any, prefix: str, kind: str, context: int, **of_layers: str) -> None:
    # The module was built by it: what a start from the weight cache imports of this file goes without.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=context, **of_layers)
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        getattr(module, name).copy_(frequencies)
    if hasattr(module, "rope_init_fn"):
        scaling = _fix_recomputed(module, context)
    setattr(module, f"{prefix}attention_scaling", scaling)


def _fix_recomputed(module: Any, context: int) -> float:
    """PhiMoE's embedding makes frequencies anew in each pass, the short ones always, and scales by the text's length.
    Returns the scale of cosines and sines."""
    rope = module.config.rope_parameters
    scaling = float(rope["long_mscale" if context > rope[ORIGINAL_LENGTH] else "short_mscale"])
    module.rope_init_fn = lambda config: (module.inv_freq, scaling)
    module.config = copy.copy(module.config)
    module.config.rope_parameters = {**rope, "rope_type": "default"}  # so that it asks for no length
    return scaling
