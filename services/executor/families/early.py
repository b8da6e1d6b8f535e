"""The first generation: learned positions or ALiBi, projections fused in ways of their own."""

from services.executor.families.family import ModelFamily
from services.executor.families.plans import (
    GPT2_LIKE,
    GPT2_MLP,
    GPTJ_MLP,
    LLAMA_LIKE,
    OPT_LIKE,
    QKV_OUT,
    Style,
    neox_like,
    plan,
    under,
)

# fmt: off
FAMILIES = (
    ModelFamily("biogpt | BioGPT | BioGPT, BioGPT Large | learned positions, scaled embedding, biases, five heads",
        plan=OPT_LIKE),
    ModelFamily("bloom | BLOOM | BLOOM, BLOOMZ | ALiBi, fused q/k/v by head, biases, five heads",
        plan=neox_like("self_attention"), own_attention="bloom"),
    ModelFamily("codegen | CodeGen | CodeGen 350M to 16B | fused q/v/k by fourths, interleaved partial rotation, "
        "parallel residual",
        plan=plan({"attn.qkv_proj": Style.QVK_BY_FOURTH, "attn.out_proj": Style.OUTPUT}, GPTJ_MLP),
        own_attention="codegen"),
    ModelFamily("ctrl | CTRL | CTRL 1.6B | sinusoidal positions, biases, head with bias, five heads",
        plan=plan(under("multi_head_attention", {"Wq": Style.QUERY, "Wk": Style.KEY_VALUE, "Wv": Style.KEY_VALUE,
        "dense": Style.OUTPUT}), {"ffn.0": Style.COLUMN, "ffn.2": Style.ROW})),
    ModelFamily("diffllama | DiffLlama | DiffLlama 0.3B | differential attention, biases",
        plan=plan(LLAMA_LIKE, {"self_attn.q_proj": Style.QUERY_PAIRS, "self_attn.k_proj": Style.KEY_VALUE_PAIRS,
        "self_attn.v_proj": Style.KEY_VALUE_PAIRS}), own_attention="diffllama", paired_heads=True),
    ModelFamily("doge | Doge | Doge 20M to 320M (no mixtures) | biases of keys, q/k norms, weighted residuals",
        plan=plan(LLAMA_LIKE, {"self_attn.A": Style.KEY_HEAD_SCALARS, "self_attn.dt_proj": Style.KEY_VALUE_INPUT}),
        states="biased_keys", own_attention="doge", window_in_mask=True,
        unserved={"is_moe": "chooses a token's experts by other tokens too"}),
    ModelFamily("falcon | Falcon | Falcon 7B, 40B, 180B, RW | fused q/k/v by group, multi-query, ALiBi, parallel "
        "residual",
        plan=neox_like("self_attention"), own_attention="falcon"),
    ModelFamily("gpt-sw3 | GPT-SW3 | GPT-SW3 126M to 40B | as GPT-2"),
    ModelFamily("gpt2 | GPT-2 | GPT-2, DistilGPT2 | Conv1D, fused q/k/v, learned positions, five heads",
        plan=GPT2_LIKE),
    ModelFamily("gpt_bigcode | GPTBigCode | StarCoder, SantaCoder | multi-query, fused q/k/v, learned positions",
        plan=plan({"attn.c_attn": Style.QKV_BY_GROUP, "attn.c_proj": Style.OUTPUT}, GPT2_MLP)),
    ModelFamily("gpt_neo | GPT-Neo | GPT-Neo 125M to 2.7B | local attention, unscaled scores, learned positions, "
        "five heads",
        plan=plan(under("attn.attention", QKV_OUT), GPT2_MLP), own_attention="gpt_neo"),
    ModelFamily("gpt_neox | GPT-NeoX | Pythia, GPT-NeoX 20B | fused q/k/v by head, parallel residual, partial "
        "rotation, five heads",
        plan=neox_like("attention")),
    ModelFamily("gpt_neox_japanese | GPT-NeoX Japanese | GPT-NeoX Japanese 2.7B | fused q/k/v by head, partial "
        "rotation, five heads",
        plan=neox_like("attention"), own_attention="gpt_neox_japanese"),
    ModelFamily("gptj | GPT-J | GPT-J 6B | interleaved partial rotation, parallel residual, five heads",
        plan=plan(under("attn", QKV_OUT), GPTJ_MLP), own_attention="gptj"),
    ModelFamily("mpt | MPT | MPT 7B, 30B | ALiBi, fused q/k/v, clipped q/k/v, five heads",
        plan={"attn.Wqkv": Style.QKV_BLOCKS, "attn.out_proj": Style.OUTPUT, "ffn.up_proj": Style.COLUMN,
        "ffn.down_proj": Style.ROW}, own_attention="mpt", with_mask=True,
        unserved={"logit_scale": "scales its logits, which transformers does not compute"}),
    ModelFamily("openai-gpt | GPT | the first GPT | Conv1D, fused q/k/v, learned positions, five heads",
        plan=GPT2_LIKE, own_attention="openai_gpt", without_cache=True),
    ModelFamily("opt | OPT | OPT 125M to 66B | learned positions, biases, projected embedding, five heads",
        plan=OPT_LIKE),
    ModelFamily("persimmon | Persimmon | Persimmon 8B | fused q/k/v by head, q/k norms, partial rotation",
        plan=neox_like("self_attn")),
    ModelFamily("phi4_multimodal | Phi-4 multimodal | Phi-4 multimodal (its text model alone) | fused q/k/v and "
        "gate/up, LongRoPE"),
    ModelFamily("xglm | XGLM | XGLM 564M to 7.5B | sinusoidal positions, biases, scaled embedding, five heads",
        plan=OPT_LIKE, own_attention="unrotated"),
)
