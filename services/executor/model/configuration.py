"""Configurations that contradict themselves, found before anything is built of them: by key, whichever architecture
has it. Pure. What an architecture cannot have at all stands in `catalogue.py`.
"""

from collections.abc import Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from shared.errors import ModelLoadError

_SHOWN = 20  # characters of a wrong value that an error shows
_HEADS, _WIDTH, _KERNEL = 1 << 16, 1 << 20, 1 << 10
_VOCABULARY = 1 << 24
# Sizes from 1 to these.
_SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "linear_num_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "mamba_n_heads",
            "mamba_num_heads",
            "mamba_n_groups",
            "n_mamba_heads",
            "n_groups",
            "full_attention_interval",
            "attn_layer_period",
            "expert_layer_period",
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        (
            "hidden_size",
            "head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "mamba_d_head",
            "mamba_head_dim",
            "mamba_d_state",
            "mamba_expand",
            "mamba_dt_rank",
            "time_step_rank",
            "ssm_state_size",
            "state_size",
            "lru_width",
        ),
        _WIDTH,
    ),
    **dict.fromkeys(
        (
            "linear_conv_kernel_dim",
            "mamba_d_conv",
            "conv_kernel",
            "conv_kernel_size",
            "conv1d_width",
            "conv_L_cache",
            "short_conv_kernel_size",
        ),
        _KERNEL,
    ),
    "attention_chunk_size": 1 << 30,
    "vocab_size": _VOCABULARY,
}
# Sizes from 0 (none) to these.
_OPTIONAL: dict[str, int] = {
    "index_n_heads": _HEADS,
    "index_topk": 1 << 30,
    "intermediate_size": _VOCABULARY,
    "moe_intermediate_size": _VOCABULARY,
    **dict.fromkeys(
        ("index_head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), _WIDTH
    ),
}
_BY_LAYER = ("intermediate_size", "moe_intermediate_size")  # may have a value for each layer
# The first is a multiple of the second.
_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("lru_width", "num_attention_heads"),
    ("n_routed_experts", "n_group"),
)
# The first is from 0 to the second less the third.
_BOUNDS = (
    ("num_kv_shared_layers", "num_hidden_layers", 1),
    ("first_k_dense_replace", "num_hidden_layers", 0),
    ("attn_layer_offset", "attn_layer_period", 1),
    ("expert_layer_offset", "expert_layer_period", 1),
    ("topk_group", "n_group", 0),
)
# The first is from 1 to the second, where that is not 0.
_CHOSEN = (
    ("num_experts_per_tok", "n_routed_experts"),
    ("num_experts_per_tok", "num_local_experts"),
    ("num_experts_per_tok", "num_experts"),
    ("moe_topk", "moe_num_experts"),
    ("moe_top_k", "moe_num_experts"),
    ("moe_k", "moe_num_experts"),
)
# Layers of the first type need the second, where the configuration has it at all, to be 1 or more.
_OF_TYPES = (
    ("sliding_attention", "sliding_window"),
    ("chunked_attention", "attention_chunk_size"),
    ("indexed_attention", "index_topk"),
)
# Have an entry for each layer.
_OF_LAYERS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "hybrid_override_pattern",
    "no_rope_layers",
    "indexer_types",
    "layer_rope_theta",
)
# Have one of these values.
_CHOICES = {"expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("average", "sum")}
_PARTS = ("text_config", "ffn_config")  # sections of a config.json that describe a model of their own
_LAYERS = ("attn_layer_indices", "mlp_only_layers", "attention_layers_idx")  # name layers
# A configuration with the first needs the second.
_NEEDS = (
    ("index_topk", "index_n_heads"),
    ("index_n_heads", "index_head_dim"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)


def check_described(described: Any) -> None:
    """As `check_configuration`, of what config.json says: some of it is divided by when a configuration is made."""
    for part in _parts(described):
        _raise_first(_contradictions(SimpleNamespace(**part)))


def check_layer_types(described: Any, known: Collection[str]) -> None:
    """Raises `ModelLoadError` where a config.json that makes no configuration names types of layers that are not among
    `known`."""
    for part in _parts(described):
        types = part.get("layer_types")
        _raise_first(
            f"its layer_types names {str(name)[:_SHOWN]!r}, which transformers does not know"
            for name in (types if isinstance(types, list) else ())
            if name not in known
        )


def _parts(described: Any) -> Iterator[dict[str, Any]]:
    whole = described if isinstance(described, dict) else {}
    yield from (part for part in (whole, *map(whole.get, _PARTS)) if isinstance(part, dict))


def check_configuration(config: Any) -> None:
    """Raises `ModelLoadError`, one sentence, where this text configuration says what no model can be."""
    _raise_first(_contradictions(config))
    if hasattr(config, "num_hidden_layers") and config.num_hidden_layers is None:
        _raise_first(["it does not say how many layers there are (num_hidden_layers)"])
    _raise_first(_of_types(config))
    _raise_first(
        f"its {name} is {_value(config, name)}, and it has no {needed}"
        for name, needed in _NEEDS
        if _value(config, name) and not _value(config, needed)
    )


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ModelLoadError(
            f"The model's config.json is invalid: {problem}; it is damaged or of another model, fetch it again."
        )


def _contradictions(config: Any) -> Iterator[str]:
    yield from _of_sizes(config)
    for name, of in _MULTIPLES:
        value, divisor = _value(config, name), _value(config, of)
        if _is_number(value) and _is_number(divisor) and divisor > 0 and value % divisor:
            yield f"its {name} is {value}, and must be a multiple of its {of}, {divisor}"
    yield from _of_bounds(config)
    yield from _of_choices(config)
    yield from _of_layers(config)


def _of_sizes(config: Any) -> Iterator[str]:
    for least, sizes in ((1, _SIZES), (0, _OPTIONAL)):
        for name, most in sizes.items():
            value = _value(config, name)
            if value in (None, "auto"):  # it follows from others
                continue
            if isinstance(value, list | tuple) and name in _BY_LAYER:
                continue
            if not _is_number(value) or not least <= value <= most:
                yield f"its {name} is {str(value)[:_SHOWN]}, and must be from {least} to {most}"


def _of_bounds(config: Any) -> Iterator[str]:
    bounds = [*((*bound, 0) for bound in _BOUNDS), *((name, of, 0, 1) for name, of in _CHOSEN)]
    for name, of, less, least in bounds:
        value, bound = _value(config, name), _value(config, of)
        if _is_number(value) and _is_number(bound) and bound > 0 and not least <= value <= bound - less:
            yield f"its {name} is {value}, and must be from {least} to {bound - less} (its {of} is {bound})"


def _of_choices(config: Any) -> Iterator[str]:
    for name, choices in _CHOICES.items():
        value = _value(config, name)
        if value is not None and value not in choices:
            yield f"its {name} is {str(value)[:_SHOWN]}, and must be one of {', '.join(choices)}"


def _of_types(config: Any) -> Iterator[str]:
    types = _value(config, "layer_types")
    for kind, name in _OF_TYPES:
        value = _value(config, name, 1)
        needed = isinstance(types, list | tuple) and kind in types
        if needed and not (_is_number(value) and value >= 1):
            yield f"some of its layers are of type {kind}, and its {name} is {str(value)[:_SHOWN]}"


def _of_layers(config: Any) -> Iterator[str]:
    layers = _value(config, "num_hidden_layers")
    if not isinstance(layers, int):
        return
    for name in _OF_LAYERS:
        value = _value(config, name)
        if isinstance(value, list | tuple | str) and value and len(value) != layers:
            yield f"its {name} has {len(value)} entries for {layers} layers"
    yield from _shared(_value(config, "layer_types"), _value(config, "num_kv_shared_layers"))
    for name in _LAYERS:
        value = _value(config, name)
        for layer in value if isinstance(value, list | tuple) else ():
            if not isinstance(layer, int) or not 0 <= layer < layers:
                yield f"its {name} names layer {str(layer)[:_SHOWN]}, and it has layers 0 to {layers - 1}"


def _shared(types: Any, shared: Any) -> Iterator[str]:
    if not isinstance(types, list | tuple) or not isinstance(shared, int) or not 0 < shared < len(types):
        return
    for lost in sorted(set(map(str, types[-shared:])) - set(map(str, types[:-shared]))):
        yield (f"its last {shared} layers share keys and values, and none before them is of type {lost[:_SHOWN]}")


def _value(config: Any, name: str, default: object = None) -> Any:
    try:
        return getattr(config, name, default)
    except Exception:  # transformers', where layers differ in it
        return default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
