"""Mixtures of experts with attention in every layer."""

from services.executor.families.family import LayerStyle, ModelFamily
from services.executor.families.plans import (
    EXPERTS,
    FUSED_GATED,
    GATED,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    LLAMA_LIKE,
    MOE,
    OLMOE_LIKE,
    SINKS,
    Style,
    plan,
    under,
)

FAMILIES = (
    ModelFamily(
        "afmoe | AFMoE | Trinity Nano, Mini | MoE, shared expert, gated attention, sliding window, q/k norms",
        plan=plan(
            MOE,
            {"self_attn.gate_proj": Style.QUERY},
            under("mlp", GATED),
            under("mlp.shared_experts", GATED),
        ),
    ),
    ModelFamily(
        "aria_text | Aria (text) | Aria's text model | MoE, shared expert",
        plan=plan(MOE, under("mlp.shared_experts", GATED)),
    ),
    ModelFamily(
        "beam | Beam | Beam 501B-A23B | MoE, gated attention, sliding window, q/k norms, layers without rotation",
        plan=plan(
            MOE,
            {"self_attn.gate_proj": Style.QUERY, "self_attn.gate_bias": Style.QUERY_HEAD_SCALARS},
            under("mlp", GATED),
        ),
    ),
    ModelFamily(
        "cohere2_moe | Cohere 2 MoE | Command A+ | MoE, averaged shared expert, sliding window, layers without "
        "rotation",
        plan=plan(MOE, under("mlp", GATED), under("mlp.shared_experts", GATED)),
    ),
    ModelFamily(
        "dbrx | DBRX | DBRX 132B-A36B | MoE, fused q/k/v, clipped q/k/v",
        plan=plan(
            {"norm_attn_norm.attn.Wqkv": Style.QKV_BLOCKS, "norm_attn_norm.attn.out_proj": Style.OUTPUT},
            under("ffn", EXPERTS),
        ),
    ),
    ModelFamily(
        "dots1 | dots.llm1 | dots.llm1 | MoE, shared expert, sliding window, q/k norms",
        lowered=LayerStyle(scores="sigmoid"),
    ),
    ModelFamily(
        "ernie4_5_moe | ERNIE 4.5 MoE | ERNIE 4.5 21B-A3B | MoE, shared expert",
        lowered=LayerStyle(interleaved=True),
    ),
    ModelFamily(
        "exaone_moe | EXAONE MoE | K-EXAONE | MoE, shared expert, sliding window, q/k norms",
        plan=plan(MOE, under("mlp", GATED), under("mlp.shared_experts", GATED)),
        lowered=LayerStyle(scores="sigmoid", turns_windows_alone=True),
    ),
    ModelFamily(
        "flex_olmo | FlexOlmo | FlexOlmo 7x7B | MoE, norms over all heads",
        plan=OLMOE_LIKE,
        lowered=LayerStyle(wide_norms=True, last_norms=True),
    ),
    ModelFamily(
        "flint | Flint | Flint | MoE, shared expert, attention sinks, sliding window, layers without rotation",
        plan=plan(MOE, SINKS, under("mlp", GATED), under("mlp.shared_expert", GATED)),
    ),
    ModelFamily(
        "gemma4_text | Gemma 4 (text) | Gemma 4 E2B to 31B, 26B-A4B | shared keys, sliding window, other heads in full"
        " layers, per-layer embeddings, MoE",
        plan=plan(
            LLAMA_LIKE,
            EXPERTS,
            under("self_attn", {"q_norm": Style.WHOLE, "k_norm": Style.WHOLE}),
            {"per_layer_input_gate": Style.WHOLE_LINEAR, "per_layer_projection": Style.WHOLE_LINEAR},
        ),
        lowered=LayerStyle(post_norms=True, norms_values=True),
        states="shared_keys",
    ),
    ModelFamily(
        "glm4_moe | GLM-4 MoE | GLM-4.5, 4.6 | MoE, shared expert, q/k norms, biases",
        lowered=LayerStyle(scores="sigmoid"),
    ),
    ModelFamily(
        "gpt_oss | GPT-OSS | gpt-oss (weights in bf16) | MoE, attention sinks, sliding window, YaRN",
        plan=plan(MOE, SINKS),
        lowered=LayerStyle(),
    ),
    ModelFamily(
        "granitemoe | Granite MoE | Granite 3 1B-A400M | MoE, scaled scores",
        plan=GRANITE_MOE,
        lowered=LayerStyle(scaled=True),
    ),
    ModelFamily(
        "granitemoe_swa | Granite MoE SWA | Granite Swash 3B-A600M | MoE, fused shared expert, attention sinks, "
        "sliding window",
        plan=plan(GRANITE_MOE_SHARED, SINKS),
    ),
    ModelFamily(
        "granitemoeshared | Granite MoE shared | Granite 3 MoE shared | MoE, fused shared expert",
        plan=GRANITE_MOE_SHARED,
        lowered=LayerStyle(scaled=True),
    ),
    ModelFamily(
        "hunyuan_v1_moe | Hunyuan MoE | Hunyuan A13B | MoE, shared expert, q/k norms",
        plan=plan(MOE, under("mlp.shared_mlp", GATED)),
        lowered=LayerStyle(norms_turned=True),
    ),
    ModelFamily(
        "hy_v3 | Hunyuan 3 | Hy3 | MoE, shared expert, q/k norms, biases",
        lowered=LayerStyle(scores="sigmoid"),
    ),
    ModelFamily(
        "jetmoe | JetMoE | JetMoE 8B | MoE, experts that make queries of shared keys",
        plan={
            "self_attention.kv_proj": Style.KEYS_VALUES,
            "self_attention.experts": Style.EXPERT_STACKS,
            "self_attention.experts.router.layer": Style.WHOLE,
            "mlp": Style.EXPERT_STACKS,
        },
        own_attention="jetmoe",
    ),
    ModelFamily("kolibri1 | Kolibri | Kolibri 1 | MoE, shared expert, sliding window, q/k norms, post norms"),
    ModelFamily(
        "laguna | Laguna | Laguna XS | MoE, shared expert, gated attention, sliding window, q/k norms, two partial "
        "rotations, query heads per layer",
        plan=plan(
            MOE,
            {"self_attn.g_proj": Style.QUERY},
            under("mlp", GATED),
            under("mlp.shared_experts", GATED),
        ),
        heads_by_layer="listed",
    ),
    ModelFamily(
        "llama4_text | Llama 4 (text) | Llama 4 Scout, Maverick | attention within chunks, MoE, shared expert, layers "
        "without rotation, scaled queries",
        states="chunked",
        own_feed_forward="llama4",
    ),
    ModelFamily(
        "mellum | Mellum | Mellum 2 | MoE, sliding window, q/k norms, two rotations, dense layers between",
        lowered=LayerStyle(),
    ),
    ModelFamily(
        "mimo_v2_flash | MiMo V2 Flash | MiMo V2 Flash | MoE, attention sinks, sliding window, KV heads per layer, "
        "values narrower than keys, two partial rotations",
        plan=plan(MOE, SINKS, under("mlp", GATED)),
        heads_by_layer="wider_windows",
    ),
    ModelFamily(
        "minimax_m2 | MiniMax M2 | MiniMax M2 | MoE, norms over all heads, partial rotation",
        plan=OLMOE_LIKE,
        lowered=LayerStyle(scores="sigmoid", wide_norms=True),
    ),
    ModelFamily(
        "minimax_m3_vl_text | MiniMax M3 (text) | MiniMax M3 (its text model alone) | blocks of keys chosen by an "
        "indexer, MoE, clamped activations, shared expert, q/k norms, partial rotation",
        plan=plan(
            MOE,
            {"self_attn.indexer.*": Style.WHOLE},
            under("mlp", FUSED_GATED),
            under("mlp.shared_experts", FUSED_GATED),
        ),
        states="chosen_blocks",
    ),
    ModelFamily("mixtral | Mixtral | Mixtral 8x7B, 8x22B | MoE, sliding window", lowered=LayerStyle()),
    ModelFamily(
        "olmoe | OLMoE | OLMoE 1B-7B | MoE, norms over all heads, one KV head",
        plan=OLMOE_LIKE,
        lowered=LayerStyle(wide_norms=True),
    ),
    ModelFamily(
        "phimoe | Phi-MoE | Phi-3.5-MoE | MoE, sliding window, biases, head with bias",
        plan=MOE,
        window_in_mask=True,
    ),
    ModelFamily(
        "qwen2_moe | Qwen 2 MoE | Qwen1.5-MoE, Qwen2 57B-A14B | MoE, gated shared expert",
        plan=plan(MOE, under("mlp", GATED), under("mlp.shared_expert", GATED)),
        lowered=LayerStyle(),
    ),
    ModelFamily(
        "qwen3_5_moe | Qwen 3.5 MoE | Qwen 3.5 35B-A3B, 122B-A10B, 397B-A17B (its text model alone) | MoE, gated "
        "shared expert, gated delta rule, gated attention"
    ),
    ModelFamily(
        "qwen3_moe | Qwen 3 MoE | Qwen 3 30B-A3B, 235B | MoE, q/k norms, dense layers between",
        lowered=LayerStyle(),
    ),
    ModelFamily(
        "qwen4_exp | Qwen 4 experimental | Qwen 4 Exp (its text model alone) | MoE, gated shared expert, gated delta "
        "rule, gated attention, blocks of keys chosen by an indexer"
    ),
    ModelFamily(
        "solar_open | Solar Open | Solar Open 100B | MoE, shared expert",
        plan=plan(MOE, under("mlp.shared_experts", GATED)),
        lowered=LayerStyle(scores="sigmoid"),
    ),
)
