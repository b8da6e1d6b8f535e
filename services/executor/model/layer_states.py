"""What the layers of each architecture keep, from its configuration alone (`core/layer_state.py`).

A family keeps keys and values in every layer unless it names another kind (`states/catalog.py`).
"""

from typing import Any

from services.executor.core.layer_state import LayerStates
from services.executor.core.sharding import ShardLayout
from services.executor.model.states.base import attending, layer_layouts
from services.executor.model.states.catalog import state_kind
from shared.errors import ModelLoadError, reason_of


def layer_states(config: Any, layout: ShardLayout) -> LayerStates:
    """Of the model of this transformers text configuration, on the rank of `layout`. Raises `ModelLoadError` where it
    does not say so."""
    kind = state_kind(config.model_type)
    try:
        return _attention_everywhere(config, layout) if kind is None else kind.layers(config, layout)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"The model's config.json does not say what its layers keep ({reason_of(error)}); it is damaged or of "
            "another model, fetch it again."
        ) from error


def keeps_latents(model_type: str) -> bool:
    """Whether attention is latent in the layers of this architecture that attend."""
    kind = state_kind(model_type)
    return kind is not None and kind.has_latents


def _attention_everywhere(config: Any, layout: ShardLayout) -> LayerStates:
    layouts = layer_layouts(config, layout)
    types = getattr(config, "layer_types", None) or ("full_attention",) * len(layouts)
    return tuple(attending(own, kind) for own, kind in zip(layouts, types, strict=True))
