"""Models that keep recurrent state, in all layers or between such with attention."""

from services.executor.families.family import MAMBA, LayerStyle, ModelFamily
from services.executor.families.plans import (
    EXPERTS,
    FUSED_GATED,
    GATED,
    GATED_ATTENTION,
    GRANITE_MOE_SHARED,
    HYBRID,
    LATENT_MOE,
    OLMO2_LIKE,
    QKV_OUT,
    QKVO,
    QWEN3_5_MOE,
    W123,
    WHOLE_QUERIES,
    Style,
    plan,
    under,
)

# fmt: off
FAMILIES = (
    ModelFamily("bailing_hybrid | Bailing hybrid | Ling 3.0 | Kimi's delta attention, latent attention with a gate "
        "for each head, MoE, shared expert, grouped router",
        plan={**{name: style for name, style in LATENT_MOE.items() if ".q_" not in name}, **WHOLE_QUERIES,
        "self_attn.g_proj": Style.QUERY}, states="kimi_delta", recurrent_modules=("self_attn",)),
    ModelFamily("bamba | Bamba | Bamba 9B | Mamba 2, partial rotation",
        plan=HYBRID, states="state_space", state_sizes=MAMBA, recurrent_modules=("mamba",)),
    ModelFamily("deepseek_v4 | DeepSeek V4 | DeepSeek V4 Flash, V4 Pro | compressed attention: a sliding window, and"
        " lines of several tokens of which an indexer chooses; attention sinks, hyper-connections, MoE, shared "
        "expert, experts by token",
        plan=plan(under("mlp", EXPERTS), under("mlp.shared_experts", GATED)), states="compressed",
        recurrent_modules=("self_attn",)),
    ModelFamily("falcon_h1 | Falcon H1 | Falcon H1 0.5B to 34B | Mamba 2 beside attention in each layer, scaled "
        "inputs and outputs",
        plan=HYBRID, states="state_space", state_sizes=MAMBA, recurrent_modules=("mamba",), layer_types=("hybrid",)),
    ModelFamily("falcon_mamba | Falcon Mamba | Falcon Mamba 7B | Mamba 1 with norms of what its scan is made of",
        plan={}, states="selective_scan", recurrent_modules=("mixer",), state_heads="intermediate_size"),
    ModelFamily("granitemoehybrid | Granite 4 | Granite 4.0 Micro, H Micro, H Tiny, H Small | Mamba 2, MoE, fused "
        "shared expert, scaled scores, layers without rotation",
        plan=GRANITE_MOE_SHARED, lowered=LayerStyle(scaled=True), states="state_space", state_sizes=MAMBA,
        recurrent_modules=("mamba",)),
    ModelFamily("jamba | Jamba | Jamba v0.1, 1.5, 1.6, 1.7, Reasoning 3B | Mamba 1, MoE, layers without rotation, "
        "dense layers between",
        plan=plan(under("self_attn", QKVO), under("feed_forward", GATED), under("feed_forward", EXPERTS)),
        states="selective_scan", recurrent_modules=("mamba",)),
    ModelFamily("kimi_linear | Kimi Linear | Kimi Linear 48B-A3B | Kimi's delta attention, latent attention without "
        "rotation, MoE, shared expert",
        plan=plan(LATENT_MOE, WHOLE_QUERIES), states="kimi_delta", recurrent_modules=("self_attn",),
        mixer="factored_kimi_delta"),
    ModelFamily("lfm2 | LFM2 | LFM2 350M to 2.6B | short convolutions, q/k norms",
        plan=plan(under("self_attn", QKV_OUT), under("feed_forward", W123)), states="short_convolution",
        recurrent_modules=("conv",)),
    ModelFamily("lfm2_moe | LFM2 MoE | LFM2 8B-A1B, 24B-A2B | MoE, short convolutions, q/k norms, corrected router, "
        "dense layers between",
        plan=plan(under("self_attn", QKV_OUT), under("feed_forward", W123), under("feed_forward", EXPERTS)),
        states="short_convolution", recurrent_modules=("conv",)),
    ModelFamily("lfm3 | LFM3 | LFM3 1.7B | short convolutions, sliding window, gated attention, q/k norms, two "
        "rotations, post norms",
        plan=plan(under("self_attn", {**QKVO, "g_proj": Style.QUERY}), under("feed_forward", W123)),
        states="short_convolution", recurrent_modules=("conv",)),
    ModelFamily("mamba | Mamba | Mamba 130M to 2.8B | Mamba 1",
        plan={}, states="selective_scan", recurrent_modules=("mixer",), state_heads="intermediate_size"),
    ModelFamily("mamba2 | Mamba 2 | Mamba 2 130M to 2.7B, Codestral Mamba | Mamba 2, without attention",
        plan={}, states="state_space", state_sizes=("num_heads", "n_groups", "head_dim", "state_size", "conv_kernel"),
        recurrent_modules=("mixer",), state_heads="num_heads"),
    ModelFamily("minimax | MiniMax | MiniMax Text 01, M1 | MoE, lightning attention, scaled residuals",
        states="lightning", recurrent_modules=("self_attn",)),
    ModelFamily("nemotron_h | Nemotron H | Nemotron H 8B to 56B, Nano 2, Nemotron 3 Nano and Super | Mamba 2, layers"
        " of a feed-forward alone, MoE of narrowed inputs, shared expert, grouped router, squared ReLU without "
        "gate, no rotation",
        plan=plan(under("mixer", {**QKVO, "up_proj": Style.COLUMN, "down_proj": Style.ROW, **EXPERTS}),
        under("mixer.shared_experts", {"up_proj": Style.COLUMN, "down_proj": Style.ROW})), states="state_space",
        state_sizes=("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
        recurrent_modules=("mixer",), layer_types=("linear_attention", "mlp", "moe")),
    ModelFamily("olmo_hybrid | OLMo Hybrid | OLMo Hybrid 7B | gated delta rule, norms over all heads, layers without"
        " rotation",
        plan=OLMO2_LIKE, states="gated_delta", recurrent_modules=("linear_attn",), mixer="separate_gated_delta"),
    ModelFamily("qwen3_5_moe_text | Qwen 3.5 MoE (text) | Qwen 3.5 MoE, its text model | MoE, gated shared expert, "
        "gated delta rule, gated attention",
        plan=QWEN3_5_MOE, lowered=LayerStyle(norm_offset=1.0, gated=True), states="gated_delta",
        recurrent_modules=("linear_attn",)),
    ModelFamily("qwen3_5_text | Qwen 3.5 (text) | Qwen 3.5, its text model | gated delta rule, gated attention, q/k "
        "norms, partial rotation",
        plan=plan(under("self_attn", GATED_ATTENTION), under("mlp", GATED)), lowered=LayerStyle(norm_offset=1.0,
        gated=True), states="gated_delta", recurrent_modules=("linear_attn",)),
    ModelFamily("qwen3_next | Qwen 3 Next | Qwen 3 Next 80B-A3B | MoE, gated shared expert, gated delta rule, gated "
        "attention, dense layers between",
        plan=plan(QWEN3_5_MOE, under("mlp", GATED)), lowered=LayerStyle(norm_offset=1.0, gated=True),
        states="gated_delta", recurrent_modules=("linear_attn",), mixer="grouped_gated_delta"),
    ModelFamily("qwen4_exp_text | Qwen 4 experimental (text) | Qwen 4 Exp, its text model | MoE, gated shared "
        "expert, gated delta rule, gated attention, blocks of keys chosen by an indexer, embeddings of several "
        "tokens, hyper-connections",
        plan=plan(QWEN3_5_MOE, {"self_attn.indexer.*": Style.WHOLE}), states="gated_delta_beside_ngrams",
        recurrent_modules=("linear_attn", "ple")),
    ModelFamily("recurrent_gemma | RecurrentGemma | RecurrentGemma 2B, 9B | RG-LRU with gates by head, sliding "
        "window, partial rotation, soft cap on logits",
        plan=plan(under("temporal_block", QKVO), under("mlp_block", GATED)), states="gated_recurrence",
        recurrent_modules=("temporal_block",), unlimited=True),
    ModelFamily("rwkv | RWKV 4 | RWKV-4 169M to 14B | RWKV, hidden states that are scaled every few layers",
        plan={}, states="rwkv", recurrent_modules=("attention", "feed_forward"), state_heads="attention_hidden_size"),
    ModelFamily("xlstm | xLSTM | xLSTM 7B | mLSTM: a matrix memory for each head",
        plan=under("ffn", {"proj_up_gate": Style.COLUMN, "proj_up": Style.COLUMN, "proj_down": Style.ROW}),
        states="matrix_memory", recurrent_modules=("mlstm_layer",), state_heads="num_heads",
        unserved={"weight_mode": "has its projections in one weight, which is not split over ranks"},
        authors_kernels="_kernel"),
    ModelFamily("zamba | Zamba | Zamba 7B | Mamba 1 by heads, a block of attention and feed-forward that several "
        "layers share, without rotation",
        plan=plan(under("shared_transf.self_attn", QKVO), under("shared_transf.feed_forward", GATED),
        {"linear": Style.ROW_OF_WHOLE}), states="selective_scan", recurrent_modules=("mamba", "mamba_decoder.mamba"),
        mixer="selective_scan_by_heads", layer_types=("hybrid", "linear_attention")),
    ModelFamily("zamba2 | Zamba 2 | Zamba 2 1.2B, 2.7B, 7B | Mamba 2, blocks of attention and feed-forward that "
        "several layers share, with an adapter for each call",
        plan=plan(under("shared_transformer.self_attn", QKVO), under("shared_transformer.self_attn",
        {"linear_*_adapter_list.*.0": Style.WHOLE, "linear_q_adapter_list.*.1": Style.QUERY_ADAPTER,
        "linear_k_adapter_list.*.1": Style.KEY_VALUE_ADAPTER, "linear_v_adapter_list.*.1": Style.KEY_VALUE_ADAPTER}),
        under("shared_transformer.feed_forward", FUSED_GATED),
        {"shared_transformer.feed_forward.gate_up_proj_adapter_list.*.1": Style.GATE_UP,
        "linear": Style.ROW_OF_WHOLE}), states="state_space", state_sizes=("n_mamba_heads", "mamba_ngroups",
        "mamba_headdim", "mamba_d_state", "mamba_d_conv"), recurrent_modules=("mamba", "mamba_decoder.mamba"),
        layer_types=("hybrid", "linear_attention")),
    ModelFamily("zaya | ZAYA | ZAYA1 8B | convolutions over queries and keys, delayed values, MoE with a router of "
        "several layers",
        plan=plan({"self_attn.o_proj": Style.OUTPUT, "self_attn.qk_norm.temp": Style.KEY_HEAD_SCALARS}, under("mlp",
        EXPERTS)), states="convolved_keys", recurrent_modules=("self_attn.qkv_proj",),
        unserved={"attention_bias": "has biases on values of the token before, which the first token has not"}),
)
