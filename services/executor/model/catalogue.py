"""The architectures that are served, and why others are not; docs/models.md has tables of them.

An architecture stands here when tests/unit/executor/model/test_architectures.py proves it: its logits equal
transformers' own. Others are refused at load, because a model that computes something else than its
authors meant answers without an error. A model is refused by its configuration alone, with
the reason, before a byte of its weights is read.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from services.executor.model.layer_states import INDEXED, keeps_latents
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    title: str
    examples: str
    """Models of this architecture, for a reader who knows them by name."""
    shown: str
    """What the proof shows beside grouped attention and rotary embeddings."""


@dataclass(frozen=True)
class Unsupported:
    """Architectures that are not served for one reason."""

    because: str
    """Ends the sentence "its architecture ..."."""
    model_types: list[str]


_SERVED = """
afmoe | AFMoE | Trinity Nano, Mini | MoE, shared expert, gated attention, sliding window, q/k norms
apertus | Apertus | Apertus 8B, 70B | q/k norms, xIELU without gate
arcee | Arcee | AFM 4.5B | squared ReLU without gate
aria_text | Aria (text) | Aria's text model | MoE, shared expert
axk1 | A.X K1 | A.X K1 | latent attention, MoE, shared expert, grouped router
axk2 | A.X K2 | A.X K2, K2 Light | latent attention, tokens chosen by an indexer, gated attention, gated norms, MoE, shared expert
bailing_hybrid | Bailing hybrid | Ling 3.0 | Kimi's delta attention, latent attention with a gate for each head, MoE, shared expert, grouped router
bamba | Bamba | Bamba 9B | Mamba 2, partial rotation
beam | Beam | Beam 501B-A23B | MoE, gated attention, sliding window, q/k norms, layers without rotation
biogpt | BioGPT | BioGPT, BioGPT Large | learned positions, scaled embedding, biases, five heads
bitnet | BitNet | BitNet b1.58 2B (weights unpacked) | norms after attention and gate, squared ReLU
bloom | BLOOM | BLOOM, BLOOMZ | ALiBi, fused q/k/v by head, biases, five heads
codegen | CodeGen | CodeGen 350M to 16B | fused q/v/k by fourths, interleaved partial rotation, parallel residual
cohere | Cohere | Command R, Aya 23 | parallel residual, norms per head, scaled logits
cohere2 | Cohere 2 | Command R7B, Command A | sliding window, layers without rotation
cohere2_moe | Cohere 2 MoE | Command A+ | MoE, averaged shared expert, sliding window, layers without rotation
cohere_compass_text | Cohere Compass (text) | the text model of North Micro Vision | sliding window, layers without rotation
ctrl | CTRL | CTRL 1.6B | sinusoidal positions, biases, head with bias, five heads
cwm | CWM | Code World Model 32B | sliding window
dbrx | DBRX | DBRX 132B-A36B | MoE, fused q/k/v, clipped q/k/v
deepseek_v2 | DeepSeek V2 | DeepSeek V2, V2 Lite, Coder V2 | latent attention, MoE, shared expert, grouped router, YaRN
deepseek_v3 | DeepSeek V3 | DeepSeek V3, V3.1, R1; Moonlight; Kimi K2 (of K2.5 the text model alone) | latent attention, MoE, shared expert, grouped router, YaRN
deepseek_v32 | DeepSeek V3.2 | DeepSeek V3.2, V3.2 Exp | latent attention, tokens chosen by an indexer, MoE, shared expert, grouped router, YaRN
deepseek_v4 | DeepSeek V4 | DeepSeek V4 Flash, V4 Pro | compressed attention: a sliding window, and lines of several tokens of which an indexer chooses; attention sinks, hyper-connections, MoE, shared expert, experts by token
diffllama | DiffLlama | DiffLlama 0.3B | differential attention, biases
doge | Doge | Doge 20M to 320M (no mixtures) | biases of keys, q/k norms, weighted residuals
dots1 | dots.llm1 | dots.llm1 | MoE, shared expert, sliding window, q/k norms
dots3_note | dots3 note | dots3 note (its text model alone) | latent attention, tokens chosen by an indexer
dots3_note_text | dots3 note (text) | dots3 note | latent attention, tokens chosen by an indexer, sliding window with heads of its own, gated attention, MoE, shared expert
emu3 | Emu3 | Emu3 Chat (its text model alone) | untied head
ernie4_5 | ERNIE 4.5 | ERNIE 4.5 0.3B | interleaved rotation
ernie4_5_moe | ERNIE 4.5 MoE | ERNIE 4.5 21B-A3B | MoE, shared expert
exaone4 | EXAONE 4 | EXAONE 4.0 1.2B, 32B | sliding window, q/k norms, post norms
exaone_moe | EXAONE MoE | K-EXAONE | MoE, shared expert, sliding window, q/k norms
falcon | Falcon | Falcon 7B, 40B, 180B, RW | fused q/k/v by group, multi-query, ALiBi, parallel residual
falcon_h1 | Falcon H1 | Falcon H1 0.5B to 34B | Mamba 2 beside attention in each layer, scaled inputs and outputs
falcon_mamba | Falcon Mamba | Falcon Mamba 7B | Mamba 1 with norms of what its scan is made of
flex_olmo | FlexOlmo | FlexOlmo 7x7B | MoE, norms over all heads
flint | Flint | Flint | MoE, shared expert, attention sinks, sliding window, layers without rotation
gemma | Gemma | Gemma 2B, 7B | one KV head, scaled embedding, tied head
gemma2 | Gemma 2 | Gemma 2 2B, 9B, 27B | soft caps on scores and logits, sliding window, post norms
gemma3 | Gemma 3 | Gemma 3 4B, 12B, 27B (its text model alone) | sliding window, q/k norms, two rotations
gemma3_text | Gemma 3 (text) | Gemma 3 270M, 1B | sliding window, q/k norms, two rotations
gemma3n | Gemma 3n | Gemma 3n E2B, E4B (their text model alone) | shared keys
gemma3n_text | Gemma 3n (text) | Gemma 3n E2B, E4B | shared keys, sliding window, AltUp, per-layer embeddings, q/k/v norms
gemma4 | Gemma 4 | Gemma 4 E2B to 31B, 26B-A4B (their text model alone) | shared keys
gemma4_text | Gemma 4 (text) | Gemma 4 E2B to 31B, 26B-A4B | shared keys, sliding window, other heads in full layers, per-layer embeddings, MoE
gemma4_unified | Gemma 4 unified | Gemma 4 unified 12B (its text model alone) | shared keys
gemma4_unified_text | Gemma 4 unified (text) | Gemma 4 unified 12B | shared keys, sliding window, other heads in full layers
glm | GLM | GLM-4 9B, GLM-Edge | fused gate/up, partial rotation, biases
glm4 | GLM-4 | GLM-4-0414 9B, 32B | fused gate/up, partial rotation, post norms, biases
glm4_moe | GLM-4 MoE | GLM-4.5, 4.6 | MoE, shared expert, q/k norms, biases
glm4_moe_lite | GLM-4 MoE Lite | GLM-4.7 Flash | latent attention, MoE, shared expert
glm_moe_dsa | GLM MoE DSA | GLM-5, 5.1 | latent attention, tokens chosen by an indexer or by that of a layer before, MoE, shared expert
gpt-sw3 | GPT-SW3 | GPT-SW3 126M to 40B | as GPT-2
gpt2 | GPT-2 | GPT-2, DistilGPT2 | Conv1D, fused q/k/v, learned positions, five heads
gpt_bigcode | GPTBigCode | StarCoder, SantaCoder | multi-query, fused q/k/v, learned positions
gpt_neo | GPT-Neo | GPT-Neo 125M to 2.7B | local attention, unscaled scores, learned positions, five heads
gpt_neox | GPT-NeoX | Pythia, GPT-NeoX 20B | fused q/k/v by head, parallel residual, partial rotation, five heads
gpt_neox_japanese | GPT-NeoX Japanese | GPT-NeoX Japanese 2.7B | fused q/k/v by head, partial rotation, five heads
gpt_oss | GPT-OSS | gpt-oss (weights in bf16) | MoE, attention sinks, sliding window, YaRN
gptj | GPT-J | GPT-J 6B | interleaved partial rotation, parallel residual, five heads
granite | Granite | Granite 3 | scaled logits, residuals and embedding, biases
granite_swa | Granite SWA | Granite Swash 2B | attention sinks, sliding window, rotation by layer, scaled logits
granitemoe | Granite MoE | Granite 3 1B-A400M | MoE, scaled scores
granitemoe_swa | Granite MoE SWA | Granite Swash 3B-A600M | MoE, fused shared expert, attention sinks, sliding window
granitemoehybrid | Granite 4 | Granite 4.0 Micro, H Micro, H Tiny, H Small | Mamba 2, MoE, fused shared expert, scaled scores, layers without rotation
granitemoeshared | Granite MoE shared | Granite 3 MoE shared | MoE, fused shared expert
helium | Helium | Helium 1 2B | interleaved rotation
hunyuan_v1_dense | Hunyuan dense | Hunyuan 0.5B to 7B | q/k norms after rotation, NTK rotation
hunyuan_v1_moe | Hunyuan MoE | Hunyuan A13B | MoE, shared expert, q/k norms
hy_v3 | Hunyuan 3 | Hy3 | MoE, shared expert, q/k norms, biases
hy_v4 | Hunyuan 4 | Hy4 | latent attention, tokens chosen by an indexer or by that of a layer before, attention sinks, gated attention, hyper-connections, MoE, shared expert
hyperclovax | HyperCLOVA X | HyperCLOVA X SEED Think 14B | scaled logits, residuals and embedding, post norms, biases
internlm3 | InternLM 3 | InternLM 3 8B | biases
iquestcoder | IQuest-Coder | IQuest-Coder V1 40B | one KV head
jais2 | Jais 2 | Jais 2 8B, 70B | biases, layer norms
jamba | Jamba | Jamba v0.1, 1.5, 1.6, 1.7, Reasoning 3B | Mamba 1, MoE, layers without rotation, dense layers between
jetmoe | JetMoE | JetMoE 8B | MoE, experts that make queries of shared keys
kimi_linear | Kimi Linear | Kimi Linear 48B-A3B | Kimi's delta attention, latent attention without rotation, MoE, shared expert
kolibri1 | Kolibri | Kolibri 1 | MoE, shared expert, sliding window, q/k norms, post norms
laguna | Laguna | Laguna XS | MoE, shared expert, gated attention, sliding window, q/k norms, two partial rotations, query heads per layer
lfm2 | LFM2 | LFM2 350M to 2.6B | short convolutions, q/k norms
lfm2_moe | LFM2 MoE | LFM2 8B-A1B, 24B-A2B | MoE, short convolutions, q/k norms, corrected router, dense layers between
lfm3 | LFM3 | LFM3 1.7B | short convolutions, sliding window, gated attention, q/k norms, two rotations, post norms
llama | Llama | Llama 2, 3; SmolLM 1, 2; TinyLlama; Yi | tied and untied head, biases, one KV head, five heads, rotary scaling (Llama 3, dynamic)
llama4 | Llama 4 | Llama 4 Scout, Maverick (their text model alone) | attention within chunks
llama4_text | Llama 4 (text) | Llama 4 Scout, Maverick | attention within chunks, MoE, shared expert, layers without rotation, scaled queries
longcat_flash | LongCat Flash | LongCat Flash | latent attention twice a layer, MoE beside dense layers, identity experts, scaled latents
mamba | Mamba | Mamba 130M to 2.8B | Mamba 1
mamba2 | Mamba 2 | Mamba 2 130M to 2.7B, Codestral Mamba | Mamba 2, without attention
mellum | Mellum | Mellum 2 | MoE, sliding window, q/k norms, two rotations, dense layers between
mimo_v2_flash | MiMo V2 Flash | MiMo V2 Flash | MoE, attention sinks, sliding window, KV heads per layer, values narrower than keys, two partial rotations
minicpm3 | MiniCPM 3 | MiniCPM3 4B | latent attention, scaled logits, residuals and embedding
minimax | MiniMax | MiniMax Text 01, M1 | MoE, lightning attention, scaled residuals
minimax_m2 | MiniMax M2 | MiniMax M2 | MoE, norms over all heads, partial rotation
minimax_m3_vl_text | MiniMax M3 (text) | MiniMax M3 (its text model alone) | blocks of keys chosen by an indexer, MoE, clamped activations, shared expert, q/k norms, partial rotation
ministral | Ministral | Ministral 8B | sliding window on some layers
ministral3 | Ministral 3 | Ministral 3 (its text model alone) | sliding window, scaled queries
mistral | Mistral | Mistral 7B, Nemo, Small (of 3.1 and later the text model alone) | sliding window
mistral4 | Mistral 4 | Mistral 4 (its text model alone) | latent attention, MoE, shared expert, scaled queries, YaRN
mixtral | Mixtral | Mixtral 8x7B, 8x22B | MoE, sliding window
modernbert-decoder | ModernBERT decoder | Ettin decoders | sliding window, two rotations, layer norms, head with a layer of its own
mpt | MPT | MPT 7B, 30B | ALiBi, fused q/k/v, clipped q/k/v, five heads
nanochat | nanochat | nanochat | norms without weights, soft cap on logits
nemotron | Nemotron | Minitron, Nemotron 4 | squared ReLU without gate, partial rotation
nemotron_h | Nemotron H | Nemotron H 8B to 56B, Nano 2, Nemotron 3 Nano and Super | Mamba 2, layers of a feed-forward alone, MoE of narrowed inputs, shared expert, grouped router, squared ReLU without gate, no rotation
olmo | OLMo | OLMo 1B, 7B | norms without weights, clipped q/k/v
olmo2 | OLMo 2 | OLMo 2 1B to 32B | norms over all heads, post norms, one KV head
olmo3 | OLMo 3 | OLMo 3 7B, 32B | norms over all heads, sliding window
olmo_hybrid | OLMo Hybrid | OLMo Hybrid 7B | gated delta rule, norms over all heads, layers without rotation
olmoe | OLMoE | OLMoE 1B-7B | MoE, norms over all heads, one KV head
openai-gpt | GPT | the first GPT | Conv1D, fused q/k/v, learned positions, five heads
opt | OPT | OPT 125M to 66B | learned positions, biases, projected embedding, five heads
persimmon | Persimmon | Persimmon 8B | fused q/k/v by head, q/k norms, partial rotation
phi | Phi | Phi 1, 1.5, 2 | parallel residual, biases, q/k norms, head with bias
phi3 | Phi-3 | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | fused q/k/v and gate/up, sliding window, LongRoPE
phi4_multimodal | Phi-4 multimodal | Phi-4 multimodal (its text model alone) | fused q/k/v and gate/up, LongRoPE
phimoe | Phi-MoE | Phi-3.5-MoE | MoE, sliding window, biases, head with bias
qwen2 | Qwen 2 | Qwen 2, 2.5; DeepSeek R1 Distill Qwen | biases on q/k/v, untied head
qwen2_moe | Qwen 2 MoE | Qwen1.5-MoE, Qwen2 57B-A14B | MoE, gated shared expert
qwen3 | Qwen 3 | Qwen 3 0.6B to 32B | q/k norms, biases, one KV head
qwen3_5 | Qwen 3.5 | Qwen 3.5 0.8B to 27B (its text model alone) | gated delta rule, gated attention, q/k norms, partial rotation
qwen3_5_moe | Qwen 3.5 MoE | Qwen 3.5 35B-A3B, 122B-A10B, 397B-A17B (its text model alone) | MoE, gated shared expert, gated delta rule, gated attention
qwen3_5_moe_text | Qwen 3.5 MoE (text) | Qwen 3.5 MoE, its text model | MoE, gated shared expert, gated delta rule, gated attention
qwen3_5_text | Qwen 3.5 (text) | Qwen 3.5, its text model | gated delta rule, gated attention, q/k norms, partial rotation
qwen3_moe | Qwen 3 MoE | Qwen 3 30B-A3B, 235B | MoE, q/k norms, dense layers between
qwen3_next | Qwen 3 Next | Qwen 3 Next 80B-A3B | MoE, gated shared expert, gated delta rule, gated attention, dense layers between
qwen4_exp | Qwen 4 experimental | Qwen 4 Exp (its text model alone) | MoE, gated shared expert, gated delta rule, gated attention, blocks of keys chosen by an indexer
qwen4_exp_text | Qwen 4 experimental (text) | Qwen 4 Exp, its text model | MoE, gated shared expert, gated delta rule, gated attention, blocks of keys chosen by an indexer, embeddings of several tokens, hyper-connections
recurrent_gemma | RecurrentGemma | RecurrentGemma 2B, 9B | RG-LRU with gates by head, sliding window, partial rotation, soft cap on logits
rwkv | RWKV 4 | RWKV-4 169M to 14B | RWKV, hidden states that are scaled every few layers
seed_oss | Seed-OSS | Seed-OSS 36B | biases
smollm3 | SmolLM3 | SmolLM3 3B | layers without rotation
solar_open | Solar Open | Solar Open 100B | MoE, shared expert
stablelm | StableLM | StableLM 3B, Zephyr, 2 1.6B | norms per head, partial rotation, biases
starcoder2 | StarCoder2 | StarCoder2 3B, 7B, 15B | sliding window, biases, layer norms
vaultgemma | VaultGemma | VaultGemma 1B | soft caps on scores and logits, sliding window
xglm | XGLM | XGLM 564M to 7.5B | sinusoidal positions, biases, scaled embedding, five heads
xlstm | xLSTM | xLSTM 7B | mLSTM: a matrix memory for each head
zamba | Zamba | Zamba 7B | Mamba 1 by heads, a block of attention and feed-forward that several layers share, without rotation
zamba2 | Zamba 2 | Zamba 2 1.2B, 2.7B, 7B | Mamba 2, blocks of attention and feed-forward that several layers share, with an adapter for each call
zaya | ZAYA | ZAYA1 8B | convolutions over queries and keys, delayed values, MoE with a router of several layers
youtu | Youtu | Youtu LLM 2B | latent attention, two forms of rotation
"""  # noqa: E501
"""model_type | title | examples | what the proof shows (`Architecture`). MoE: mixture of experts."""

SERVED: Mapping[str, Architecture] = MappingProxyType(
    {
        name: Architecture(title, examples, shown.replace("MoE", "mixture of experts"))
        for name, title, examples, shown in (row.split(" | ") for row in _SERVED.strip().splitlines())
    }
)
"""By `model_type`."""

LISTED_ELSEWHERE = frozenset({"mistral4"})
"""Causal language models that transformers lists among those that take images alone."""
TEXT_ALONE = frozenset(
    {
        "aria",
        "cohere_compass",
        "dots3_note",
        "emu3",
        "exaone4_5",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "llama4",
        "minimax_m3_vl",
        "mistral3",
        "phi4_multimodal",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
    }
)
"""Models that take more than text, of which the text model is served: images and sound are refused."""
_SERVED_AS = {"emu3_text_model": "emu3"}
"""Text models that transformers lists by the whole model's type alone."""

REFUSED: tuple[Unsupported, ...] = (
    Unsupported("adds what its query gives to the distance of the key to each score, behind convolutions", [
        "inkling2_text", "inkling_text"
    ]),
    Unsupported("weighs tokens by hashes or by two streams of the text, which keys and values alone do not tell", [
        "reformer", "xlnet"
    ]),
    Unsupported("drafts for another model, whose keys and values it reads", [
        "gemma4_assistant", "gemma4_unified_assistant"
    ]),
    Unsupported("reads bytes, and attends to the patches that an encoder makes of them", [
        "blt"
    ]),
    Unsupported("is the decoder of a model with an encoder, whose states it attends to", [
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mllama", "musicgen",
        "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"
    ]),
    Unsupported("answers images or sound, and no text alone", [
        "fuyu", "git", "got_ocr2", "moshi", "moss_transcribe_diarize"
    ]),
    Unsupported("reads text in both directions, and is not among the encoders that are served", [
        "bert-generation", "big_bird", "cpmant", "megatron-bert", "rembert", "roc_bert", "roformer", "xlm", "xmod"
    ]),
    Unsupported("reads its prompt in both directions (prefix_lm)", [
        "hrm_text"
    ]),
)  # fmt: skip
"""All other types of transformers' causal language models, each once."""


_ENCODERS = """
albert | ALBERT | ALBERT base to xxlarge | layers share their weights
bert | BERT | all-MiniLM, bge, e5, gte, ms-marco-MiniLM cross-encoders | learned positions, segments
camembert | CamemBERT | sentence-camembert | as RoBERTa
data2vec-text | data2vec (text) | data2vec-text-base | as RoBERTa
deberta | DeBERTa | DeBERTa base, large | attention to content and to distance apart
deberta-v2 | DeBERTa 2, 3 | mxbai-rerank v1, DeBERTa 3 classifiers | attention to content and to distance apart
distilbert | DistilBERT | multi-qa-distilbert, distilbert-sst-2 | learned positions
electra | ELECTRA | ms-marco-electra | embeddings of another width
ernie | ERNIE | ernie-3.0 | learned positions, segments
eurobert | EuroBERT | EuroBERT 210M to 2.1B | rotary positions, grouped heads, RMS norms
gte | GTE | gte-base-en-v1.5-hf, gte-multilingual | rotary positions, gated feed-forward
jina_embeddings_v3 | Jina embeddings 3 | jina-embeddings-v3-hf | rotary positions
modernbert | ModernBERT | gte-modernbert, modernbert-embed | rotary positions, windows to both sides
mpnet | MPNet | all-mpnet, multi-qa-mpnet | biases by distance
nomic_bert | NomicBERT | nomic-embed-text | rotary positions, gated feed-forward
roberta | RoBERTa | all-distilroberta, quora-roberta cross-encoders | positions from behind the padding's
roberta-prelayernorm | RoBERTa, norms first | efficient_mlm | norms before attention
xlm-roberta | XLM-RoBERTa | bge-m3, bge-reranker-v2-m3, multilingual-e5 | positions from behind the padding's
xlm-roberta-xl | XLM-RoBERTa XL | xlm-roberta-xl | norms before attention
"""

ENCODERS: Mapping[str, Architecture] = MappingProxyType(
    {
        name: Architecture(title, examples, shown)
        for name, title, examples, shown in (row.split(" | ") for row in _ENCODERS.strip().splitlines())
    }
)
"""Models that read a text in both directions, by `model_type`: for embeddings and classes.
tests/unit/executor/model/encoders proves them."""


BOTH_WAYS = frozenset({"gemma3_text"})
"""Decoders' types whose models embed where their configuration says that they look ahead
(`use_bidirectional_attention`: EmbeddingGemma)."""


def is_encoder(described: Mapping[str, Any]) -> bool:
    """Whether what config.json, here read, describes reads texts in both directions, and is served so."""
    kind = described.get("model_type")
    return kind in ENCODERS or (kind in BOTH_WAYS and described.get("use_bidirectional_attention") is True)


def served_as(model_type: str) -> str:
    """The type under which the text model of this configuration's type stands here."""
    return _SERVED_AS.get(model_type, model_type)


def refusal_of(model_type: str) -> str | None:
    """Why the architecture is not served, as the end of "its architecture ..."; None where it is."""
    if served_as(model_type) in SERVED or model_type in ENCODERS:
        return None
    for refusal in REFUSED:
        if model_type in refusal.model_types:
            return refusal.because
    return "is not among those proven to compute what transformers computes (docs/models.md lists them)"


_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_MORE_LAYER_TYPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "falcon_h1": frozenset({"hybrid"}),
        **dict.fromkeys(("zamba", "zamba2"), frozenset({"linear_attention", "hybrid"})),
        "zaya": frozenset({"hybrid", "hybrid_sliding"}),
        **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), frozenset({"conv"})),
        "deepseek_v4": frozenset({"compressed_sparse_attention", "heavily_compressed_attention"}),
        **dict.fromkeys(INDEXED, frozenset({"indexed_attention"})),
        **dict.fromkeys(
            (
                "bailing_hybrid",
                "bamba",
                "falcon_mamba",
                "granitemoehybrid",
                "jamba",
                "kimi_linear",
                "mamba",
                "mamba2",
                "minimax",
                "olmo_hybrid",
                "qwen3_5_moe_text",
                "qwen3_5_text",
                "qwen3_next",
                "recurrent_gemma",
            ),
            frozenset({"linear_attention"}),
        ),
        "qwen4_exp_text": frozenset({"indexed_attention", "linear_attention"}),
        "minimax_m3_vl_text": frozenset({"minimax_m3_sparse"}),
        "nemotron_h": frozenset({"linear_attention", "mlp", "moe"}),
        "llama4_text": frozenset({"chunked_attention"}),
    }
)
"""Those of architectures whose layers keep other state."""
WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Architectures whose layers keep recurrent state alone."""
_LONGEST_STATE = 1 << 17
"""Tokens of a sequence of theirs: they have no limit of their own, and blocks to count tokens by are set aside."""
_UNLIMITED = WITHOUT_ATTENTION | {"recurrent_gemma"}
"""RecurrentGemma attends within windows alone, and names no length."""
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")
"""What configurations call the most tokens of one sequence, the commonest first (BLOOM: seq_length)."""
ORIGINAL_LENGTH = "original_max_position_embeddings"


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "block_count"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "expert_count"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim", "embedding_length", "key_length"), 1 << 20),
}
"""Sizes of which a model is built before its weights are looked at, in the words of config.json and of GGUF files."""


def check_sizes(settings: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` where `settings`, of config.json or a GGUF file, takes time or memory without end."""
    for key, value in settings.items():
        if isinstance(value, dict):
            check_sizes(value)
        most = _MOST.get(key.rpartition(".")[2])
        if most is not None and isinstance(value, int | float) and not value <= most:
            raise ModelLoadError(
                f"The model says that its {key} is {value}, and no model with more than {most} is served; its "
                "configuration is damaged, fetch it again."
            )


def check_supported(config: Any) -> None:
    """Raises `ModelLoadError`, with the reason, when the model of this text configuration is not served."""
    for reason in _reasons(config):
        raise ModelLoadError(
            f"The model cannot be served: its architecture {config.model_type!r} {reason}; "
            f"choose another model{nearest(config.model_type)}."
        )


def check_text_served(config: Any) -> None:
    """Raises `ModelLoadError` where a model that takes more than text, of this configuration, is not served."""
    if config.model_type not in TEXT_ALONE:
        raise ModelLoadError(
            f"The model takes more than text ({config.model_type!r}), and its text model alone is not served; "
            f"choose a text model, or one of {', '.join(sorted(TEXT_ALONE))}{nearest(config.model_type)}."
        )


_LIKE = 0.75
"""How alike names are that are worth naming, from 0 to 1; of one family they begin alike."""


def nearest(model_type: str) -> str:
    """The served architecture whose name is most like `model_type`, as the end of an error's sentence; "" where none
    is."""
    likeness = {name: _likeness(model_type.lower(), name, row) for name, row in SERVED.items()}
    name = max(likeness, key=lambda name: likeness[name])
    if likeness[name] < _LIKE:
        return ""
    return f" (the nearest that is served: {SERVED[name].title}, {name!r}, such as {SERVED[name].examples})"


def _likeness(wanted: str, name: str, row: Architecture) -> float:
    names = (name, row.title.lower(), *row.examples.lower().split(", "))
    likeness = max(difflib.SequenceMatcher(None, wanted, other).ratio() for other in names)
    of_family = _family(wanted) == _family(name)
    return likeness + of_family


def _family(name: str) -> str:
    found = re.match(r"[a-z]+", name)
    return found[0] if found else name


def longest_context(config: Any) -> int:
    """Most tokens of one sequence, where nothing else is set. Raises `ModelLoadError` where the configuration does not
    say.

    Doge chooses, of more than keep_window_size keys, those with the largest biases. A model without attention to all
    of a text takes any length.
    """
    if config.model_type in _UNLIMITED:
        return _LONGEST_STATE
    length = next((value for name in _LENGTHS if (value := getattr(config, name, None))), None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError("The model's config.json has no max_position_embeddings; add it.")
    kept = getattr(config, "keep_window_size", None)
    if isinstance(kept, int) and kept > 0:
        length = min(length, kept)
    return length


_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "doge": {"is_moe": "chooses a token's experts by other tokens too"},
        "mpt": {"logit_scale": "scales its logits, which transformers does not compute"},
        "xlstm": {"weight_mode": "has its projections in one weight, which is not split over ranks"},
        "zaya": {"attention_bias": "has biases on values of the token before, which the first token has not"},
    }
)
"""By `model_type`: settings that are not served where they are on, and why."""
_OFF = (None, False, "single")


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder"
    if getattr(config, "add_cross_attention", False):
        yield "attends to an encoder"
    if not keeps_latents(config.model_type) and getattr(config, "kv_lora_rank", None):
        yield "has no latent attention, but its configuration does (kv_lora_rank)"
    looks_ahead = getattr(config, "use_bidirectional_attention", None)
    if (
        looks_ahead not in (None, False, "vision") and config.model_type not in BOTH_WAYS
    ):  # vision: of images alone
        yield "looks ahead in the text (use_bidirectional_attention)"
    for setting, reason in _SETTINGS.get(config.model_type, {}).items():
        if getattr(config, setting) not in _OFF:
            yield f"{reason} ({setting})"
    known = _LAYER_TYPES | _MORE_LAYER_TYPES.get(config.model_type, frozenset())
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if config.model_type in _MORE_LAYER_TYPES and not getattr(config, "layer_types", None):
        yield "has layers of several types, and its config.json no layer_types"
    if unknown:
        yield f"has layers of type {', '.join(unknown)}"
    refusal = _of_encoder(config) or refusal_of(config.model_type)
    if refusal:
        yield refusal


def _of_encoder(config: Any) -> str | None:
    made = config.model_type in ENCODERS and getattr(config, "is_decoder", False)
    return "is an encoder's, made to read in one direction (is_decoder)" if made else None


def ropes_of(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding, whether the configuration has one or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
