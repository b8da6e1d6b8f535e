"""What a GGUF file has to say of its model beside the tensors, and what it may recommend.

Readers take a default where a key is missing, which another model has: a file without its own values is refused, by the
key. Keys whose absence means something to every reader stay free: no chat template, unscaled rotary positions.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.executor.families.gguf_architectures import gguf_architecture
from services.executor.model.loading.gguf_tokenizer import GPT2_SPLITS, WHOLE
from shared.errors import ModelLoadError

if TYPE_CHECKING:  # with torch
    from services.executor.model.loading.gguf_file import GgufFile, Value


_SIZES = ("context_length", "embedding_length", "block_count", "attention.head_count")
# One of them: a model of experts alone has no other width.
_WIDTHS = ("feed_forward_length", "expert_feed_forward_length")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# By `tokenizer.ggml.model`, behind `tokenizer.ggml.`.
_OF_TOKENIZERS = {"gpt2": ("merges",), "llama": ("scores",)}

# Behind `general.sampling.`: what a file recommends, and generation_config.json's word for it.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Control tokens that end a text, then those that end a turn, by the names that models give them. Source: llama.cpp,
# llama-vocab.cpp.
_ENDS = (
    *("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|return|>"),
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|END_OF_TURN_TOKEN|>"),
)
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
}
_DIGITS = 6  # behind the point that are kept of a number of 32 bits


def check_described(files: "Sequence[GgufFile]") -> None:
    """Raises `ModelLoadError` where the files of a model do not say what it is built and its texts are tokenized by, or
    are of no architecture that is served."""
    file, header = files[0].path, files[0].header
    if (architecture := header.metadata.get("general.architecture")) is None:
        raise unsaid(file, "general.architecture")
    tokenizer = header.metadata.get(_TOKENIZER)
    row = gguf_architecture(header.metadata, [tensor.name for one in files for tensor in one.header.tensors])
    keys = [f"{architecture}.{name}" for name in (*_SIZES, *row.needs)]
    names = ["tokens", "token_type", *_OF_TOKENIZERS.get(str(tokenizer), ())]
    if tokenizer == "gpt2" and architecture not in GPT2_SPLITS and WHOLE not in header.spans:
        names.append("pre")
    if header.metadata.get("tokenizer.ggml.add_bos_token"):
        names.append("bos_token_id")
    keys += [_TOKENIZER, *(f"tokenizer.ggml.{name}" for name in names)]
    for either in (_WIDTHS, _EPSILONS):
        if not any(f"{architecture}.{name}" in header.spans for name in either):
            keys.append(f"{architecture}.{either[0]}")
    if missing := next((key for key in keys if key not in header.spans), None):
        raise unsaid(file, missing)


_TOKENIZER = "tokenizer.ggml.model"
CONTROL = 3  # of `tokenizer.ggml.token_type`


def end_tokens(file: "GgufFile") -> list[int]:
    """Tokens that end an answer, the text's own first: as `file` says, or where it says none by their names, as
    llama.cpp knows them. Raises `ModelLoadError` where there is none."""
    said = file.header.metadata
    listed = {key: said[key] for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id") in said}
    if wrong := next((key for key, token in listed.items() if not isinstance(token, int)), None):
        raise _cannot_be(wrong, listed[wrong])
    ends = [token for token in listed.values() if isinstance(token, int)]
    if "tokenizer.ggml.eos_token_id" not in listed:
        named = _ends_by_name(file)
        ends = [*named, *ends] if named else []  # what ends a turn does not say what ends a text
    last = said.get("tokenizer.ggml.seperator_token_id")
    if not ends and said.get(_TOKENIZER) == "bert" and isinstance(last, int):
        ends = [last]
    if not ends:
        raise unsaid(file.path, "tokenizer.ggml.eos_token_id")
    return list(dict.fromkeys(ends))


def _ends_by_name(file: "GgufFile") -> list[int]:
    tokens, kinds = (file.array(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    ids = {token: number for number, token in enumerate(tokens)}
    return [ids[name] for name in _ENDS if name in ids and kinds[ids[name]] == CONTROL]


def unsaid(file: Path, key: str) -> ModelLoadError:
    return ModelLoadError(
        f"The file {file} does not say {key}, without which the model cannot be built; fetch it again, or choose "
        "another."
    )


def positive(header: "Mapping[str, Value]", key: str, most: float = math.inf) -> int | float | None:
    """None where the file does not say it. Raises `ModelLoadError`."""
    value = header.get(key)
    if value is None or (isinstance(value, int | float) and 0 < value <= most):
        return value
    raise _cannot_be(key, value)


def sampling_of(header: "Mapping[str, Value]") -> dict[str, float]:
    """What a file recommends, in the words of generation_config.json. Raises `ModelLoadError` for what cannot be."""
    found: dict[str, float] = {}
    for key, name in SAMPLING.items():
        value = header.get(f"general.sampling.{key}")
        if value is None:
            continue
        if not isinstance(value, int | float) or not _is_possible(name, value):
            raise _cannot_be(f"general.sampling.{key}", value)
        found[name] = max(0, int(value)) if key == "top_k" else round(value, _DIGITS)
    return found


def check_sampling(path: Path, name: str, value: Any) -> None:
    """Of generation_config.json. Raises `ModelLoadError` for what cannot be."""
    if not _is_possible(name, value):
        raise ModelLoadError(f"The file {path} has an invalid {name}, {value!r:.40}; fetch it again.")


def _is_possible(name: str, value: Any) -> bool:
    least, most = _RANGES[name]
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _cannot_be(key: str, value: "Value") -> ModelLoadError:
    return ModelLoadError(f"The file has an invalid {key}, {value!r:.40}; fetch it again.")
