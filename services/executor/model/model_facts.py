"""What a rank must know of its share of a model beside the weights."""

from typing import Any

import msgspec

from services.executor.core.layer_state import LayerStates
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.model.adapters.targets import AdapterTarget
from services.executor.model.rotary import RotaryScaling


class ModelFacts(msgspec.Struct, frozen=True):
    states: LayerStates  # what its layers keep on this rank
    hidden_size: int
    context_length: int  # most tokens of one sequence, where nothing else is set
    heads: HeadCounts
    widths: list[int]  # each rank's share of the vocabulary
    # The linears that LoRA adapters may change, as this rank holds them.
    adapter_targets: list[AdapterTarget] = []
    rotary: RotaryScaling = RotaryScaling()
    made_for: str = ""  # what sets the rotary frequencies among the weights apart (`RotaryScaling.made_for`)


def facts_of(model: Any, config: Any, layout: ShardLayout, context: int) -> ModelFacts:
    """Of `model`, loaded for sequences of up to `context` tokens."""
    # With transformers, which has built the model.
    from services.executor.model.adapters.targets import targets_of
    from services.executor.model.catalogue import longest_context
    from services.executor.model.layer_states import layer_states
    from services.executor.model.rotary import rotary_scaling

    rotary = rotary_scaling(config)
    return ModelFacts(
        states=layer_states(config, layout),
        hidden_size=config.hidden_size,
        context_length=longest_context(config),
        heads=HeadCounts.from_config(config),
        widths=model.get_output_embeddings().widths,
        adapter_targets=targets_of(model),
        rotary=rotary,
        made_for=rotary.made_for(context),
    )
