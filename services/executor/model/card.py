"""What the files of a model directory tell beside the weights: the card that the others get."""

import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.executor.core.engine import EngineSpec, with_tasks
from services.executor.model.catalogue import check_supported, is_encoder
from services.executor.model.loading.gguf_metadata import check_sampling
from services.executor.model.pooling import matryoshka_dimensions, read_prompts
from services.executor.model.tokenizer_files import read_bundle, read_json
from shared.errors import ModelLoadError
from shared.messages import ModelCard
from shared.models import GGUF, linked_gguf

_SAMPLE = 1 << 16  # bytes of the end of each weights file that are looked at, beside its name and size
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_LONGEST_NAME = 64  # characters of an architecture or a method that others are told
# Names of GGUF files end with how they are quantized.
_GGUF_NAME = re.compile(r"[-.](I?Q\d\w*|BF16|F16|F32|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_card(directory: Path, model: str, spec: EngineSpec, *, checked: bool = False) -> tuple[ModelCard, bytes]:
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
        eos_token_ids=_checked_ends(directory, end_tokens(config, generation), spec),
        tokenizer=hashlib.sha256(bundle).hexdigest(),
        created=int(time.time()),
        fingerprint=files_digest(directory),
        defaults=_defaults(directory / "generation_config.json", generation),
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


def _checked_ends(directory: Path, ends: list[Any], spec: EngineSpec) -> list[int]:
    """Raises `ModelLoadError` for what no token can be: a text would never end."""
    for end in ends if spec.generates else ():
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < spec.vocab_size:
            raise ModelLoadError(
                f"The configuration in {directory} says eos_token_id {end!r:.40}, which is no token of the model; "
                "fetch it again."
            )
    return ends


def _defaults(path: Path, generation: dict[str, Any]) -> dict[str, float]:
    """Raises `ModelLoadError` for what cannot be."""
    found = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
    for name, value in found.items():
        check_sampling(path, name, value)
    return found


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


def adapter_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Inputs and outputs of all linears of a name together: an adapter of rank r has r times as many numbers. By the
    names of Llama's linears, which are apart; a model that has some of them in one is not wider. Empty where the
    configuration does not tell."""
    text = config.get("text_config")
    facts: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    hidden, layers = _number(facts, "hidden_size", "n_embd"), _number(facts, "num_hidden_layers", "n_layer")
    heads = _number(facts, "num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        return {}
    head = _number(facts, "head_dim") or hidden // heads
    queries, keys = heads * head, (_number(facts, "num_key_value_heads") or heads) * head
    inner = _number(facts, "intermediate_size", "n_inner") or 4 * hidden
    of_layer = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return {name: layers * width for name, width in of_layer.items()}


def _number(facts: Mapping[str, Any], *names: str) -> int:
    """The largest, where each layer has its own."""
    for name in names:
        value = facts.get(name)
        values = value if isinstance(value, list) else [value]
        if numbers := [one for one in values if isinstance(one, int)]:
            return max(numbers)
    return 0


def encoder_config(directory: Path) -> Any:
    """The transformers configuration of the encoder in `directory`; None: the model is none. Raises
    `ModelLoadError`."""
    if not is_encoder(read_json(directory / "config.json")):
        return None
    from services.executor.model.loading.config_file import load_config  # with transformers, which takes seconds

    config = load_config(directory)
    check_supported(config)
    return config


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
