"""What llama.cpp and its like have to know of a model beside its tensors, and what they call those.

Sources: the GGUF specification (ggml, docs/gguf.md), through the package `gguf`; the order of the rows of queries and
keys is told at `interleaved`. Models that the format would hold otherwise than they are meant are refused.
"""

import json
import math
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from services.executor.model.conversion.gguf_types import GgufDtype, nbytes_of
from services.executor.model.loading.gguf_file import GgufFile
from shared.errors import ModelLoadError

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF holds one type of model."""

    name: str
    enum: gguf.MODEL_ARCH
    interleaved: bool = False
    """Queries and keys are rotated by neighbours."""
    biases: bool = False
    """Of queries, keys and values, always; else never."""


_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", gguf.MODEL_ARCH.LLAMA, interleaved=True),
    "mistral": GgufArchitecture("llama", gguf.MODEL_ARCH.LLAMA, interleaved=True),
    "qwen2": GgufArchitecture("qwen2", gguf.MODEL_ARCH.QWEN2, biases=True),
    "qwen3": GgufArchitecture("qwen3", gguf.MODEL_ARCH.QWEN3),
    "granite": GgufArchitecture("granite", gguf.MODEL_ARCH.GRANITE, interleaved=True),
    "smollm3": GgufArchitecture("smollm3", gguf.MODEL_ARCH.SMOLLM3, interleaved=True),
}
_EVERY_FOURTH = 4
"""Of SmolLM3's layers has no rotary positions; llama.cpp takes that for granted."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""GGUF's names for the expressions by which tokenizers split text."""


def architecture_of(config: Mapping[str, Any]) -> GgufArchitecture:
    """Raises `ModelLoadError` for a model that a GGUF file written here would hold otherwise than it is."""
    kind = config["model_type"]
    found = _ARCHITECTURES.get(kind)
    if found is None:
        raise ModelLoadError(
            f"Models of type {kind!r} are not written as GGUF, but {', '.join(_ARCHITECTURES)} are; convert to "
            "safetensors, or use llama.cpp's own converter."
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ModelLoadError(
            f"GGUF's architecture {found.name} has no place for this model's biases (attention_bias, mlp_bias in "
            "config.json); convert to safetensors."
        )
    windows = "sliding_attention" in (config.get("layer_types") or ["sliding_attention"])
    if config.get("sliding_window") and windows:
        raise ModelLoadError(
            f"GGUF's architecture {found.name} has no sliding window, and this model has one of "
            f"{config['sliding_window']} tokens; convert to safetensors."
        )
    rotary = config.get("no_rope_layers") or ()
    if any(bool(turned) != bool((layer + 1) % _EVERY_FOURTH) for layer, turned in enumerate(rotary)):
        raise ModelLoadError(
            f"GGUF's architecture {found.name} has rotary positions in all layers but each fourth, and this model "
            "has them elsewhere (no_rope_layers in config.json); convert to safetensors."
        )
    _rope_scaling(config)
    return found


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection in the order of GGUF's llama.

    Transformers rotates channel i with channel i + d/2 of a head, GGUF's llama channel 2i with 2i + 1, as the original
    Llama did. [heads * d, ...] to the same shape.
    """
    return (
        rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
    )


def names_of(
    names: Sequence[str], architecture: GgufArchitecture, config: Mapping[str, Any]
) -> dict[str, str]:
    """For each of the checkpoint's `names` GGUF's. Raises `ModelLoadError` where there is none."""
    table = gguf.get_tensor_name_map(architecture.enum, config["num_hidden_layers"])
    found = {}
    for name in names:
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ModelLoadError(
                f"GGUF's architecture {architecture.name} has no place for the tensor {name}; convert to safetensors."
            )
        found[name] = target
    return found


def rope_factors(config: Mapping[str, Any]) -> Tensor | None:
    """float32 [head dim / 2]: what llama.cpp divides each frequency by; None: nothing. For Llama 3's scaling."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    half = _head_dim(config) // 2
    frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()


def header_of(
    model: str,
    config: Mapping[str, Any],
    tokenizer: Path,
    dtype: GgufDtype,
    tensors: Sequence[tuple[str, tuple[int, ...], Type]],
) -> bytes:
    """The file up to its first tensor. `tokenizer` is the directory that has it."""
    architecture = architecture_of(config)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "header"
        writer = gguf.GGUFWriter(path, architecture.name)
        try:
            _add_config(writer, config, model, dtype)
            _add_tokenizer(writer, tokenizer, config)
            for name, shape, kind in tensors:
                writer.add_tensor_info(
                    name, shape, torch.empty(0).numpy().dtype, nbytes_of(shape, kind), kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def header_from(
    file: GgufFile, dtype: GgufDtype, tensors: Sequence[tuple[str, tuple[int, ...], Type]]
) -> bytes:
    """The same for other `tensors` of the model that `file` is, or is the first part of: what it says stays."""
    kept = [key for key in file.header.spans if not key.startswith(_OF_ONE_FILE)]
    numbers = {
        "general.file_type": int(dtype.file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    number = struct.Struct("<II")
    said = [file.said(key) for key in kept]
    said += [_text(key) + number.pack(gguf.GGUFValueType.UINT32, value) for key, value in numbers.items()]
    infos, offset = [], 0
    for name, shape, kind in tensors:
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        infos.append(_text(name) + place)
        offset += -(-nbytes_of(shape, kind) // ALIGNMENT) * ALIGNMENT
    begin = struct.pack("<IIQQ", gguf.GGUF_MAGIC, gguf.GGUF_VERSION, len(tensors), len(said))
    header = b"".join([begin, *said, *infos])
    return header + bytes(-len(header) % ALIGNMENT)


_OF_ONE_FILE = (
    "split.",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "quantize.",
)
"""Keys that tell of how a file is stored."""


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": "default", **found}


def _rope_scaling(config: Mapping[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    rope = _rope(config)

    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(int(original))

    if rope["rope_type"] in ("default", "llama3"):  # llama3: a tensor of factors
        return lambda writer: None
    plain_yarn = not {"attention_factor", "beta_fast", "beta_slow", "mscale", "truncate"} & rope.keys()
    if rope["rope_type"] == "linear" or (rope["rope_type"] == "yarn" and plain_yarn):
        return scaled
    raise ModelLoadError(
        f"Rotary embeddings of type {rope['rope_type']!r}, as config.json has them, are not written as GGUF; "
        "convert to safetensors."
    )


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str, dtype: GgufDtype) -> None:
    heads = config["num_attention_heads"]
    head_dim = _head_dim(config)
    writer.add_name(name)
    writer.add_file_type(dtype.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    _rope_scaling(config)(writer)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any]) -> None:
    tokenizer = _read_json(directory / "tokenizer.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ModelLoadError(
            f"The tokenizer in {directory} is no byte-level BPE, the only kind that is written as GGUF; convert to "
            "safetensors, or use llama.cpp's own converter."
        )
    tokens, types = vocabulary(tokenizer, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    generation = directory / "generation_config.json"
    settings = {**config, **(_read_json(generation) if generation.is_file() else {})}
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    ids = {name: settings.get(f"{name}_token_id") for name in ("bos", "pad", "unk")}
    ids |= {"eos": stops[0] if stops else None, "eot": stops[1] if len(stops) > 1 else None}
    for name, number in ids.items():
        if isinstance(number, int):
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(_adds(tokenizer, tokens, ids["bos"]))
    if template := _chat_template(directory):
        writer.add_chat_template(template)


def vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """`size` tokens by id, and GGUF's type of each; ids without a token are filled up."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    added = tokenizer.get("added_tokens") or ()
    listed = [(token, index, gguf.TokenType.NORMAL) for token, index in tokenizer["model"]["vocab"].items()]
    for token in added:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        listed.append((token["content"], token["id"], kind))
    for token, index, kind in listed:
        if not 0 <= index < size:
            raise ModelLoadError(
                f"tokenizer.json has a token {index} where config.json speaks of {size}; the directory mixes two "
                "models, fetch the model again."
            )
        tokens[index], types[index] = token, int(kind)
    return tokens, types


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """GGUF's name for how tokenizer.json splits text before merging. Raises `ModelLoadError` for others."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers", [splitter])
    kinds = [part.get("type") for part in parts]
    if kinds[-1:] == ["ByteLevel"] and not parts[-1].get("add_prefix_space"):
        if (
            kinds == ["Digits", "ByteLevel"]
            and parts[0].get("individual_digits")
            and parts[1].get("use_regex")
        ):
            return "smollm"
        if kinds == ["ByteLevel"] and parts[0].get("use_regex"):
            return "gpt-2"
        if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex"):
            pattern = (parts[0].get("pattern") or {}).get("Regex")
            if pattern in _PATTERNS and parts[0].get("behavior") == "Isolated":
                return _PATTERNS[pattern]
    raise ModelLoadError(
        f"The tokenizer splits text by {', '.join(map(str, kinds))} in a way that has no name in GGUF here; convert to "
        "safetensors, or use llama.cpp's own converter."
    )


def _adds(tokenizer: Mapping[str, Any], tokens: Sequence[str], token: object) -> bool:
    """Whether texts get `token` in front."""
    processor = tokenizer.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    templates = (step["single"] for step in steps if step.get("type") == "TemplateProcessing")
    single: list[dict[str, Any]] = next(templates, [])
    first = single[0].get("SpecialToken", {}).get("id") if single else None
    return isinstance(token, int) and first == tokens[token]


def _chat_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    template = _read_json(settings).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}); give a whole model directory.") from None
