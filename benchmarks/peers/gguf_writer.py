"""A GGUF file from a Llama model's directory, for the peers that read nothing else.

Matrices are stored as bf16 and keep their values, norms (vectors) as fp32. `f16` is for readers that know no
bf16: only what is too small for it is rounded. With `q4_0` matrices are 4-bit blocks, and the embedding,
which is the output layer as well, 8-bit ones.

Sources: the GGUF specification (ggml, docs/gguf.md) for keys and tensor names, through the package `gguf`;
the order of the q and k rows is told at `interleaved`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from benchmarks.errors import BenchError

FORMATS = ("bf16", "f16", "q4_0")
_FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_TYPES = gguf.GGMLQuantizationType
_NEED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")


def write_gguf(model: Path, target: Path, weights: str) -> None:
    """Write the model in directory `model` to the file `target`, `weights` one of FORMATS.

    The file appears under its name only once it is whole. Raises BenchError for what is no plain Llama.
    """
    config = _read_json(model / "config.json")
    check_config(config)
    part = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    try:
        _add_config(writer, config, model.name, _FILE_TYPES[weights])
        _add_tokenizer(writer, model, config)
        for name, data, kind in _tensors(model, config, weights):
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    part.replace(target)


def gguf_path(folder: Path, model: Path, weights: str) -> Path:
    """Where the file of this model, with these very weights, belongs in `folder`."""
    newest = max((file.stat().st_mtime_ns for file in model.iterdir()), default=0)
    return folder / f"{model.name}-{newest:x}-{weights}.gguf"


def check_config(config: Mapping[str, Any]) -> None:
    """Raises BenchError for a model that this writer would get wrong."""
    if config.get("model_type") != "llama":
        raise BenchError(
            f"Only Llama models can be written as GGUF here, and this is {config.get('model_type')!r}:"
            " give another --model, or leave out the peers that need GGUF."
        )
    if missing := [key for key in _NEED if key not in config]:
        raise BenchError(f"config.json lacks {missing[0]}: give a complete model directory.")
    kind = _rope(config).get("rope_type", "default")
    if kind != "default" or config.get("attention_bias") or config.get("mlp_bias"):
        raise BenchError(
            "Llama models with scaled rotary positions or biases cannot be written as GGUF here:"
            " leave out the peers that need GGUF."
        )


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection in GGUF's order.

    Transformers rotates channel i with channel i + d/2 of a head, GGUF's Llama channel 2i with 2i + 1, as
    the original Llama did. [heads * d, hidden] to the same shape.
    """
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """GGUF's name for how tokenizer.json splits text before merging. Raises BenchError for others."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers", [splitter])
    kinds = [part.get("type") for part in parts]
    if all(part.get("use_regex") and not part.get("add_prefix_space") for part in parts[-1:]):
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["ByteLevel"]:
            return "gpt-2"
    raise BenchError(
        f"The tokenizer splits text by {', '.join(map(str, kinds))}, which this GGUF writer does not know:"
        " leave out the peers that need GGUF."
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), **found}


def _add_config(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str, file_type: gguf.LlamaFileType
) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.get("max_position_embeddings", 2048))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: Mapping[str, Any]) -> None:
    tokenizer = _read_json(model / "tokenizer.json")
    if tokenizer["model"].get("type") != "BPE":
        raise BenchError("Only BPE tokenizers can be written as GGUF here: give another --model.")
    tokens, types = vocabulary(tokenizer, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
        ("unk_token_id", writer.add_unk_token_id),
    ):
        if isinstance(value := config.get(key), int):
            add(value)
    writer.add_add_bos_token(False)  # the chat template writes all special tokens itself
    writer.add_chat_template(_chat_template(model))


def vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """`size` tokens by id, and GGUF's type of each; ids without a token are filled up."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    return tokens, types


def _chat_template(model: Path) -> str:
    file = model / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = _read_json(model / "tokenizer_config.json").get("chat_template")
    if not isinstance(template, str):
        raise BenchError(f"{model} has no chat template: give a model that is made for chats.")
    return template


def _tensors(
    model: Path, config: Mapping[str, Any], weights: str
) -> Iterator[tuple[str, npt.NDArray[Any], gguf.GGMLQuantizationType]]:
    """Every tensor by its name in GGUF, its bytes and their type."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    rows_by_head = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise BenchError(f"{model} holds no safetensors: give a model directory with weights.")
    for file in files:
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118  # no mapping
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                tensor = source.get_tensor(name)
                if (projection := name.split(".")[-2]) in rows_by_head:
                    tensor = interleaved(tensor, rows_by_head[projection])
                target = names.get_name(name, try_suffixes=(".weight",))
                if target is None:
                    raise BenchError(f"{file} holds {name!r}, which no plain Llama has.")
                yield target, *_encoded(tensor, target, weights)


def _encoded(
    tensor: torch.Tensor, name: str, weights: str
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
    if tensor.dim() == 1:
        return tensor.float().numpy(), _TYPES.F32
    if weights == "bf16":
        data: npt.NDArray[np.uint8] = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        return data, _TYPES.BF16
    if weights == "f16":
        return tensor.half().numpy(), _TYPES.F16
    kind = _TYPES.Q8_0 if name.startswith(("token_embd", "output.")) else _TYPES.Q4_0
    return gguf.quantize(tensor.float().numpy(), kind), kind


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{os.fspath(file)} cannot be read ({error}): give a model directory.") from None
