"""GGUF files of further families: written from transformers' models in llama.cpp's layout, held against them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from services.executor.model.loading.gguf_transforms import interleaved
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.gguf_models import EXPERTS, KEYS, Changes, Keys, Tensors, apart, names_of, words, written
from tests.unit.executor.model.lanes import in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import (
    Wrong,
    assert_codes,
    assert_model,
    assert_near_what_is_unpacked,
    assert_refused,
    converted,
    theirs,
)
from tests.unit.executor.model.loading.test_gguf_mixtures import EVEN_HEADS, experts_of, of_deepseek, rotations_of
from tests.unit.executor.model.tiny import ALL_EXPERTS, GROUPED, LATENT, YARN, make_model

SIGMOID = int(gguf.ExpertGatingFuncType.SIGMOID)


@dataclass(frozen=True)
class Case:
    """A model of transformers, and what a file of it has beside what all have."""

    model_type: str
    architecture: str
    settings: Keys = field(default_factory=dict)
    keys: Callable[[Any], Keys] = lambda config: {}
    # (the file's name of a tensor, as gguf's table has it; its rows; the configuration): those that the file has
    lay: Callable[[str, Tensor, Any], Tensors] = lambda name, tensor, config: iter([(name, tensor)])
    # Keys that list parameters, one of each layer, and how the names of these end
    listed: Mapping[str, str] = field(default_factory=dict)


def turned_part(config: Any) -> Keys:
    return {"rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"])}


def turned_whole(config: Any) -> Keys:
    return {"rope.dimension_count": config.head_dim}


def of_glm4moe(config: Any) -> Keys:
    """With a head for several tokens behind the layers, as there is in tensors."""
    heads = {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    part = turned_part(config) if "partial_rotary_factor" in config.rope_parameters else {}
    return {**experts_of(config), **part, **heads, "expert_gating_func": SIGMOID}


def lay_behind(name: str, tensor: Tensor, config: Any) -> Tensors:
    if name == "output_norm.weight":
        yield f"blk.{config.num_hidden_layers}.nextn.enorm.weight", tensor
    yield name, tensor


def lay_halves(name: str, tensor: Tensor, config: Any) -> Tensors:
    """Of queries and keys, what the model turns as neighbours is half of what turns apart."""
    if ".attn_q." in name or ".attn_k." in name:
        turned = turned_part(config)["rope.dimension_count"]
        heads = tensor.view(-1, config.head_dim, *tensor.shape[1:])
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, config.head_dim)]
        tensor = heads[:, order].reshape(tensor.shape)
    yield name, tensor


def lay_as_one() -> Callable[[str, Tensor, Any], Tensors]:
    """Queries, keys and values in one tensor."""
    held: dict[str, list[Tensor]] = {}

    def lay(name: str, tensor: Tensor, config: Any) -> Tensors:
        parts = name.split(".")
        if len(parts) < 4 or parts[2] not in ("attn_q", "attn_k", "attn_v"):
            yield name, tensor
            return
        key = f"{parts[0]}.{parts[1]}.attn_qkv.{parts[3]}"
        held.setdefault(key, []).append(tensor)
        if len(held[key]) == 3:
            yield key, torch.cat(held.pop(key))

    return lay


def lay_latents(name: str, tensor: Tensor, config: Any) -> Tensors:
    """What makes keys and values of latents as two tensors, that of keys transposed."""
    if ".attn_kv_b." not in name:
        yield from lay_behind(name, tensor, config)
        return
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
    yield name.replace("kv_b", "v_b"), values


def of_indexed(config: Any) -> Keys:
    words = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}
    kinds = getattr(config, "indexer_types", None)
    return {
        **of_deepseek(config, older=False),
        **{key: value for key, value in of_glm4moe(config).items() if "rope" not in key},
        **{f"attention.indexer.{key}": getattr(config, word) for key, word in words.items()},
        "attention.indexer.types": kinds and [kind == "full" for kind in kinds],
    }


def lay_pairs(name: str, tensor: Tensor, config: Any) -> Tensors:
    """What the model turns as halves of a head are neighbours."""
    if ".attn_q." in name or ".attn_k." in name:
        tensor = interleaved(tensor, tensor.shape[0] // config.head_dim)
    yield name, tensor


def lay_raised(name: str, tensor: Tensor, config: Any) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def lay_shared(name: str, tensor: Tensor, config: Any) -> Tensors:
    """Gate and up of a shared expert as two tensors."""
    if name.endswith("input_linear"):
        block = name.removesuffix("input_linear")
        for of, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{block}ffn_{of}_shexp.weight", part
        return
    yield from lay_pairs(name, tensor, config)


def lay_experts(name: str, tensor: Tensor, config: Any) -> Tensors:
    """Experts' sides as stacks, those that make the output transposed."""
    if name.endswith("_exps"):
        stack = tensor.view(config.ffn_config.moe_num_experts, -1, tensor.shape[-1])
        yield f"{name}.weight", stack.transpose(1, 2) if "_down_" in name else stack
    else:
        yield name, tensor


def lay_unnamed(name: str, tensor: Tensor, config: Any) -> Tensors:
    yield from lay_behind(name.removesuffix(".bias") if "exp_probs_b" in name else name, tensor, config)


def lay_halved(name: str, tensor: Tensor, config: Any) -> Tensors:
    """Gate and up as two tensors."""
    if name.endswith(("ffn_up.weight", "ffn_up_shexp.weight")):
        for of, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("ffn_up", f"ffn_{of}"), part
        return
    yield from lay_raised(name, tensor, config)


WINDOWS = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types"}
SCORES: Keys = {"expert_gating_func": SIGMOID, "expert_weights_norm": True}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
INDEXES = {
    "head_count": "n_heads",
    "key_length": "head_dim",
    "top_k": "topk_blocks",
    "block_size": "block_size",
    "local_blocks": "local_blocks",
}
HALF: Keys = {"rope_parameters": {"rope_theta": 6e5, "partial_rotary_factor": 0.5}}
GLM: Keys = {**EVEN_HEADS, **HALF, "attention_bias": True}
WHOLE: Keys = {"rope_parameters": {"rope_theta": 6e5, "partial_rotary_factor": 1.0}}
MAGNIFIED: Keys = {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
HEADS: Keys = {**EVEN_HEADS, "hidden_size": 192, "rope_parameters": {"rope_theta": 5e5}}
SIX: Keys = {**EVEN_HEADS, "num_experts_per_tok": 6, "moe_intermediate_size": 64}  # experts, all of them used
GRANITE: Keys = {**EVEN_HEADS, "attention_multiplier": 32**-0.5, "attention_bias": False, "mlp_bias": False}
UNSCALED: Keys = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
SECTIONS = {"rope.dimension_sections": [4, 6, 6, 0]}
# An indexer chooses of 9 tokens; with so many heads no scores tie.
INDEXED: Keys = {"index_topk": 9, "index_head_dim": 64, "index_n_heads": 16, "head_dim": 32, "num_hidden_layers": 3}
ALL: Keys = {**GROUPED, **ALL_EXPERTS, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
CHOSEN: Keys = {**ALL, **LATENT, **INDEXED, "attention_bias": False}
# fmt: off
CASES: dict[str, Case] = {
    "glm4moe": Case("glm4_moe", "glm4moe", {**ALL, **GLM, "use_qk_norm": True}, of_glm4moe, lay_behind),
    # Of GLM 4.5 Air without norms; of Solar Open heads turn whole.
    "glm4moe/air": Case("glm4_moe", "glm4moe", {**ALL, **GLM, **WHOLE, "use_qk_norm": False}, of_glm4moe, lay_behind),
    "glm4": Case("glm4", "glm4", GLM, turned_part),
    "glm4/sections": Case("glm4", "glm4", GLM, lambda config: {**turned_part(config), **SECTIONS}, lay_halves),
    "chatglm": Case("glm", "chatglm", {**GLM, "hidden_size": 192}, turned_part, lay_as_one()),
    "chatglm/apart": Case("glm", "chatglm", {**GLM, "hidden_size": 192}, turned_part),
    "hunyuan-dense": Case("hunyuan_v1_dense", "hunyuan-dense", {**EVEN_HEADS,
        "rope_parameters": {"rope_theta": 5e5}}),
    "hunyuan-moe": Case("hunyuan_v1_moe", "hunyuan-moe", {**EVEN_HEADS, "moe_topk": 6, "intermediate_size": 64},
        words({**EXPERTS, "expert_used_count": "moe_topk", "expert_feed_forward_length": "intermediate_size"})),
    "qwen2vl": Case("qwen2", "qwen2vl", {**EVEN_HEADS, "hidden_size": 192}, lambda config: SECTIONS),
    "qwen3vl": Case("qwen3", "qwen3vl", {**EVEN_HEADS, "attention_bias": False}, lambda config: SECTIONS),
    "qwen3vlmoe": Case("qwen3_moe", "qwen3vlmoe", SIX, words(EXPERTS, SECTIONS)),
    "glm-dsa": Case("glm_moe_dsa", "glm-dsa", {**CHOSEN, "indexer_types": ["full", "shared", "full"]}, of_indexed,
        lay_latents),
    "deepseek32": Case("deepseek_v32", "deepseek32", {**CHOSEN, **MAGNIFIED}, of_indexed, lay_latents),
    # Of GLM 4.7 Flash, with a head for several tokens
    "deepseek2/behind": Case("deepseek_v3", "deepseek2", {**CHOSEN, "rope_parameters": {**YARN, "mscale": 0.9}},
        lambda config: {**of_deepseek(config, older=False), "block_count": 4, "nextn_predict_layers": 1},
        lay_latents),
    "afmoe": Case("afmoe", "afmoe", {**ALL, **EVEN_HEADS, "num_hidden_layers": 5, "num_shared_experts": 2,
        "num_dense_layers": 2, "mup_enabled": True, "route_scale": 1.7, "sliding_window": 9,
        "global_attn_every_n_layers": 4}, words({**EXPERTS, "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "route_scale", "leading_dense_block_count": "num_dense_layers",
        "attention.sliding_window": "sliding_window"}, SCORES)),
    "exaone-moe": Case("exaone_moe", "exaone-moe", {**ALL, **EVEN_HEADS, "num_shared_experts": 2, "sliding_window": 9,
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"]}, words({**EXPERTS, **WINDOWS,
        "expert_shared_count": "num_shared_experts", "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace"}, {**SCORES, "nextn_predict_layers": 0,
        "expert_shared_feed_forward_length": 128})),
    "apertus": Case("apertus", "apertus", {**EVEN_HEADS, "rope_parameters": {"rope_theta": 1e5}},
        listed={f"xielu.{of}": f"act_fn.{of}" for of in ("alpha_n", "alpha_p", "beta", "eps")}),
    "bailingmoe": Case("granitemoeshared", "bailingmoe", {**GRANITE, **UNSCALED, "num_experts_per_tok": 6,
        "intermediate_size": 64, "shared_intermediate_size": 128}, words({**EXPERTS,
        "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size",
        "rope.dimension_count": "head_dim"}, {"expert_shared_count": 2, "expert_weights_norm": True,
        "expert_weights_scale": 1.0}), lay_shared),
    "jais2": Case("jais2", "jais2", HEADS, words({**LAYER_NORM, "rope.dimension_count": "head_dim"})),
    "baichuan": Case("llama", "baichuan", HEADS, turned_whole, lay_pairs),
    "pangu-embedded": Case("llama", "pangu-embedded", {**HEADS, "attention_bias": True}, turned_whole),
    "orion": Case("stablelm", "orion", {**HEADS, **WHOLE}, words(LAYER_NORM)),
    "bitnet": Case("bitnet", "bitnet", {**HEADS, "hidden_act": "silu", "tie_word_embeddings": True}),
    "hunyuan_vl": Case("hunyuan_v1_dense", "hunyuan_vl", HEADS, lambda config: SECTIONS),
    "paddleocr": Case("llama", "paddleocr", HEADS, lambda config: SECTIONS),
    "dbrx": Case("dbrx", "dbrx", {**EVEN_HEADS, "d_model": 96, "head_dim": 16, "num_hidden_layers": 1,
        "attn_config": {"kv_n_heads": 3, "clip_qkv": 0.4, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 64,
        "moe_num_experts": 6, "moe_top_k": 6}}, lambda config: {"attention.head_count_kv": 3,
        "attention.clamp_kqv": 0.4, "attention.layer_norm_epsilon": 1e-5, "expert_count": 6, "expert_used_count": 6,
        "feed_forward_length": 64}, lay_experts),
    "hy_v3": Case("hy_v3", "hy_v3", {**SIX, "attention_bias": False, "rope_parameters": {"rope_theta": 5e5}},
        words({**EXPERTS, "expert_weights_scale": "router_scaling_factor"}, {**SCORES,
        "expert_shared_feed_forward_length": 128, "block_count": 4, "nextn_predict_layers": 1}), lay_unnamed),
    "mellum": Case("mellum", "mellum", {**SIX, "mlp_layer_types": None,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention",
        "sliding_attention")}}, words({**EXPERTS, **WINDOWS}, {"rope.freq_base": 5e5})),
    "minimax-m3": Case("minimax_m3_vl_text", "minimax-m3", {**SIX, **HALF, "intermediate_size": 64,
        "dense_intermediate_size": 160, "shared_intermediate_size": 64, "layer_types": ["full_attention",
        "minimax_m3_sparse", "minimax_m3_sparse"], "rotary_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 3, "index_head_dim": 32, "index_block_size": 32, "index_topk_blocks": 2}, words({**EXPERTS,
        "expert_feed_forward_length": "intermediate_size", "expert_count": "num_local_experts",
        "expert_weights_scale": "routed_scaling_factor", "rope.dimension_count": "rotary_dim",
        **{f"attention.indexer.{key}": f"index_{word}" for key, word in INDEXES.items()}}, {**SCORES,
        "expert_shared_count": 1, "feed_forward_length": 160, "leading_dense_block_count": 1}), lay_halved),
}
# fmt: on


def keys_of(case: Case, config: Any) -> Keys:
    said = {key: getattr(config, word, None) for key, word in KEYS.items()}
    said["attention.value_length"] = said["attention.key_length"]
    return {**said, **(rotations_of(config) if hasattr(config, "rope_parameters") else {}), **case.keys(config)}


def tensors_of(case: Case, model: Any) -> Tensors:
    wanted = UNKNOWN.get(case.architecture, case.architecture)
    names = names_of(wanted, model.config.num_hidden_layers)
    for own, tensor in apart(model.state_dict()):
        if own.endswith(tuple(case.listed.values())) or (own == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        stored = names.get_name(own, (".weight", ".bias"))
        if stored is None or stored.endswith("exp_probs_b"):
            part = next(part for part in NAMES if own.endswith(part))
            stored = NAMES[part].format(*(word for word in own.split(".") if word.isdigit()))
        yield from case.lay(stored, tensor, model.config)


# Architectures that gguf does not know, and one that has the same names.
UNKNOWN = {"deepseek32": "glm-dsa", "hy_v3": "dots1", "mellum": "qwen3moe", "minimax-m3": "dots1"}
# How names of parameters end that gguf's table does not have.
NAMES = {
    **{f"indexer.{of}.weight": f"blk.{{}}.indexer.{of}.weight" for of in ("q_proj", "k_proj", "q_norm", "k_norm")},
    **dict.fromkeys(("e_score_correction_bias", "expert_bias"), "blk.{}.exp_probs_b.bias"),
    **{f"{of}_proj.{end}": f"blk.{{}}.attn_{of}.{end}" for of in "qkv" for end in ("weight", "bias")},
    **{f"experts.{of}_proj.weight": f"blk.{{}}.ffn_{of}_exps.weight" for of in ("gate", "up", "down")},
    **{f"{of}_sub_norm.weight": f"blk.{{}}.{of}_sub_norm.weight" for of in ("attn", "ffn")},
    "shared_experts.gate_up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "router.weight": "blk.{}.ffn_gate_inp.weight",
    "input_linear.weight": "blk.{}.input_linear",
    "output_linear.weight": "blk.{}.ffn_down_shexp.weight",
}


def make(
    tmp_path: Path, name: str, kind: str, keys: Keys | None = None, tensors: Changes | None = None
) -> tuple[Path, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    case = CASES[name]
    source = make_model(tmp_path / "plain", case.model_type, **{"tie_word_embeddings": False, **case.settings})
    model = theirs(source)
    state = model.state_dict().items()
    listed = {key: [float(value) for name, value in state if name.endswith(end)] for key, end in case.listed.items()}
    said = {**keys_of(case, model.config), **listed, **(keys or {})}
    held = {**dict(tensors_of(case, model)), **(tensors or {})}
    return source, written(tmp_path / "model.gguf", case.architecture, said, held, kind)


RINGS = [("glm4moe", 3), ("chatglm", 2), ("apertus", 2)]
FAST = ["glm4/sections", "chatglm"]  # rows in another order; parts of a tensor


@pytest.mark.parametrize(("name", "ranks"), in_rings(CASES, FAST, RINGS))
def test_weights_and_settings_and_logits_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    source, file = make(tmp_path, name, "F32")
    assert_model(converted(file), ranks, theirs(source), unsaid=UNUSED)


# Of Qwen 2, whose layers see all; and what DBRX says of attention and experts
UNUSED = {"sliding_window", "max_window_layers", "attn_config", "ffn_config"}


# Whose indexers choose others of what nearly ties where activations are rounded.
CHOOSING = ("deepseek32", "minimax-m3")


@natively
@pytest.mark.parametrize(
    "name", in_lanes([name for name in CASES if name not in CHOOSING], [], ["glm4moe", "glm4/sections", "dbrx"])
)
def test_the_kernels_compute_with_the_codes(tmp_path: Path, name: str) -> None:
    _, file = make(tmp_path, name, "Q8_0")
    made = converted(file)
    assert_codes(made, ("kv_b_proj",))  # what is transposed has codes of other rows
    assert_near_what_is_unpacked(file, runner_of(made, native=True))


WRONG: list[Wrong] = [
    ("glm4moe", {"rope.dimension_count": None}, {}, r"does not say glm4moe\.rope\.dimension_count"),
    ("glm4moe", {"expert_gating_func": 1}, {}, r"says expert_gating_func 1"),
    ("glm4moe", {}, {"blk.1.exp_probs_b.bias": None}, r"no tensor .*layers\.1\.mlp\.gate\.e_score_correction_bias"),
    ("glm4moe", {}, {"blk.1.attn_q_norm.weight": None}, r"no tensor .*layers\.1\.self_attn\.q_norm"),
    ("glm4/sections", {}, {"blk.1.attn_k.weight": torch.ones(97, 96)}, r"attn_k\.weight|k_proj\.weight has the shape"),
    ("glm4", {}, {"blk.1.post_ffw_norm.weight": None}, r"no tensor .*layers\.1\.post_mlp_layernorm"),
    ("chatglm", {}, {"blk.1.attn_qkv.weight": None}, r"no tensor blk\.1\.attn_qkv\.weight"),
    ("chatglm", {}, {"blk.1.attn_qkv.bias": torch.ones(7)}, r"attn_qkv\.bias has the shape \[7\]"),
    ("hunyuan-moe", {"expert_used_count": None}, {}, r"does not say hunyuan-moe\.expert_used_count"),
    ("glm-dsa", {"attention.indexer.top_k": None}, {}, r"does not say glm-dsa\.attention\.indexer\.top_k"),
    ("glm-dsa", {}, {"blk.2.indexer.attn_k.weight": None}, r"no tensor .*layers\.2\.self_attn\.indexer\.wk"),
    ("deepseek32", {}, {"blk.1.attn_k_b.weight": None}, r"no tensor blk\.1\.attn_k_b\.weight"),
    ("afmoe", {"expert_weights_norm": None}, {}, r"otherwise than by normed scores"),
    ("afmoe", {}, {"blk.2.exp_probs_b.bias": None}, r"no tensor .*layers\.2\.mlp\.expert_bias"),
    ("exaone-moe", {"attention.sliding_window_pattern": [True]}, {}, r"1 values of attention\.sliding_window_pattern"),
    ("apertus", {"xielu.alpha_p": [0.7] * 2}, {}, r"no number 2 of float32 in xielu\.alpha_p"),
    ("apertus", {"xielu.alpha_n": None}, {}, r"does not say xielu\.alpha_n"),
    ("bailingmoe", {"expert_weights_norm": None}, {}, r"otherwise than by normed scores"),
    ("bailingmoe", {}, {"blk.1.ffn_up_shexp.weight": None}, r"no tensor blk\.1\.ffn_up_shexp\.weight"),
    ("baichuan", {"block_count": 40}, {}, r"holds Baichuan 13B"),
    ("dbrx", {}, {"blk.0.ffn_down_exps.weight": torch.ones(5, 96, 64)}, r"ffn_down_exps\.weight has the shape \[5, 96"),
    ("hy_v3", {"expert_weights_norm": False}, {}, r"otherwise than by normed scores"),
    ("minimax-m3", {"attention.indexer.block_size": None}, {}, r"does not say minimax-m3\.attention\.indexer\.block"),
    ("qwen3vlmoe", {}, {"blk.1.ffn_up_exps.weight": None}, r"no tensor blk\.1\.ffn_up_exps\.weight"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    assert_refused(file, message)
