"""Models with latent attention, of all tokens or of those that an indexer chooses."""

from services.executor.families.family import LayerStyle, ModelFamily
from services.executor.families.plans import (
    EXPERTS,
    GATED,
    INDEXED,
    LATENT,
    LATENT_DENSE,
    LATENT_MOE,
    SINKS,
    WHOLE_QUERIES,
    Style,
    plan,
    under,
)

# fmt: off
FAMILIES = (
    ModelFamily("axk1 | A.X K1 | A.X K1 | latent attention, MoE, shared expert, grouped router",
        plan=LATENT_MOE, lowered=LayerStyle(scores="sigmoid"), states="latent"),
    ModelFamily("axk2 | A.X K2 | A.X K2, K2 Light | latent attention, tokens chosen by an indexer, gated attention, "
        "gated norms, MoE, shared expert",
        plan=plan({name: style for name, style in INDEXED.items() if name != "self_attn.q_b_proj"},
        {"self_attn.q_gate_proj": Style.GATED_QUERY}), states="indexed"),
    ModelFamily("deepseek_v2 | DeepSeek V2 | DeepSeek V2, V2 Lite, Coder V2 | latent attention, MoE, shared expert, "
        "grouped router, YaRN",
        plan=plan(LATENT_MOE, WHOLE_QUERIES), lowered=LayerStyle(interleaved=True), states="latent"),
    ModelFamily("deepseek_v3 | DeepSeek V3 | DeepSeek V3, V3.1, R1; Moonlight; Kimi K2 (of K2.5 the text model "
        "alone) | latent attention, MoE, shared expert, grouped router, YaRN",
        plan=plan(LATENT_MOE, WHOLE_QUERIES), lowered=LayerStyle(scores="sigmoid"), states="latent"),
    ModelFamily("deepseek_v32 | DeepSeek V3.2 | DeepSeek V3.2, V3.2 Exp | latent attention, tokens chosen by an "
        "indexer, MoE, shared expert, grouped router, YaRN",
        plan=INDEXED, states="indexed"),
    ModelFamily("dots3_note_text | dots3 note (text) | dots3 note | latent attention, tokens chosen by an indexer, "
        "sliding window with heads of its own, gated attention, MoE, shared expert",
        plan=plan(INDEXED, {"self_attn.g_proj": Style.QUERY, "self_attn.k_rope_only_layernorm": Style.WHOLE}),
        states="indexed", indexer_interleaved=True),
    ModelFamily("glm4_moe_lite | GLM-4 MoE Lite | GLM-4.7 Flash | latent attention, MoE, shared expert",
        plan=plan(LATENT_MOE, WHOLE_QUERIES), lowered=LayerStyle(scores="sigmoid"), states="latent"),
    ModelFamily("glm_moe_dsa | GLM MoE DSA | GLM-5, 5.1 | latent attention, tokens chosen by an indexer or by that "
        "of a layer before, MoE, shared expert",
        plan=INDEXED, states="indexed", indexer_interleaved=True),
    ModelFamily("hy_v4 | Hunyuan 4 | Hy4 | latent attention, tokens chosen by an indexer or by that of a layer "
        "before, attention sinks, gated attention, hyper-connections, MoE, shared expert",
        plan=plan(INDEXED, {"self_attn.gate_proj": Style.QUERY}, SINKS), states="indexed", indexer_rotates_last=True),
    ModelFamily("longcat_flash | LongCat Flash | LongCat Flash | latent attention twice a layer, MoE beside dense "
        "layers, identity experts, scaled latents",
        plan=plan(under("self_attn.*", LATENT), under("mlps.*", GATED), under("mlp", EXPERTS)), states="latent"),
    ModelFamily("minicpm3 | MiniCPM 3 | MiniCPM3 4B | latent attention, scaled logits, residuals and embedding",
        plan=plan(LATENT_DENSE, WHOLE_QUERIES), lowered=LayerStyle(scaled=True), states="latent"),
    ModelFamily("mistral4 | Mistral 4 | Mistral 4 (its text model alone) | latent attention, MoE, shared expert, "
        "scaled queries, YaRN",
        listed_elsewhere=True, plan=plan(LATENT_MOE, WHOLE_QUERIES), lowered=LayerStyle(), states="latent"),
    ModelFamily("youtu | Youtu | Youtu LLM 2B | latent attention, two forms of rotation",
        plan=plan(LATENT_DENSE, WHOLE_QUERIES), lowered=LayerStyle(), states="latent"),
)
