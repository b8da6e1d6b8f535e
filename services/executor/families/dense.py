"""Dense models with attention in every layer, most of them like Llama."""

from services.executor.families.family import LayerStyle, ModelFamily
from services.executor.families.plans import (
    COHERE_LIKE,
    FUSED_GATED,
    GLM_LIKE,
    LLAMA_LIKE,
    OLMO2_LIKE,
    QKV,
    SINKS,
    Style,
    plan,
    under,
)

FAMILIES = (
    ModelFamily("apertus | Apertus | Apertus 8B, 70B | q/k norms, xIELU without gate", trained=True),
    ModelFamily("arcee | Arcee | AFM 4.5B | squared ReLU without gate", trained=True),
    ModelFamily(
        "bitnet | BitNet | BitNet b1.58 2B (weights unpacked) | norms after attention and gate, squared ReLU",
        plan=plan(
            LLAMA_LIKE,
            {"self_attn.attn_sub_norm": Style.QUERY_WIDE_NORM, "mlp.ffn_sub_norm": Style.INNER_WIDE_NORM},
        ),
    ),
    ModelFamily(
        "cohere | Cohere | Command R, Aya 23 | parallel residual, norms per head, scaled logits",
        plan=COHERE_LIKE,
        trained=True,
    ),
    ModelFamily(
        "cohere2 | Cohere 2 | Command R7B, Command A | sliding window, layers without rotation", trained=True
    ),
    ModelFamily(
        "cohere_compass_text | Cohere Compass (text) | the text model of North Micro Vision | sliding window, layers "
        "without rotation"
    ),
    ModelFamily("cwm | CWM | Code World Model 32B | sliding window"),
    ModelFamily(
        "dots3_note | dots3 note | dots3 note (its text model alone) | latent attention, tokens chosen by an indexer"
    ),
    ModelFamily(
        "emu3 | Emu3 | Emu3 Chat (its text model alone) | untied head",
        also=("emu3_text_model",),
        plan=LLAMA_LIKE,
    ),
    ModelFamily("ernie4_5 | ERNIE 4.5 | ERNIE 4.5 0.3B | interleaved rotation", trained=True),
    ModelFamily(
        "exaone4 | EXAONE 4 | EXAONE 4.0 1.2B, 32B | sliding window, q/k norms, post norms", trained=True
    ),
    ModelFamily(
        "gemma | Gemma | Gemma 2B, 7B | one KV head, scaled embedding, tied head",
        lowered=LayerStyle(norm_offset=1.0),
        trained=True,
    ),
    ModelFamily(
        "gemma2 | Gemma 2 | Gemma 2 2B, 9B, 27B | soft caps on scores and logits, sliding window, post norms",
        lowered=LayerStyle(norm_offset=1.0, post_norms=True),
        trained=True,
    ),
    ModelFamily(
        "gemma3 | Gemma 3 | Gemma 3 4B, 12B, 27B (its text model alone) | sliding window, q/k norms, two rotations"
    ),
    ModelFamily(
        "gemma3_text | Gemma 3 (text) | Gemma 3 270M, 1B | sliding window, q/k norms, two rotations",
        lowered=LayerStyle(norm_offset=1.0, post_norms=True),
        embeds_both_ways=True,
        trained=True,
    ),
    ModelFamily("gemma3n | Gemma 3n | Gemma 3n E2B, E4B (their text model alone) | shared keys"),
    ModelFamily(
        "gemma3n_text | Gemma 3n (text) | Gemma 3n E2B, E4B | shared keys, sliding window, AltUp, per-layer "
        "embeddings, q/k/v norms",
        states="shared_keys",
        own_feed_forward="gemma3n",
    ),
    ModelFamily("gemma4 | Gemma 4 | Gemma 4 E2B to 31B, 26B-A4B (their text model alone) | shared keys"),
    ModelFamily(
        "gemma4_unified | Gemma 4 unified | Gemma 4 unified 12B (its text model alone) | shared keys"
    ),
    ModelFamily(
        "gemma4_unified_text | Gemma 4 unified (text) | Gemma 4 unified 12B | shared keys, sliding window, other heads"
        " in full layers",
        lowered=LayerStyle(post_norms=True, norms_values=True),
        states="shared_keys",
    ),
    ModelFamily(
        "glm | GLM | GLM-4 9B, GLM-Edge | fused gate/up, partial rotation, biases",
        plan=GLM_LIKE,
        trained=True,
    ),
    ModelFamily(
        "glm4 | GLM-4 | GLM-4-0414 9B, 32B | fused gate/up, partial rotation, post norms, biases",
        plan=GLM_LIKE,
        trained=True,
    ),
    ModelFamily(
        "granite | Granite | Granite 3 | scaled logits, residuals and embedding, biases",
        lowered=LayerStyle(scaled=True),
        trained=True,
    ),
    ModelFamily(
        "granite_swa | Granite SWA | Granite Swash 2B | attention sinks, sliding window, rotation by layer, scaled "
        "logits",
        plan=plan(LLAMA_LIKE, SINKS),
    ),
    ModelFamily("helium | Helium | Helium 1 2B | interleaved rotation"),
    ModelFamily(
        "hunyuan_v1_dense | Hunyuan dense | Hunyuan 0.5B to 7B | q/k norms after rotation, NTK rotation",
        plan=LLAMA_LIKE,
        trained=True,
    ),
    ModelFamily(
        "hyperclovax | HyperCLOVA X | HyperCLOVA X SEED Think 14B | scaled logits, residuals and embedding, post "
        "norms, biases"
    ),
    ModelFamily("internlm3 | InternLM 3 | InternLM 3 8B | biases"),
    ModelFamily("iquestcoder | IQuest-Coder | IQuest-Coder V1 40B | one KV head"),
    ModelFamily("jais2 | Jais 2 | Jais 2 8B, 70B | biases, layer norms"),
    ModelFamily(
        "llama | Llama | Llama 2, 3; SmolLM 1, 2; TinyLlama; Yi | tied and untied head, biases, one KV head, five "
        "heads, rotary scaling (Llama 3, dynamic)",
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "llama4 | Llama 4 | Llama 4 Scout, Maverick (their text model alone) | attention within chunks"
    ),
    ModelFamily(
        "ministral | Ministral | Ministral 8B | sliding window on some layers",
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "ministral3 | Ministral 3 | Ministral 3 (its text model alone) | sliding window, scaled queries",
        trained=True,
    ),
    ModelFamily(
        "mistral | Mistral | Mistral 7B, Nemo, Small (of 3.1 and later the text model alone) | sliding window",
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "modernbert-decoder | ModernBERT decoder | Ettin decoders | sliding window, two rotations, layer norms, head "
        "with a layer of its own",
        plan=plan(under("attn", {**QKV, "Wo": Style.OUTPUT}), {"mlp.Wi": Style.GATE_UP, "mlp.Wo": Style.ROW}),
    ),
    ModelFamily("nanochat | nanochat | nanochat | norms without weights, soft cap on logits"),
    ModelFamily(
        "nemotron | Nemotron | Minitron, Nemotron 4 | squared ReLU without gate, partial rotation",
        drops_step=True,
    ),
    ModelFamily("olmo | OLMo | OLMo 1B, 7B | norms without weights, clipped q/k/v", trained=True),
    ModelFamily(
        "olmo2 | OLMo 2 | OLMo 2 1B to 32B | norms over all heads, post norms, one KV head",
        plan=OLMO2_LIKE,
        trained=True,
    ),
    ModelFamily(
        "olmo3 | OLMo 3 | OLMo 3 7B, 32B | norms over all heads, sliding window",
        plan=OLMO2_LIKE,
        trained=True,
    ),
    ModelFamily(
        "phi | Phi | Phi 1, 1.5, 2 | parallel residual, biases, q/k norms, head with bias", trained=True
    ),
    ModelFamily(
        "phi3 | Phi-3 | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | fused q/k/v and gate/up, sliding window, LongRoPE",
        plan=plan(
            {"self_attn.qkv_proj": Style.QKV_BLOCKS, "self_attn.o_proj": Style.OUTPUT},
            under("mlp", FUSED_GATED),
        ),
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "qwen2 | Qwen 2 | Qwen 2, 2.5; DeepSeek R1 Distill Qwen | biases on q/k/v, untied head",
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "qwen3 | Qwen 3 | Qwen 3 0.6B to 32B | q/k norms, biases, one KV head",
        lowered=LayerStyle(),
        trained=True,
    ),
    ModelFamily(
        "qwen3_5 | Qwen 3.5 | Qwen 3.5 0.8B to 27B (its text model alone) | gated delta rule, gated attention, q/k "
        "norms, partial rotation"
    ),
    ModelFamily("seed_oss | Seed-OSS | Seed-OSS 36B | biases", lowered=LayerStyle(), trained=True),
    ModelFamily(
        "smollm3 | SmolLM3 | SmolLM3 3B | layers without rotation", lowered=LayerStyle(), trained=True
    ),
    ModelFamily(
        "stablelm | StableLM | StableLM 3B, Zephyr, 2 1.6B | norms per head, partial rotation, biases",
        plan=plan(
            LLAMA_LIKE,
            {
                "self_attn.q_layernorm": Style.QUERY_HEAD_NORM,
                "self_attn.k_layernorm": Style.KEY_HEAD_NORM,
            },
        ),
        drops_step=True,
    ),
    ModelFamily(
        "starcoder2 | StarCoder2 | StarCoder2 3B, 7B, 15B | sliding window, biases, layer norms", trained=True
    ),
    ModelFamily("vaultgemma | VaultGemma | VaultGemma 1B | soft caps on scores and logits, sliding window"),
)
