"""What the files of a model directory tell beside the weights: the card that the others get, and the tokenizer's files
for the gateways."""

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from services.executor.core.engine import EngineSpec, with_tasks
from services.executor.model.adapters.widths import adapter_widths
from services.executor.model.catalogue import check_supported, is_encoder
from services.executor.model.pooling import matryoshka_dimensions, read_prompts
from shared.errors import ModelLoadError
from shared.messages import ModelCard, TokenizerBundle
from shared.models import GGUF, linked_gguf
from shared.nats.bus import encode

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)
_SAMPLE = 1 << 16
"""Bytes of the end of each weights file that are looked at, beside its name and size."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_LONGEST_NAME = 64
"""Characters of an architecture or a method that others are told."""
_GGUF_NAME = re.compile(r"[-.](I?Q\d\w*|BF16|F16|F32|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
"""Names of GGUF files end with how they are quantized."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_card(
    directory: Path, model: str, spec: EngineSpec, *, checked: bool = False
) -> tuple[ModelCard, bytes]:
    """(card, tokenizer bundle) of the model in `directory`. `checked`: the tokenizer is known to be one. Raises
    `ModelLoadError`."""
    bundle = read_bundle(directory, checked=checked)
    prompts, default_prompt = read_prompts(directory)
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    card = ModelCard(
        model=model,
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=end_tokens(config, generation),
        tokenizer=hashlib.sha256(bundle).hexdigest(),
        created=int(time.time()),
        fingerprint=files_digest(directory),
        defaults={name: generation[name] for name in DEFAULTS if generation.get(name) is not None},
        matryoshka_dimensions=matryoshka_dimensions(config),
        prompts=prompts,
        default_prompt=default_prompt,
        architecture=str(config.get("model_type") or "")[:_LONGEST_NAME],
        weights=stored_as(directory, config),
        adapter_widths=adapter_widths(config) if spec.generates else {},
    )
    return with_tasks(card, spec), bundle


def end_tokens(config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """What ends a text, as config.json and generation_config.json say it."""
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return [eos] if isinstance(eos, int) else list(eos or [])


def stored_as(directory: Path, config: dict[str, Any]) -> str:
    """How the files of the model in `directory` hold its weights (`ModelCard.weights`)."""
    if links := linked_gguf(directory):
        named = _GGUF_NAME.search(links[0].resolve().name)
        return f"{GGUF} {named[1].upper()}" if named else GGUF
    inner = config.get("text_config") or {}
    quantization = config.get("quantization_config") or inner.get("quantization_config") or {}
    if method := quantization.get("quant_method"):
        return str(method).upper()[:_LONGEST_NAME]
    given = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return _DTYPES.get(str(given), "")


def encoder_config(directory: Path) -> Any:
    """The transformers configuration of the encoder in `directory`; None: the model is none. Raises
    `ModelLoadError`."""
    if not is_encoder(read_json(directory / "config.json")):
        return None
    from services.executor.model.loading.config_file import (
        load_config,
    )  # with transformers, which takes seconds

    config = load_config(directory)
    check_supported(config)
    return config


def read_bundle(directory: Path, *, checked: bool = False) -> bytes:
    """The tokenizer's files, as they travel. `checked`: they can be used, which takes seconds to find out."""
    files = {
        name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()
    }
    if "tokenizer.json" not in files:
        raise ModelLoadError(
            f"The directory {directory} has no tokenizer.json, which gateways need; save the model's fast "
            "tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    if not checked:
        _check_tokenizer(directory / "tokenizer.json")
    for name in set(files) - {"tokenizer.json", "chat_template.jinja"}:
        read_json(directory / name)
    return encode(TokenizerBundle(files))


def _check_tokenizer(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # takes seconds

    try:
        PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"The file {path} cannot be used ({error}); fetch the model again.") from None


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"The file {path} is not JSON ({error}); fetch the model again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"The file {path} is not a JSON object; fetch the model again.")
    return content


def files_digest(directory: Path) -> str:
    """Of the weights in `directory`: names, sizes and a sample, since to read all would take as long as to load."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHTS and path.is_file():
            digest.update(f"{path.name}:{path.stat().st_size}:".encode() + _end_of(path))
    return digest.hexdigest()


def files_stamp(directory: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of change of the weights and the configuration in `directory`: others, where any of them
    has been written anew. Of this host alone."""
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.iterdir())
        if (path.suffix in _WEIGHTS or path.name == "config.json") and path.is_file()
    ]


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SAMPLE))
        return file.read()
