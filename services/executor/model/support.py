"""Which models can be served: everything that a configuration alone tells.

A model that would run but compute something else than its authors meant is refused here, with the
reason, before a byte of its weights is read.
"""

from collections.abc import Iterator
from typing import Any

from shared.errors import ModelLoadError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies follow the longest sequence of a batch: a request's text would
depend on its neighbours."""


def check_supported(config: Any) -> None:
    """Raises `ModelLoadError`, with the reason, when the model of this text configuration is not served."""
    for reason in _reasons(config):
        raise ModelLoadError(
            f"The model cannot be served: its architecture {config.model_type!r} {reason}; "
            "choose another model or an unquantised checkpoint of a dense decoder."
        )


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder"
    if getattr(config, "quantization_config", None):
        yield "comes with quantised weights, which are not read yet"
    if getattr(config, "kv_lora_rank", None):
        yield "compresses keys and values (latent attention)"
    yield from _layer_reasons(config)
    for rope_type in _rope_types(config):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            yield f"uses rotary embeddings of type {rope_type!r}, which depend on the rest of the batch"


def _layer_reasons(config: Any) -> Iterator[str]:
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        yield f"has layers of type {', '.join(unknown)}"


def _rope_types(config: Any) -> Iterator[str]:
    """The type of each rotary embedding, whether the configuration has one or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        kind = entry.get("rope_type")
        if isinstance(kind, str):
            yield kind
