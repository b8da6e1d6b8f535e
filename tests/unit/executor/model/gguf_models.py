"""Tiny models written as GGUF files, with the package `gguf`: what other programs make of transformers' models."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

Keys = dict[str, Any]
Tensors = Iterator[tuple[str, torch.Tensor]]  # by the file's names
Changes = Mapping[str, torch.Tensor | None]
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma2": "gemma2",
    "phi3": "phi3",
}
# Those that transformers does not read.
OWN = {
    **{name: name for name in ("gemma", "granite", "smollm3", "seed_oss")},
    **{name: name for name in ("arcee", "ernie4_5", "exaone4", "olmo2")},
    "mistral": "mistral",
    "mixtral": "llama",
    "olmo3": "olmo2",
}
ALL = ARCHITECTURES | OWN  # model type -> as GGUF calls it
# Types that `gguf` writes; of others any codes are a weight.
_QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F32", "F16", "BF16", "TQ2_0")


def write_gguf(directory: Path, path: Path, kind: str, scaling: Mapping[str, Any] | None = None, **extra: str) -> Path:
    """The transformers model in `directory` as the file `path`, its matrices of type `kind`, those whose name ends as
    one of `extra` says of that type. `scaling`: what is said of rotary positions."""
    config = AutoConfig.from_pretrained(str(directory))
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    writer = gguf.GGUFWriter(str(path), ALL[config.model_type])
    add_metadata(writer, config)
    for name, value in (scaling or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{ALL[config.model_type]}.rope.scaling.{name}", value)
    add_tensors(writer, model, config, kind, extra)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        writer.add_expert_count(getattr(config, "num_experts", 0) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if value := getattr(config, cap, None):
            writer.add_float32(f"{ALL[config.model_type]}.{cap}", value)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    add_tokens(writer, config.vocab_size)


def add_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level tokenizer."""
    tokens = ["!!", *(chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)])]
    tokens = (tokens + [chr(256 + more) for more in range(1000)])[:size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(0)


def names_of(architecture: str, layers: int) -> gguf.TensorNameMap:
    """What files call the tensors of models."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, layers)


def add_tensors(writer: gguf.GGUFWriter, model: Any, config: Any, kind: str, extra: dict[str, str]) -> None:
    architecture = ALL[config.model_type]
    wanted = "llama" if architecture == "mistral" else architecture  # which gguf does not know
    names = names_of(wanted, config.num_hidden_layers)
    for name, tensor in apart(model.state_dict()):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if (
            architecture in ("arcee", "llama", "mistral", "granite", "smollm3")
            and stored.endswith(".weight")
            and (".attn_q." in stored or ".attn_k." in stored)
        ):
            heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and stored.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.dim() == 1 or ".ffn_gate_inp" in stored:
            vector = ".ffn_gate_inp_shexp" in stored  # as llama-quantize writes one row
            writer.add_tensor(stored, tensor.flatten().numpy() if vector else tensor.numpy())
            continue
        chosen = next((other for end, other in extra.items() if f"{end}.weight" in stored), kind)
        type_ = gguf.GGMLQuantizationType[chosen]
        writer.add_tensor(stored, stored_as(tensor.numpy(), type_), raw_dtype=type_)


# The file's keys, and the words of most configurations for them.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}

EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def words(said: Mapping[str, str], more: Keys | None = None) -> Callable[[Any], Keys]:
    """Keys, and the configuration's words for them; `more`: keys and values. Layers with windows are listed."""

    def keys(config: Any) -> Keys:
        found = {key: getattr(config, word) for key, word in said.items()}
        kinds = "attention.sliding_window_pattern"
        listed = {kinds: [kind == "sliding_attention" for kind in config.layer_types]} if kinds in said else {}
        return {**found, **listed, **(more or {})}

    return keys


def written(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Changes,
    kind: str,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] = add_tokens,
) -> Path:
    """The file `path`: `keys` behind the architecture's name, matrices of type `kind`; what is None is left out."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(str(path), architecture)
    adders = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key if key.startswith("xielu.") else f"{architecture}.{key}", value)
        elif value is not None:
            adders[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name == "token_embd.weight":
            tokenizer(writer, tensor.shape[0])
        is_matrix = tensor.dim() > 1 and not any(word in name for word in ("conv1d", "ffn_gate_inp", "norm", "altup_"))
        type_ = gguf.GGMLQuantizationType[kind if is_matrix and tensor.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(name, stored_as(tensor.float().contiguous().numpy(), type_), raw_dtype=type_)
    finish(writer)
    return path


def apart(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name, those of experts with gate and up as tensors of their own."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for side, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{side}.weight"), half.contiguous()
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), tensor


def stored_as(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Rows of blocks; of types that `gguf` does not write, any codes under small scales."""
    if kind.name in _QUANTIZABLE:
        return gguf.quantize(values, kind)
    from tests.unit.executor.model.loading.test_gguf_blocks import FLOATS, any_rows

    if values.ndim == 3:
        return np.stack([stored_as(part, kind) for part in values])
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = any_rows(kind, values.size, values.shape[0], values.shape[1] // gguf.GGML_QUANT_SIZES[kind][0])
    blocks = raw.reshape(values.shape[0], -1, size)
    for at in FLOATS[kind.name]:
        scales = blocks[..., at : at + 2].copy().view(np.float16) / np.float16(4000)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = 120
    if kind.name == "NVFP4":
        blocks[..., :4] &= 31
    return raw
