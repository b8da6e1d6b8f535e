"""The architectures of GGUF files, each once. Source: llama.cpp, convert_hf_to_gguf.py and llama-model.cpp."""

from collections.abc import Iterable, Mapping

from services.executor.families.gguf import EXPERTS, GgufArchitecture
from services.executor.families.gguf_refusals import refusal
from shared.errors import ModelLoadError

_PAIRS = {"blk.*.attn_q.*": "pairs", "blk.*.attn_k.*": "pairs"}
_NORMS = {"*norm.weight": "plus_one"}
_EXPERTS = ("expert_count", "expert_used_count")
_GELU = ("gelu_pytorch_tanh",)
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_WINDOW = ("attention.sliding_window",)
_MAY_SLIDE = {"attention.sliding_window": "sliding_window"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_CONVOLUTIONS = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_MERGED_EXPERTS = {end: (end,) for end in ("experts.gate_up_proj", "experts.down_proj")}
_MAY_BE_WIDE = {"feed_forward_length": "intermediate_size"}  # of dense layers, where there are some
_MANY_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {**_MANY_EXPERTS, "expert_count": "num_local_experts"}
_QWEN_EXPERTS = {"feed_forward_length": "", **_MANY_EXPERTS}


def _class_names(before: str) -> dict[str, str]:
    """`before`: the layer in front of an encoder's classes."""
    return {
        f"{file}.{end}": f"{model}.{end}"
        for end in ("weight", "bias")
        for file, model in (("cls", before), ("cls.output", "classifier"))
    }


# fmt: off
# Of the gated delta rule
_DECAY = {"*.ssm_a": "minus_exp"}
_DELTA = {"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads"}
_SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_DELTA_NAMES = {"blk.{}.ssm_dt.bias": "model.layers.{}.linear_attn.dt_bias"}
_CHOICE = {"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"}
_KIMI = "model.layers.{}.self_attn.forget_gate."
_KIMI_NAMES = {"blk.{}.ssm_a": _KIMI + "A_log", "blk.{}.ssm_dt.bias": _KIMI + "dt_bias",
    "blk.{}.ssm_f_a.weight": _KIMI + "f_a_proj.weight", "blk.{}.ssm_f_b.weight": _KIMI + "f_b_proj.weight",
    **_CHOICE}
_DELTA_NORMS = {"output_norm.weight": "plus_one", "*.att*norm.weight": "plus_one",
    "*.post_attention_norm.weight": "plus_one"}
_TILED_HEADS = {**_DELTA_NORMS, **dict.fromkeys(("*.attn_gate.weight", "*.ssm_alpha.weight", "*.ssm_beta.weight",
    "*.ssm_dt.bias"), "value_heads"), **dict.fromkeys(("*.attn_qkv.weight", "*.ssm_conv1d.weight"),
    "value_heads_behind_keys"), "*.ssm_a": "value_heads_minus_exp", "*.ssm_out.weight": "value_columns"}

_QKV_NAMES = {f"blk.{{}}.attn_{of}.{end}": f"model.layers.{{}}.self_attn.{of}_proj.{end}" for of in "qkv"
    for end in ("weight", "bias")}
_QKV_PARTS = {f"{of[0]}_proj.{end}": f"{of}_of_all.{end}" for of in ("queries", "keys", "values")
    for end in ("weight", "bias")}
_OF_LATENTS = {"kv_b_proj.weight": "keys_values_of_latents"}
_GROUPS = {"*.attn_qkv.*": "groups"}  # of heads, behind each other

_LAYER_NORM = {"attention.layer_norm_rms_epsilon": ""}  # of models without RMS norms
_LAYER_NORM_EPS = {**_LAYER_NORM, "attention.layer_norm_epsilon": "layer_norm_eps"}
_LAYER_NORM_EPSILON = {**_LAYER_NORM, "attention.layer_norm_epsilon": "layer_norm_epsilon"}
_TURNED = ("rope.dimension_count",)
# Factors of a longer context, which they may have, turn what is beyond the model's own.
_LONG_BY_DEFAULT = {"original_max_position_embeddings": "max_position_embeddings"}
_NORMS_BEHIND = {f"blk.{{}}.{file}.{end}": f"layers.{{}}.{model}.{end}" for end in ("weight", "bias")
    for file, model in (("attn_output_norm", "post_attention_layernorm"), ("layer_output_norm", "post_mlp_layernorm"),
    ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"))}
_DENSE = ("dense_*.weight",)  # of encoders: layers behind the pooling, which are read apart
_CLASSES = ("cls.output.weight",)  # of decoders: read apart as well
_OSS = "model.layers.{}.mlp.experts."
_OSS_NAMES = {"blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    **{f"blk.{{}}.ffn_{side}_exps.bias": f"{_OSS}{side}_proj_bias" for side in ("gate", "up", "down")}}

_GRANITE_SCALES = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
_GRANITE_MOE = "model.layers.{}.block_sparse_moe."
_GRANITE_SHARED = "model.layers.{}.shared_mlp."
_GRANITE_NAMES = {"blk.{}.ffn_gate_inp.weight": _GRANITE_MOE + "router.weight",
    **{f"blk.{{}}.ffn_{one}_exps": f"{_GRANITE_MOE}experts.{one}_proj" for one in ("gate", "up", "down")},
    "blk.{}.ffn_gate_shexp": _GRANITE_SHARED + "gate", "blk.{}.ffn_up_shexp": _GRANITE_SHARED + "up"}
_GRANITE_DENSE = {"blk.{}.ffn_gate": _GRANITE_SHARED + "gate", "blk.{}.ffn_up": _GRANITE_SHARED + "up",
    "blk.{}.ffn_down.weight": _GRANITE_SHARED + "output_linear.weight"}
_GRANITE_JOINED = {**EXPERTS, "shared_mlp.input_linear.weight": ("shared_mlp.gate", "shared_mlp.up")}
_MAMBA_2 = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads"}
_MAMBA_2_NAMES = {"blk.{}.ssm_dt.bias": "model.layers.{}.mamba.dt_bias"}
_MAMBA = {"attention.head_count": "", "feed_forward_length": "", "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size", "attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
_MIXER = "model.layers.{}.mixer."
_NEMOTRON_H_NAMES = {"blk.{}.ssm_dt.bias": _MIXER + "dt_bias", "blk.{}.ffn_up_exps": _MIXER + "experts.up_proj",
    "blk.{}.ffn_down_exps": _MIXER + "experts.down_proj",
    "blk.{}.exp_probs_b.bias": _MIXER + "gate.e_score_correction_bias"}

_ROWS = (
    GgufArchitecture("llama", transforms=_PAIRS, written=("llama", "mistral"),
        variants={"expert_count": GgufArchitecture("llama", "mixtral", transforms=_PAIRS, settings=_LOCAL_EXPERTS)}),
    GgufArchitecture("mistral", names_of="llama", transforms=_PAIRS, optional=_MAY_SLIDE,
        defaults={"sliding_window": None}),
    GgufArchitecture("qwen2", written=("qwen2",)),
    GgufArchitecture("qwen3", follow=_CLASSES, written=("qwen3",)),
    GgufArchitecture("granite", transforms=_PAIRS, settings=_GRANITE_SCALES, written=("granite",)),
    # Its layers have rotary positions as config.json has them by default.
    GgufArchitecture("smollm3", transforms=_PAIRS, written=("smollm3",)),
    GgufArchitecture("seed_oss", written=("seed_oss",), biases=True),
    GgufArchitecture("phi3", optional={"attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings"},
        defaults={"sliding_window": None}, rotates_in_part=True, written=("phi3",), windows=1),
    GgufArchitecture("gemma", transforms=_NORMS, written=("gemma",), activations=(*_GELU, "gelu")),
    GgufArchitecture("gemma2", transforms=_NORMS, optional={**_CAPS, **_MAY_SLIDE}, needs=_WINDOW, largest=46,
        written=("gemma2",), activations=_GELU, windows=2, soft_caps=True),
    GgufArchitecture("gemma3", "gemma3_text", transforms=_NORMS, optional={**_CAPS, **_MAY_SLIDE},
        computed=("gemma3_rotations",), needs=_WINDOW, largest=62,
        written=("gemma3_text",), activations=_GELU, windows=6),
    GgufArchitecture("qwen2moe", "qwen2_moe", settings=_QWEN_EXPERTS,
        optional={**_MAY_BE_WIDE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        defaults={"shared_expert_intermediate_size": "intermediate_size"}, needs=_EXPERTS),
    GgufArchitecture("qwen3moe", "qwen3_moe", settings=_QWEN_EXPERTS, optional=_MAY_BE_WIDE,
        constants={"norm_topk_prob": True}),
    GgufArchitecture("arcee", transforms=_PAIRS),
    GgufArchitecture("ernie4_5"),
    GgufArchitecture("exaone4", optional=_MAY_SLIDE, defaults={"sliding_window": None}),
    GgufArchitecture("olmo2", variants={"attention.sliding_window": GgufArchitecture("olmo2", "olmo3",
        settings={"attention.sliding_window": "sliding_window"}, rotations=("full_attention", "sliding_attention"))}),

    GgufArchitecture("qwen35", "qwen3_5_text", names=_DELTA_NAMES, transforms=_TILED_HEADS,
        settings=_DELTA, computed=("gated_delta",), needs=_TURNED, rotates_in_part=True),
    GgufArchitecture("qwen35moe", "qwen3_5_moe_text", names=_DELTA_NAMES, transforms=_TILED_HEADS,
        settings={**_DELTA, **_QWEN_EXPERTS, **_SHARED_EXPERT}, computed=("gated_delta",),
        needs=("rope.dimension_count", "expert_feed_forward_length"), rotates_in_part=True),
    GgufArchitecture("qwen3next", "qwen3_next", names=_DELTA_NAMES, transforms={**_DELTA_NORMS, **_DECAY},
        composed={"in_proj_qkvz.weight": "queries_keys_values_gates"},
        settings={**_DELTA, **_QWEN_EXPERTS, **_SHARED_EXPERT}, optional=_MAY_BE_WIDE, computed=("gated_delta",),
        needs=("rope.dimension_count", "expert_feed_forward_length"), rotates_in_part=True),

    # The factors of its rotary positions say which of them turn at all.
    GgufArchitecture("gemma4", "gemma4_text", follow=("rope_freqs.weight",),
        names={"blk.{}.layer_output_scale.weight": "model.layers.{}.layer_scalar",
        "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",
        "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale"}, joined=_MERGED_EXPERTS,
        settings={"feed_forward_length": "", **_MAY_SLIDE}, optional=_FINAL_CAP, computed=("gemma4",)),
    GgufArchitecture("lfm2", settings=_CONVOLUTIONS, constants={"block_auto_adjust_ff_dim": False},
        computed=("short_convolutions",)),
    GgufArchitecture("lfm2moe", "lfm2_moe",
        names={"blk.{}.exp_probs_b.bias": "model.layers.{}.feed_forward.expert_bias"},
        settings={**_CONVOLUTIONS, **_MANY_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers"}, computed=("short_convolutions",)),
    # Readers cap its logits at 30 where a file does not say it.
    GgufArchitecture("gemma3n", "gemma3n_text",
        names={"blk.{}.altup_correct_scale.weight": "model.layers.{}.altup.correct_output_scale"},
        stacked={"altup_proj.weight": "model.altup_projections.{}.weight",
        "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight"},
        settings={"feed_forward_length": "", "altup.active_idx": "altup_active_idx",
        "altup.num_inputs": "altup_num_inputs", "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input", **_MAY_SLIDE}, optional=_FINAL_CAP,
        constants={"final_logit_softcapping": 30.0}, computed=("gemma3_rotations", "gemma3n")),

    GgufArchitecture("kimi-linear", "kimi_linear", names=_KIMI_NAMES, transforms=_DECAY,
        joined={**EXPERTS, "conv1d.weight": ("q_conv1d", "k_conv1d", "v_conv1d")}, composed=_OF_LATENTS,
        settings={"kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
        "attention.kv_lora_rank": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim", "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_token", "expert_shared_count": "num_shared_experts"},
        optional={"attention.q_lora_rank": "q_lora_rank", "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "num_expert_group", "expert_group_used_count": "topk_group"},
        constants={"q_lora_rank": None, "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
        "moe_renormalize": True}, computed=("by_sigmoid", "kimi_delta"),
        needs=("expert_feed_forward_length", "expert_gating_func")),
    GgufArchitecture("deepseek2", "deepseek_v3", names=_CHOICE, composed=_OF_LATENTS,
        computed=("deepseek", "without_heads_behind")),
    GgufArchitecture("minimax-m2", "minimax_m2",
        names={"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.e_score_correction_bias"},
        settings=_LOCAL_EXPERTS, computed=("by_sigmoid",), needs=_TURNED, rotates_in_part=True),
    GgufArchitecture("dots1", names=_CHOICE, constants={"sliding_window": None},
        computed=("by_sigmoid", "first_dense", "grouped_experts")),
    GgufArchitecture("ernie4_5-moe", "ernie4_5_moe",
        names={"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.moe_statics.e_score_correction_bias"},
        settings={"expert_count": "moe_num_experts", "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size", "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index"}, computed=("ernie_experts",)),
    GgufArchitecture("mistral3", "ministral3", transforms=_PAIRS, constants={"sliding_window": None},
        computed=("mistral3",)),
    GgufArchitecture("mimo2", "mimo_v2_flash",
        names={**_CHOICE, "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks"},
        computed=("by_sigmoid", "mimo2")),
    # What transformers has of GLM 4.5 computes the same.
    GgufArchitecture("bailingmoe2", "glm4_moe", names={**_CHOICE, **_QKV_NAMES}, composed=_QKV_PARTS,
        constants={"use_qk_norm": True}, computed=("by_sigmoid", "first_dense", "grouped_experts",
        "without_heads_behind"), needs=_TURNED, rotates_in_part=True),
    GgufArchitecture("mistral4", composed=_OF_LATENTS, computed=("mistral4",)),

    # Each fourth layer sees all of the text, and turns nothing.
    GgufArchitecture("cohere2", settings={**_LAYER_NORM_EPS, "logit_scale": "logit_scale",
        "attention.sliding_window": "sliding_window"}),
    GgufArchitecture("olmoe", settings=_MANY_EXPERTS, constants={"norm_topk_prob": False}),
    GgufArchitecture("phi2", "phi", composed=_QKV_PARTS, settings=_LAYER_NORM_EPS, needs=_TURNED, rotates_in_part=True),
    GgufArchitecture("phimoe", settings=_LOCAL_EXPERTS, optional=_MAY_SLIDE, computed=("phimoe",)),
    # Files do not say the window, which all StarCoder2 have.
    GgufArchitecture("starcoder2", settings={**_LAYER_NORM, "attention.layer_norm_epsilon": "norm_epsilon"},
        optional=_MAY_SLIDE, constants={"sliding_window": 4096}),
    GgufArchitecture("command-r", "cohere", settings={**_LAYER_NORM_EPS, "logit_scale": "logit_scale"},
        computed=("normed_heads",)),
    # Llama computes what these do.
    GgufArchitecture("exaone", "llama"),
    GgufArchitecture("internlm2", "llama", transforms=_PAIRS),
    GgufArchitecture("xverse", "llama", transforms=_PAIRS),
    GgufArchitecture("olmo", transforms=_PAIRS, settings=_LAYER_NORM, optional={"attention.clamp_kqv": "clip_qkv"}),
    GgufArchitecture("minicpm", "granite", transforms=_PAIRS, defaults=_LONG_BY_DEFAULT, computed=("minicpm",)),
    GgufArchitecture("minicpm3", settings={"attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim"}, optional={"attention.q_lora_rank": "q_lora_rank"},
        constants={"q_lora_rank": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        defaults=_LONG_BY_DEFAULT, computed=("minicpm3",)),
    GgufArchitecture("nemotron", transforms=_NORMS, settings={**_LAYER_NORM,
        "attention.layer_norm_epsilon": "norm_eps"}, needs=_TURNED, rotates_in_part=True),

    GgufArchitecture("gptneox", "gpt_neox", transforms=_GROUPS, settings={**_LAYER_NORM_EPS,
        "use_parallel_residual": "use_parallel_residual"}, constants={"attention_bias": True}, needs=_TURNED,
        rotates_in_part=True),
    GgufArchitecture("falcon", transforms=_GROUPS, settings={**_LAYER_NORM_EPSILON,
        "feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": "num_kv_heads",
        "attention.key_length": ""}, computed=("falcon",)),
    # What transformers has of Qwen 2 and StarCoder2 computes the same.
    GgufArchitecture("qwen", "qwen2", names=_QKV_NAMES, composed=_QKV_PARTS, settings={"feed_forward_length": ""},
        computed=("qwen",)),
    GgufArchitecture("codeshell", "starcoder2", names=_QKV_NAMES, composed=_QKV_PARTS, settings={**_LAYER_NORM,
        "attention.layer_norm_epsilon": "norm_epsilon"}, constants={"sliding_window": None}),
    GgufArchitecture("bloom", names={"token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
        "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
        "blk.{}.ffn_norm.weight": "transformer.h.{}.post_attention_layernorm.weight",
        "blk.{}.ffn_norm.bias": "transformer.h.{}.post_attention_layernorm.bias"}, transforms=_GROUPS,
        settings={**_LAYER_NORM_EPSILON, "feed_forward_length": ""}),

    GgufArchitecture("gpt2", settings={**_LAYER_NORM_EPSILON, "feed_forward_length": "n_inner"},
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
    GgufArchitecture("starcoder", "gpt_bigcode", settings={**_LAYER_NORM_EPSILON, "feed_forward_length": "n_inner"},
        constants={"multi_query": True}),
    GgufArchitecture("mpt", settings={**_LAYER_NORM_EPSILON, "feed_forward_length": "",
        "attention.max_alibi_bias": ""}, computed=("mpt",)),
    GgufArchitecture("stablelm", stacked={f"blk.{{}}.attn_{of}_norm.weight":
        f"model.layers.{{}}.self_attn.{of}_layernorm.norms.{{}}.weight" for of in "qk"}, settings=_LAYER_NORM_EPS,
        computed=("stablelm",), needs=_TURNED, rotates_in_part=True),

    GgufArchitecture("gemma-embedding", "gemma3_text", transforms=_NORMS, needs=_WINDOW, follow=_DENSE,
        optional=_MAY_SLIDE, constants={"use_bidirectional_attention": True},
        defaults={"query_pre_attn_scalar": "head_dim"}, computed=("gemma3_rotations", "windows_in_turn")),
    GgufArchitecture("bert", settings=_LAYER_NORM_EPS, computed=("learned_positions",),
        names=_class_names("pooler.dense")),
    GgufArchitecture("nomic-bert", "nomic_bert", names=_NORMS_BEHIND, composed=_QKV_PARTS, settings=_LAYER_NORM_EPS,
        computed=("segments",)),
    GgufArchitecture("modern-bert", "modernbert", computed=("modern_bert",),
        names=_class_names("head.dense"), settings={**_LAYER_NORM_EPS, "attention.layer_norm_epsilon": "norm_eps"},
        optional={"attention.sliding_window": "local_attention"}),
    GgufArchitecture("eurobert"),
    # Without the adapters for its tasks, which are files of their own
    GgufArchitecture("jina-bert-v3", "jina_embeddings_v3", settings=_LAYER_NORM_EPS, computed=("segments",),
        composed=_QKV_PARTS, names={**_NORMS_BEHIND, **{f"blk.{{}}.ffn_{file}.{end}": f"layers.{{}}.mlp.{model}.{end}"
        for end in ("weight", "bias") for file, model in (("up", "fc1"), ("down", "fc2"))}}),

    GgufArchitecture("gpt-oss", "gpt_oss", names=_OSS_NAMES,
        joined={**EXPERTS, "experts.gate_up_proj_bias": ("experts.gate_proj_bias", "experts.up_proj_bias")},
        settings={**_LOCAL_EXPERTS, "feed_forward_length": "", "expert_feed_forward_length": "intermediate_size",
        **_MAY_SLIDE}, computed=("gpt_oss",)),
    GgufArchitecture("llama4", "llama4_text", settings={"feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size", **_LOCAL_EXPERTS,
        "interleave_moe_layer_step": "interleave_moe_layer_step"}, computed=("llama4",)),

    GgufArchitecture("granitemoe", transforms=_PAIRS, names=_GRANITE_NAMES, joined=_GRANITE_JOINED,
        settings={**_GRANITE_SCALES, **_LOCAL_EXPERTS}, computed=("granite_experts",)),
    # Granite 4. Those with rotary positions are Bamba's.
    GgufArchitecture("granitehybrid", "granitemoehybrid", transforms={**_PAIRS, **_DECAY},
        names={**_GRANITE_DENSE, **_MAMBA_2_NAMES}, joined=_GRANITE_JOINED, settings={**_GRANITE_SCALES, **_MAMBA_2},
        constants={"num_local_experts": 0}, computed=("mamba_2", "mamba_layers", "granite_shared"),
        variants={"rope.scaling.finetuned": GgufArchitecture("granitehybrid", "bamba",
        transforms={**_PAIRS, **_DECAY}, names=_MAMBA_2_NAMES, settings=_MAMBA_2, computed=("mamba_2", "bamba"),
        needs=_TURNED),
        "expert_count": GgufArchitecture("granitehybrid", "granitemoehybrid", transforms={**_PAIRS, **_DECAY},
        names={**_GRANITE_NAMES, **_MAMBA_2_NAMES}, joined=_GRANITE_JOINED, settings={**_GRANITE_SCALES,
        **_LOCAL_EXPERTS, **_MAMBA_2}, computed=("mamba_2", "mamba_layers", "granite_shared"))}),
    *(GgufArchitecture(name, "nemotron_h", names=_NEMOTRON_H_NAMES, renamed=("model.layers.", "backbone.layers."),
        joined={f"experts.{side}_proj": (f"experts.{side}_proj",) for side in ("up", "down")},
        transforms={**_PAIRS, **_DECAY}, settings={**_LAYER_NORM_EPSILON, "feed_forward_length": "",
        "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads"}, optional={"moe_latent_size": "moe_latent_size"},
        computed=("nemotron_h",)) for name in ("nemotron_h", "nemotron_h_moe")),
    # Its files have all multipliers in the weights.
    GgufArchitecture("falcon-h1", "falcon_h1", names=_MAMBA_2_NAMES, transforms=_DECAY,
        settings={**_MAMBA_2, "ssm.inner_size": "mamba_d_ssm"}, constants={"mamba_norm_before_gate": False},
        computed=("mamba_2", "falcon_h1")),
    GgufArchitecture("mamba2", names={"blk.{}.ssm_dt.bias": "backbone.layers.{}.mixer.dt_bias"}, transforms=_DECAY,
        settings={**_MAMBA, "ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads"}, computed=("mamba2",)),
    GgufArchitecture("jamba", transforms=_DECAY, settings={"ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_dt_rank", **_MANY_EXPERTS},
        computed=("jamba",)),
    GgufArchitecture("mamba", transforms=_DECAY, settings={**_MAMBA, "ssm.time_step_rank": "time_step_rank"},
        computed=("mamba",)),

    GgufArchitecture("glm4moe", "glm4_moe", names=_CHOICE, computed=("by_sigmoid", "first_dense", "one_group",
        "without_heads_behind", "normed_heads"), needs=_TURNED, rotates_in_part=True),
    # Of GLM 4.1V, whose file has values that turn together half of what turns apart
    GgufArchitecture("glm4", computed=("without_heads_behind",), needs=_TURNED, rotates_in_part=True,
        variants={"rope.dimension_sections": GgufArchitecture("glm4", transforms=dict.fromkeys(("blk.*.attn_q.*",
        "blk.*.attn_k.*"), "turned_halves"), computed=("without_heads_behind",), needs=_TURNED, rotates_in_part=True)}),
    GgufArchitecture("chatglm", "glm", names=_QKV_NAMES, composed=_QKV_PARTS, computed=("biases_of_all",),
        needs=_TURNED, rotates_in_part=True),
    GgufArchitecture("hunyuan-dense", "hunyuan_v1_dense"),
    GgufArchitecture("hunyuan-moe", "hunyuan_v1_moe", settings={"expert_count": "num_experts",
        "expert_used_count": "moe_topk"}),
    # Text models beside images: a text turns its three positions alike, as if they were one.
    GgufArchitecture("qwen2vl", "qwen2"),
    GgufArchitecture("qwen3vl", "qwen3"),
    GgufArchitecture("qwen3vlmoe", "qwen3_moe", settings=_QWEN_EXPERTS, optional=_MAY_BE_WIDE,
        constants={"norm_topk_prob": True}),
    GgufArchitecture("glm-dsa", "glm_moe_dsa", names=_CHOICE, composed=_OF_LATENTS, computed=("indexed", "one_group")),
    GgufArchitecture("deepseek32", "deepseek_v32", names_of="glm-dsa", names=_CHOICE,
        composed=_OF_LATENTS, computed=("indexed",)),
    GgufArchitecture("afmoe", names={"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.expert_bias"},
        constants={"mup_enabled": True}, computed=("by_sigmoid", "afmoe")),
    GgufArchitecture("exaone-moe", "exaone_moe", names=_CHOICE, computed=("by_sigmoid", "exaone_moe")),
    GgufArchitecture("apertus", numbers={f"xielu.{of}": f"model.layers.{{}}.mlp.act_fn.{of}" for of in ("alpha_n",
        "alpha_p", "beta", "eps")}),
    GgufArchitecture("bailingmoe", "granitemoeshared", transforms=_PAIRS, joined=_GRANITE_JOINED,
        names={**_GRANITE_NAMES, "blk.{}.ffn_down_shexp.weight": _GRANITE_SHARED + "output_linear.weight"},
        computed=("bailing",)),
    GgufArchitecture("jais2", settings=_LAYER_NORM_EPS),
    GgufArchitecture("baichuan", "llama", transforms=_PAIRS, computed=("baichuan",)),
    GgufArchitecture("pangu-embedded", "llama"),
    GgufArchitecture("orion", "stablelm", settings=_LAYER_NORM_EPS, constants={"partial_rotary_factor": 1.0}),
    GgufArchitecture("bitnet", names={"blk.{}.attn_sub_norm.weight": "model.layers.{}.self_attn.attn_sub_norm.weight",
        "blk.{}.ffn_sub_norm.weight": "model.layers.{}.mlp.ffn_sub_norm.weight"}, constants={"hidden_act": "silu"}),
    GgufArchitecture("hunyuan_vl", "hunyuan_v1_dense"),
    GgufArchitecture("paddleocr", "llama"),
    GgufArchitecture("dbrx", composed={"mlp.w1": "gates_below", "mlp.v1": "ups_below", "mlp.w2": "downs_below"},
        settings={**_LAYER_NORM, "embedding_length": "d_model"}, computed=("dbrx",)),
    # Of which gguf has no table yet
    GgufArchitecture("hy_v3", names_of="dots1", computed=("by_sigmoid", "hy_v3"),
        names={"blk.{}.exp_probs_b": "model.layers.{}.mlp.e_score_correction_bias"}),
    GgufArchitecture("mellum", names_of="qwen3moe", settings=_QWEN_EXPERTS, optional=_MAY_BE_WIDE,
        constants={"norm_topk_prob": True}, computed=("mellum",)),
    GgufArchitecture("minimax-m3", "minimax_m3_vl_text", names_of="dots1", names={**_CHOICE, **{
        f"blk.{{}}.indexer.{of}.weight": f"model.layers.{{}}.self_attn.indexer.{of}.weight"
        for of in ("q_proj", "k_proj", "q_norm", "k_norm")}}, transforms=_NORMS,
        joined={**EXPERTS, **{f"{of}.gate_up_proj.weight": (f"{of}.gate_proj", f"{of}.up_proj")
        for of in ("mlp", "shared_experts")}}, settings={"feed_forward_length": "dense_intermediate_size",
        "rope.dimension_count": "rotary_dim"}, computed=("by_sigmoid", "minimax_m3"), rotates_in_part=True),
)
# fmt: on

GGUF = {row.name: row for row in _ROWS}  # by `general.architecture`


def row_of(metadata: Mapping[str, object]) -> GgufArchitecture | None:
    """That of the file that says this; None: there is none."""
    name = str(metadata.get("general.architecture"))
    row = GGUF.get(name)
    return row and next((other for key, other in row.variants.items() if metadata.get(f"{name}.{key}")), row)


def gguf_architecture(metadata: Mapping[str, object], tensors: Iterable[str] = ()) -> GgufArchitecture:
    """The row of the file that says this and has these tensors. Raises `ModelLoadError` where there is none."""
    if (row := row_of(metadata)) is not None:
        return row
    name = str(metadata.get("general.architecture"))
    raise ModelLoadError(
        f"The architecture {name[:_SHOWN]!r} is not served from GGUF files: {refusal(name, tensors, GGUF)}; use a "
        "safetensors directory, or choose another model."
    )


_SHOWN = 64  # characters of a name that a file says
