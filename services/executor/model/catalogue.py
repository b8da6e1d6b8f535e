"""The architectures that are served, and why others are not; `python -m tests.docs` makes docs/models.md of them.

An architecture stands here when tests/unit/executor/model/test_architectures.py proves it: its logits equal
transformers' own. Others are refused at load, because a model that computes something else than its
authors meant answers without an error. A model is refused by its configuration alone, with
the reason, before a byte of its weights is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
class Refusal:
    """Architectures that are not served for one reason."""

    because: str
    """Ends the sentence "its architecture ..."."""
    model_types: list[str]


_SERVED = """
afmoe | AFMoE | Trinity Nano, Mini | MoE, shared expert, gated attention, sliding window, q/k norms
apertus | Apertus | Apertus 8B, 70B | q/k norms, xIELU without gate
arcee | Arcee | AFM 4.5B | squared ReLU without gate
bloom | BLOOM | BLOOM, BLOOMZ | ALiBi, fused q/k/v by head, biases, five heads
cohere | Cohere | Command R, Aya 23 | parallel residual, norms per head, scaled logits
cohere2 | Cohere 2 | Command R7B, Command A | sliding window, layers without rotation
cwm | CWM | Code World Model 32B | sliding window
dots1 | dots.llm1 | dots.llm1 | MoE, shared expert, sliding window, q/k norms
ernie4_5 | ERNIE 4.5 | ERNIE 4.5 0.3B | interleaved rotation
ernie4_5_moe | ERNIE 4.5 MoE | ERNIE 4.5 21B-A3B | MoE, shared expert
exaone4 | EXAONE 4 | EXAONE 4.0 1.2B, 32B | sliding window, q/k norms, post norms
exaone_moe | EXAONE MoE | K-EXAONE | MoE, shared expert, sliding window, q/k norms
falcon | Falcon | Falcon 7B, 40B, 180B, RW | fused q/k/v by group, multi-query, ALiBi, parallel residual
flex_olmo | FlexOlmo | FlexOlmo 7x7B | MoE, norms over all heads
gemma | Gemma | Gemma 2B, 7B | one KV head, scaled embedding, tied head
gemma2 | Gemma 2 | Gemma 2 2B, 9B, 27B | soft caps on scores and logits, sliding window, post norms
gemma3_text | Gemma 3 (text) | Gemma 3 270M, 1B | sliding window, q/k norms, two rotations
glm | GLM | GLM-4 9B, GLM-Edge | fused gate/up, partial rotation, biases
glm4 | GLM-4 | GLM-4-0414 9B, 32B | fused gate/up, partial rotation, post norms, biases
glm4_moe | GLM-4 MoE | GLM-4.5, 4.6 | MoE, shared expert, q/k norms, biases
gpt2 | GPT-2 | GPT-2, DistilGPT2 | Conv1D, fused q/k/v, learned positions, five heads
gpt_bigcode | GPTBigCode | StarCoder, SantaCoder | multi-query, fused q/k/v, learned positions
gpt_neox | GPT-NeoX | Pythia, GPT-NeoX 20B | fused q/k/v by head, parallel residual, partial rotation, five heads
gpt_oss | GPT-OSS | gpt-oss (weights in bf16) | MoE, attention sinks, sliding window, YaRN
gptj | GPT-J | GPT-J 6B | interleaved partial rotation, parallel residual, five heads
granite | Granite | Granite 3 | scaled logits, residuals and embedding, biases
granitemoe | Granite MoE | Granite 3 1B-A400M | MoE, scaled scores
granitemoeshared | Granite MoE shared | Granite 3 MoE shared | MoE, fused shared expert
helium | Helium | Helium 1 2B | interleaved rotation
hunyuan_v1_dense | Hunyuan dense | Hunyuan 0.5B to 7B | q/k norms after rotation, NTK rotation
hunyuan_v1_moe | Hunyuan MoE | Hunyuan A13B | MoE, shared expert, q/k norms
jais2 | Jais 2 | Jais 2 8B, 70B | biases, layer norms
llama | Llama | Llama 2, 3; SmolLM 1, 2; TinyLlama; Yi | tied and untied head, biases, one KV head, five heads, rotary scaling (Llama 3, dynamic)
minimax_m2 | MiniMax M2 | MiniMax M2 | MoE, norms over all heads, partial rotation
ministral | Ministral | Ministral 8B | sliding window on some layers
ministral3 | Ministral 3 | Ministral 3 (its text model alone) | sliding window, scaled queries
mistral | Mistral | Mistral 7B, Nemo, Small | sliding window
mixtral | Mixtral | Mixtral 8x7B, 8x22B | MoE, sliding window
nanochat | nanochat | nanochat | norms without weights, soft cap on logits
nemotron | Nemotron | Minitron, Nemotron 4 | squared ReLU without gate, partial rotation
olmo | OLMo | OLMo 1B, 7B | norms without weights, clipped q/k/v
olmo2 | OLMo 2 | OLMo 2 1B to 32B | norms over all heads, post norms, one KV head
olmo3 | OLMo 3 | OLMo 3 7B, 32B | norms over all heads, sliding window
olmoe | OLMoE | OLMoE 1B-7B | MoE, norms over all heads, one KV head
opt | OPT | OPT 125M to 66B | learned positions, biases, projected embedding, five heads
persimmon | Persimmon | Persimmon 8B | fused q/k/v by head, q/k norms, partial rotation
phi | Phi | Phi 1, 1.5, 2 | parallel residual, biases, q/k norms, head with bias
phi3 | Phi-3 | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | fused q/k/v and gate/up, sliding window, LongRoPE
phimoe | Phi-MoE | Phi-3.5-MoE | MoE, sliding window, biases, head with bias
qwen2 | Qwen 2 | Qwen 2, 2.5; DeepSeek R1 Distill Qwen | biases on q/k/v, untied head
qwen2_moe | Qwen 2 MoE | Qwen1.5-MoE, Qwen2 57B-A14B | MoE, gated shared expert
qwen3 | Qwen 3 | Qwen 3 0.6B to 32B | q/k norms, biases, one KV head
qwen3_moe | Qwen 3 MoE | Qwen 3 30B-A3B, 235B | MoE, q/k norms, dense layers between
seed_oss | Seed-OSS | Seed-OSS 36B | biases
smollm3 | SmolLM3 | SmolLM3 3B | layers without rotation
solar_open | Solar Open | Solar Open 100B | MoE, shared expert
stablelm | StableLM | StableLM 3B, Zephyr, 2 1.6B | norms per head, partial rotation, biases
starcoder2 | StarCoder2 | StarCoder2 3B, 7B, 15B | sliding window, biases, layer norms
vaultgemma | VaultGemma | VaultGemma 1B | soft caps on scores and logits, sliding window
"""  # noqa: E501
"""model_type | title | examples | what the proof shows (`Architecture`). MoE: mixture of experts."""

SERVED: Mapping[str, Architecture] = MappingProxyType(
    {
        name: Architecture(title, examples, shown.replace("MoE", "mixture of experts"))
        for name, title, examples, shown in (row.split(" | ") for row in _SERVED.strip().splitlines())
    }
)
"""By `model_type`."""

REFUSED: tuple[Refusal, ...] = (
    Refusal("compresses keys and values (latent attention)", [
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3",
        "youtu"
    ]),
    Refusal("keeps a running state in some layers (state-space, recurrent or linear attention)", [
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
        "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"
    ]),
    Refusal("shares keys and values between layers", ["gemma3n_text", "gemma4_text"]),
    Refusal("attends within chunks of the text", ["llama4_text"]),
    Refusal("computes attention in a way that is not paged here", [
        "codegen", "ctrl", "diffllama", "doge", "gpt_neo", "mpt", "openai-gpt", "xglm", "xlnet"
    ]),
    Refusal("reads text in both directions", [
        "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"
    ]),
)  # fmt: skip


def refusal_of(model_type: str) -> str | None:
    """Why the architecture is not served, as the end of "its architecture ..."; None where it is."""
    if model_type in SERVED:
        return None
    for refusal in REFUSED:
        if model_type in refusal.model_types:
            return refusal.because
    return "is not among those proven to compute what transformers computes (docs/models.md lists them)"


_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")
"""What configurations call the most tokens of one sequence, the commonest first (BLOOM: seq_length)."""
_ORIGINAL = "original_max_position_embeddings"


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
            "choose another model."
        )


def longest_context(config: Any) -> int:
    """Most tokens of one sequence. Raises `ModelLoadError` where the configuration does not say.

    Rotary embeddings of type longrope have other frequencies for a batch whose longest sequence passes the
    length of the first training, so that a text would depend on its neighbours: such models are served up
    to that length. Those of type dynamic change only beyond the length named here.
    """
    length = next((value for name in _LENGTHS if (value := getattr(config, name, None))), None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError("The model's config.json has no max_position_embeddings; add it.")
    for rope in _ropes(config):
        original = rope.get(_ORIGINAL, getattr(config, _ORIGINAL, None))
        if rope.get("rope_type") == "longrope" and isinstance(original, int):
            length = min(length, original)
    return length


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder"
    if getattr(config, "add_cross_attention", False):
        yield "attends to an encoder"
    if getattr(config, "kv_lora_rank", None):
        yield "compresses keys and values (latent attention)"
    if getattr(config, "use_bidirectional_attention", None):
        yield "looks ahead in the text (use_bidirectional_attention)"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        yield f"has layers of type {', '.join(unknown)}"
    refusal = refusal_of(config.model_type)
    if refusal:
        yield refusal


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding, whether the configuration has one or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
