"""Which models can be served: everything that a configuration alone tells.

A model that would run but compute something else than its authors meant is refused here, with the
reason, before a byte of its weights is read.
"""

from collections.abc import Iterator
from typing import Any

from services.executor.model.catalogue import refusal_of
from shared.errors import ModelLoadError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")
"""What configurations call the most tokens of one sequence, the commonest first (BLOOM: seq_length)."""
_ORIGINAL = "original_max_position_embeddings"


def check_supported(config: Any) -> None:
    """Raises `ModelLoadError`, with the reason, when the model of this text configuration is not served."""
    for reason in _reasons(config):
        raise ModelLoadError(
            f"The model cannot be served: its architecture {config.model_type!r} {reason}; "
            "choose another model or an unquantised checkpoint."
        )


def longest_context(config: Any) -> int:
    """Most tokens of one sequence. Raises `ModelLoadError` where the configuration does not say.

    Rotary embeddings of type longrope have other frequencies for a batch whose longest sequence passes the
    length of the first training, so that a text would depend on its neighbours: such models are served up
    to that length. Those of type dynamic change only beyond the length named here.
    """
    length = next((value for name in _LENGTHS if (value := getattr(config, name, None))), None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError("The model's config.json has no max_position_embeddings; add it.")
    for rope in _ropes(config):
        original = rope.get(_ORIGINAL, getattr(config, _ORIGINAL, None))
        if rope.get("rope_type") == "longrope" and isinstance(original, int):
            length = min(length, original)
    return length


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder"
    if getattr(config, "add_cross_attention", False):
        yield "attends to an encoder"
    if getattr(config, "quantization_config", None):
        yield "comes with quantised weights, which are not read yet"
    if getattr(config, "kv_lora_rank", None):
        yield "compresses keys and values (latent attention)"
    if getattr(config, "use_bidirectional_attention", None):
        yield "looks ahead in the text (use_bidirectional_attention)"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        yield f"has layers of type {', '.join(unknown)}"
    refusal = refusal_of(config.model_type)
    if refusal:
        yield refusal


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding, whether the configuration has one or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
