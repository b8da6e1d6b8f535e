"""Settings of encoders. Pure."""

from typing import Any

from services.executor.model.loading.gguf_settings.common import (
    FULL,
    Compute,
    Said,
    Shapes,
    gemma3_rotations,
    window_types,
)
from shared.errors import ModelLoadError

_CLS = 2  # of `pooling_type`


def _learned_positions(said: Said, shapes: Shapes) -> dict[str, Any]:
    """BERT's. Of RoBERTa files leave out what its first token's position stands behind: it is a BERT then. DistilBERT
    tells no segments apart."""
    own = {"model_type": "distilbert", "hidden_dim": said["feed_forward_length"]}
    apart = "token_types.weight" in shapes
    return {
        "max_position_embeddings": _rows(shapes, "position_embd.weight"),
        **(_segments(said, shapes) if apart else own),
    }


def _segments(said: Said, shapes: Shapes) -> dict[str, Any]:
    return {"type_vocab_size": _rows(shapes, "token_types.weight")}


def _modern_bert(said: Said, shapes: Shapes) -> dict[str, Any]:
    """The first of each three layers sees all of a text, where a file says nothing else. Classes are scored by the mean
    of a text's states, or the first one's."""
    every, count = said.get("attention.sliding_window_pattern", 3), int(said["block_count"])
    sliding = every if isinstance(every, list | tuple) else [layer % max(1, int(every)) for layer in range(count)]
    slides = bool(said.get("attention.sliding_window"))
    return {
        **gemma3_rotations(said, shapes),
        "layer_types": ["sliding_attention" if one and slides else FULL for one in sliding],
        "classifier_pooling": "cls" if said.get("classifier.pooling_type") == _CLS else "mean",
        "classifier_bias": "cls.bias" in shapes,
        "norm_bias": "output_norm.bias" in shapes,
    }


def _rows(shapes: Shapes, tensor: str) -> int:
    if tensor not in shapes:
        raise ModelLoadError(f"The file has no tensor {tensor}, which its architecture calls for; choose another.")
    return shapes[tensor][0] if len(shapes[tensor]) > 1 else 1  # one row may be written as a vector


def _windows_in_turn(said: Said, shapes: Shapes) -> dict[str, Any]:
    """Each so many layers one without a window, the last of them; files may say it of each layer."""
    every = said.get("attention.sliding_window_pattern")
    if isinstance(every, list | tuple):
        return {"layer_types": window_types(said)}
    return {} if every is None else {"sliding_window_pattern": int(every)}


ENCODERS: dict[str, Compute] = {
    "learned_positions": _learned_positions,
    "modern_bert": _modern_bert,
    "segments": _segments,
    "windows_in_turn": _windows_in_turn,
}
