"""Settings of encoders. Pure."""

from typing import Any

from services.executor.model.loading.gguf_settings.common import FULL, Compute, Said
from shared.errors import ModelLoadError

_CLS = 2  # of `pooling_type`


def _learned_positions(said: Said) -> dict[str, Any]:
    """BERT's. Of RoBERTa files leave out what its first token's position stands behind: it is a BERT then. DistilBERT
    tells no segments apart."""
    own = {"model_type": "distilbert", "hidden_dim": said["feed_forward_length"]}
    apart = "token_types.weight" in said.shapes
    return {"max_position_embeddings": _rows(said, "position_embd.weight"), **(_segments(said) if apart else own)}


def _segments(said: Said) -> dict[str, Any]:
    return {"type_vocab_size": _rows(said, "token_types.weight")}


def _modern_bert(said: Said) -> dict[str, Any]:
    """The first of each three layers sees all of a text, where a file says nothing else. Classes are scored by the mean
    of a text's states, or the first one's."""
    every, count = said.get("attention.sliding_window_pattern", 3), int(said["block_count"])
    sliding = every if isinstance(every, list | tuple) else [layer % max(1, int(every)) for layer in range(count)]
    slides = bool(said.get("attention.sliding_window"))
    return {
        "rope_parameters": said.window_rotations(),
        "layer_types": ["sliding_attention" if one and slides else FULL for one in sliding],
        "classifier_pooling": "cls" if said.get("classifier.pooling_type") == _CLS else "mean",
        "classifier_bias": "cls.bias" in said.shapes,
        "norm_bias": "output_norm.bias" in said.shapes,
    }


def _rows(said: Said, tensor: str) -> int:
    if tensor not in said.shapes:
        raise ModelLoadError(f"The file has no tensor {tensor}, which its architecture calls for; choose another.")
    shape = said.shapes[tensor]
    return shape[0] if len(shape) > 1 else 1  # one row may be written as a vector


def _windows_in_turn(said: Said) -> dict[str, Any]:
    """Each so many layers one without a window, the last of them; files may say it of each layer."""
    every = said.get("attention.sliding_window_pattern")
    if isinstance(every, list | tuple):
        return {"layer_types": said.window_types()}
    return {} if every is None else {"sliding_window_pattern": int(every)}


ENCODERS: dict[str, Compute] = {
    "learned_positions": _learned_positions,
    "modern_bert": _modern_bert,
    "segments": _segments,
    "windows_in_turn": _windows_in_turn,
}
