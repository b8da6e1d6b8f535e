"""How wide the linears are that an adapter may change, by a model's configuration alone: what it may come to, before
anything is loaded. Pure."""

from collections.abc import Mapping
from typing import Any


def adapter_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Inputs and outputs of all linears of a name together: an adapter of rank r has r times as many numbers. By the
    names of Llama's linears, which are apart; a model that has some of them in one is not wider. Empty where the
    configuration does not tell."""
    text = config.get("text_config")
    facts: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    hidden, layers = _number(facts, "hidden_size", "n_embd"), _number(facts, "num_hidden_layers", "n_layer")
    heads = _number(facts, "num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        return {}
    head = _number(facts, "head_dim") or hidden // heads
    queries, keys = heads * head, (_number(facts, "num_key_value_heads") or heads) * head
    inner = _number(facts, "intermediate_size", "n_inner") or 4 * hidden
    of_layer = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return {name: layers * width for name, width in of_layer.items()}


def _number(facts: Mapping[str, Any], *names: str) -> int:
    """The largest, where each layer has its own."""
    for name in names:
        value = facts.get(name)
        values = value if isinstance(value, list) else [value]
        if numbers := [one for one in values if isinstance(one, int)]:
            return max(numbers)
    return 0
