"""What llama.cpp and its like have to know of a model beside its tensors, and what they call those.

Source: the GGUF specification (ggml, docs/gguf.md), through the package `gguf`. Models that the format would hold
otherwise than they are meant are refused.
"""

import math
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from services.executor.families.gguf import GgufArchitecture
from services.executor.families.gguf_architectures import GGUF
from services.executor.model.conversion.gguf_tokenizer import add_tokenizer, read_json
from services.executor.model.conversion.gguf_types import GgufDtype, nbytes_of
from services.executor.model.loading.gguf_file import GgufFile
from services.executor.model.loading.gguf_metadata import SAMPLING
from shared.errors import ModelLoadError

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT


_EVERY_FOURTH = 4  # of SmolLM3's layers has no rotary positions; llama.cpp takes that for granted
_LOCAL_THETA = 10_000.0  # of the rotary positions of Gemma 3's windows, likewise


def architecture_of(config: Mapping[str, Any]) -> GgufArchitecture:
    """Raises `ModelLoadError` for a model that a GGUF file written here would hold otherwise than it is."""
    kind = config["model_type"]
    written = {name: row for row in GGUF.values() for name in row.written}
    found = written.get(kind)
    if found is None:
        raise ModelLoadError(
            f"Models of type {kind!r} are not written as GGUF, but {', '.join(sorted(written))} are; convert to "
            "safetensors, or use llama.cpp's own converter."
        )
    for differs in (_biases, _windows, _rotary, _scores, _activation):
        if reason := differs(config, found):
            raise ModelLoadError(f"GGUF's architecture {found.name} has no place for {reason}; convert to safetensors.")
    _rope_scaling(config)
    return found


def _biases(config: Mapping[str, Any], architecture: GgufArchitecture) -> str:
    names = ["attention_out_bias", "mlp_bias", *([] if architecture.biases else ["attention_bias"])]
    return "this model's biases (attention_bias, mlp_bias in config.json)" * any(map(config.get, names))


def _windows(config: Mapping[str, Any], architecture: GgufArchitecture) -> str:
    """Which layers have one follows from the architecture."""
    window, layers, period = config.get("sliding_window"), config["num_hidden_layers"], architecture.windows
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    sliding = [bool(window) and kind == "sliding_attention" for kind in kinds]
    expected = [period == 1 or (period > 1 and (layer + 1) % period > 0) for layer in range(layers)]
    if sliding == expected or (period <= 1 and not any(sliding)):
        return ""
    return f"sliding windows as this model has them (sliding_window {window} and layer_types in config.json)"


def _rotary(config: Mapping[str, Any], architecture: GgufArchitecture) -> str:
    turned = enumerate(config.get("no_rope_layers") or ())
    if any(bool(one) != bool((layer + 1) % _EVERY_FOURTH) for layer, one in turned):
        return "rotary positions elsewhere than in all layers but each fourth (no_rope_layers in config.json)"
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if local and (local.get("rope_type", "default"), local["rope_theta"]) != ("default", _LOCAL_THETA):
        return f"rotary positions in windows by another base than {_LOCAL_THETA:.0f} (rope_parameters in config.json)"
    return ""


def _scores(config: Mapping[str, Any], architecture: GgufArchitecture) -> str:
    """Gemma's scale of queries and soft caps; without a place in the file they have to be what readers assume."""
    if not architecture.largest:
        return ""
    widest = config["num_hidden_layers"] == architecture.largest
    width = config["hidden_size"] // config["num_attention_heads"] if widest else _head_dim(config)
    if config["query_pre_attn_scalar"] != width:
        return f"a query_pre_attn_scalar other than {width}, and config.json has {config['query_pre_attn_scalar']}"
    caps = [config.get(name) for name in _CAPS]
    if all(caps) != architecture.soft_caps or any(caps) != all(caps):
        return f"soft caps as config.json has them ({', '.join(_CAPS)})"
    return "attention in both directions" if config.get("use_bidirectional_attention") else ""


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _activation(config: Mapping[str, Any], architecture: GgufArchitecture) -> str:
    found = config.get("hidden_activation") or config.get("hidden_act") or architecture.activations[0]
    return "" if found in architecture.activations else f"the activation {found}"


def names_of(names: Sequence[str], architecture: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, str]:
    """For each of the checkpoint's `names` GGUF's. Raises `ModelLoadError` where there is none."""
    name_in_file = architecture.tensor_names(config["num_hidden_layers"])
    found = {}
    for name in names:
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target = name_in_file(name)
        if target is None:
            raise ModelLoadError(
                f"GGUF's architecture {architecture.name} has no place for the tensor {name}; convert to safetensors."
            )
        found[name] = target
    return found


def rope_factors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """By GGUF's names float32 [rotated values / 2]: what llama.cpp divides each frequency by."""
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            for length in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    half = _head_dim(config) // 2
    frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}


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
            _add_config(writer, architecture, config, model, dtype)
            add_tokenizer(writer, tokenizer, config)
            _add_sampling(writer, tokenizer / "generation_config.json")
            for name, shape, kind in tensors:
                writer.add_tensor_info(name, shape, torch.empty(0).numpy().dtype, nbytes_of(shape, kind), kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % ALIGNMENT)


def header_from(file: GgufFile, dtype: GgufDtype, tensors: Sequence[tuple[str, tuple[int, ...], Type]]) -> bytes:
    """The same for other `tensors` of the model that `file` is, or is the first part of: what it says stays."""
    kept = [key for key in file.header.spans if not key.startswith(_OF_ONE_FILE)]
    numbers = {"general.file_type": int(dtype.file_type), "general.quantization_version": gguf.GGML_QUANT_VERSION}
    number = struct.Struct("<II")
    said = [file.raw_entry(key) for key in kept]
    said += [_text(key) + number.pack(gguf.GGUFValueType.UINT32, value) for key, value in numbers.items()]
    infos, offset = [], 0
    for name, shape, kind in tensors:
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        infos.append(_text(name) + place)
        offset += -(-nbytes_of(shape, kind) // ALIGNMENT) * ALIGNMENT
    begin = struct.pack("<IIQQ", gguf.GGUF_MAGIC, gguf.GGUF_VERSION, len(tensors), len(said))
    header = b"".join([begin, *said, *infos])
    return header + bytes(-len(header) % ALIGNMENT)


# Keys that tell of how a file is stored.
_OF_ONE_FILE = ("split.", "general.alignment", "general.file_type", "general.quantization_version", "quantize.")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _add_sampling(writer: gguf.GGUFWriter, generation: Path) -> None:
    """What `generation`, a generation_config.json, recommends. Raises `ModelLoadError`."""
    recommended = read_json(generation) if generation.is_file() else {}
    for key, name in SAMPLING.items():
        if isinstance(value := recommended.get(name), int | float):
            getattr(writer, f"add_sampling_{key}")(int(value) if key == "top_k" else float(value))


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the layers that see all of the text."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = found.get("full_attention", found)
    original = {name: config[name] for name in ("original_max_position_embeddings",) if config.get(name) is not None}
    return {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": "default", **original, **found}


def _rope_scaling(config: Mapping[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    rope = _rope(config)

    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(int(original))

    def long(writer: gguf.GGUFWriter) -> None:
        original = int(rope["original_max_position_embeddings"])
        longer = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
        )

    if rope["rope_type"] in ("default", "llama3"):  # llama3: a tensor of factors
        return lambda writer: None
    plain = all(rope.get(name) in (None, usual) for name, usual in _USUAL.items())
    if rope["rope_type"] in ("linear", "yarn") and plain:
        return scaled
    if rope["rope_type"] == "longrope" and plain and rope.get("factor") is None:
        return long
    raise ModelLoadError(
        f"Rotary embeddings of type {rope['rope_type']!r}, as config.json has them, are not written as GGUF; "
        "convert to safetensors."
    )


# What readers of files take for granted of scaled positions.
_USUAL = {
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim")),
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}


def _add_config(
    writer: gguf.GGUFWriter, architecture: GgufArchitecture, config: Mapping[str, Any], name: str, dtype: GgufDtype
) -> None:
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
    writer.add_rope_dimension_count(int(head_dim * _rope(config).get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    _rope_scaling(config)(writer)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for key, word in (architecture.settings or {}).items():  # scales, of what is written
        writer.add_float32(f"{architecture.name}.{key}", config[word])
    if architecture.windows and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture.soft_caps:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
