"""Settings of models whose layers keep states: of delta rules and of Mamba. Pure."""

from typing import Any

from services.executor.model.loading.gguf_settings.common import FULL, WIDTH, Compute, Said
from services.executor.model.loading.gguf_settings.mixtures import grouped_experts
from shared.errors import ModelLoadError


def _gated_delta(said: Said) -> dict[str, Any]:
    """Layers of a gated delta rule, between which each fourth has attention where a file says nothing else; behind
    them may be heads that predict several tokens, which `block_count` counts."""
    layers = said.layers
    every = max(1, int(said.get("full_attention_interval", 4)))
    recurrent = said.get("attention.recurrent_layers")
    if not isinstance(recurrent, list | tuple):
        recurrent = [(layer + 1) % every for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_value_head_dim": int(said["ssm.inner_size"]) // max(1, int(said["ssm.time_step_rank"])),
    }


def _kimi_delta(said: Said) -> dict[str, Any]:
    """Kimi's delta attention in layers without key and value heads, between which there is latent attention."""
    layers, heads, dense = int(said["block_count"]), said["attention.head_count"], said.get("leading_dense_block_count")
    return {
        "layer_types": [
            "full_attention" if count else "linear_attention" for count in said.by_layer("attention.head_count_kv")
        ],
        "mlp_layer_types": ["dense" if layer < int(dense or 0) else "sparse" for layer in range(layers)],
        "linear_num_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": said["rope.dimension_count"],
        "qk_nope_head_dim": said["attention.key_length_mla"] - said["rope.dimension_count"],
    }


def _mamba_2(said: Said) -> dict[str, Any]:
    width, heads = int(said["ssm.inner_size"]), int(said["ssm.time_step_rank"])
    return {"mamba_d_head": width // max(1, heads), "mamba_expand": width // max(1, int(said["embedding_length"]))}


def _mamba_layers(said: Said) -> dict[str, Any]:
    """Layers without heads for keys have a state space."""
    heads = said.by_layer("attention.head_count_kv")
    kinds = ["full_attention" if count else "linear_attention" for count in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(heads)}


def _bamba(said: Said) -> dict[str, Any]:
    """Half of a head turns in all models."""
    heads = said.by_layer("attention.head_count_kv")
    width = said.get("attention.key_length", said["embedding_length"] // max(1, said["attention.head_count"]))
    if 2 * said["rope.dimension_count"] != width:
        raise ModelLoadError(
            f"The file turns {said['rope.dimension_count']} of {width} values of a head (rope.dimension_count), and "
            "models of its architecture that can be served turn half of them; choose another."
        )
    return {
        "attn_layer_indices": [layer for layer, count in enumerate(heads) if count],
        "num_key_value_heads": max(heads),
    }


def _nemotron_h(said: Said) -> dict[str, Any]:
    """Layers are attention where they have heads for keys, feed-forward where they have a width, and state spaces else.
    Behind them may be one that predicts tokens."""
    counts = ("expert_feed_forward_length", "expert_used_count")
    if listed := [key for key in counts if isinstance(said.get(key), list | tuple)]:
        raise ModelLoadError(
            f"The file's layers have experts of their own kinds ({listed[0]} is a list), which no model of its "
            "architecture that can be served has; choose another."
        )
    layers, experts = said.layers, said.get("expert_count")
    heads, widths = (said.by_layer(key)[:layers] for key in ("attention.head_count_kv", WIDTH))
    feed_forward = "moe" if experts else "mlp"
    settings = {
        "num_hidden_layers": layers,
        "layers_block_type": [
            FULL if count else feed_forward if width else "linear_attention"
            for count, width in zip(heads, widths, strict=True)
        ],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "mamba_head_dim": int(said["ssm.inner_size"]) // max(1, int(said["ssm.time_step_rank"])),
    }
    if experts:
        shared = said["expert_shared_feed_forward_length"]
        settings |= {**grouped_experts(said), "moe_shared_expert_intermediate_size": shared}
    return settings


def _mamba(said: Said) -> dict[str, Any]:
    """As wide inside as `expand` times outside. Falcon's has norms of what its scan is made of."""
    width = int(said["ssm.inner_size"])
    settings = {"intermediate_size": width, "expand": width // max(1, int(said["embedding_length"]))}
    return {**settings, "model_type": "falcon_mamba"} if said.get("ssm.dt_b_c_rms") else settings


def _mamba2(said: Said) -> dict[str, Any]:
    heads = int(said["ssm.time_step_rank"])
    return {**_mamba(said), "head_dim": int(said["ssm.inner_size"]) // max(1, heads)}


def _jamba(said: Said) -> dict[str, Any]:
    """Layers with heads for keys have attention, some have experts: each so many-th."""
    heads, layers = said.by_layer("attention.head_count_kv"), int(said["block_count"])
    routers, stacks = ([f"blk.{layer}.ffn_{of}.weight" for layer in range(layers)] for of in ("gate_inp", "up_exps"))
    experts = [router in said.shapes or stack in said.shapes for router, stack in zip(routers, stacks, strict=True)]
    return {
        **_each("attn", heads, "attention (attention.head_count_kv)"),
        **_each("expert", experts, "experts (ffn_gate_inp.weight)"),
        "num_key_value_heads": max(heads),
        "mamba_expand": int(said["ssm.inner_size"]) // max(1, int(said["embedding_length"])),
    }


def _each(kind: str, layers: list[Any], what: str) -> dict[str, Any]:
    """Each so many-th of `layers` that is something, and the first. Raises `ModelLoadError`."""
    found = [layer for layer, one in enumerate(layers) if one]
    first = found[0] if found else len(layers)
    period = found[1] - first if len(found) > 1 else len(layers) + 1
    if found != [layer for layer in range(len(layers)) if layer % period == first]:
        raise ModelLoadError(
            f"The file's layers {', '.join(map(str, found))} have {what}, and models of its architecture that can be "
            "served have them at even distances; choose another."
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first}


STATE_SPACES: dict[str, Compute] = {
    "gated_delta": _gated_delta,
    "kimi_delta": _kimi_delta,
    "mamba_2": _mamba_2,
    "mamba_layers": _mamba_layers,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "falcon_h1": lambda said: {"mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in said.shapes)},
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
}
