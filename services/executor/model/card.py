"""What the files of a model directory tell beside the weights: the card that the others get, the tokenizer's files for
the gateways, and how hidden states become one vector, after the files that sentence-transformers saves.

    modules.json           [{"path": "", ...Transformer}, {"path": "1_Pooling", ...Pooling}, {... "Normalize"}]
    1_Pooling/config.json  {"pooling_mode_mean_tokens": true, ...}

Without them the last token's state is taken, which in a decoder has seen all of the text. Vectors are always
brought to length 1. Source: sentence-transformers, `models.Pooling`.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import structlog

from services.executor.core.engine import EngineSpec, with_tasks
from shared.errors import ModelLoadError
from shared.messages import ModelCard, TokenizerBundle
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
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_card(
    directory: Path, model: str, spec: EngineSpec, *, checked: bool = False
) -> tuple[ModelCard, bytes]:
    """(card, tokenizer bundle) of the model in `directory`. `checked`: the tokenizer is known to be one. Raises
    `ModelLoadError`."""
    bundle = read_bundle(directory, checked=checked)
    generation = _read_json(directory / "generation_config.json")
    eos = generation.get("eos_token_id")
    if eos is None:
        config = _read_json(directory / "config.json")
        eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    card = ModelCard(
        model=model,
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
        tokenizer=hashlib.sha256(bundle).hexdigest(),
        created=int(time.time()),
        fingerprint=files_digest(directory),
        defaults={name: generation[name] for name in DEFAULTS if generation.get(name) is not None},
    )
    return with_tasks(card, spec), bundle


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
        _read_json(directory / name)
    return encode(TokenizerBundle(files))


def _check_tokenizer(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # takes seconds

    try:
        PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"The file {path} cannot be used ({error}); fetch the model again.") from None


def _read_json(path: Path) -> dict[str, Any]:
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


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SAMPLE))
        return file.read()


log = structlog.get_logger(__name__)

Pooling = Literal["", "mean", "last", "cls"]
"""Of all tokens, of the last, of the first; empty: the model's is none of these."""
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def read_pooling(directory: Path) -> Pooling:
    """The pooling of the model in `directory`; empty, with a word in the log, where it is not one of ours."""
    try:
        modules = _modules(directory)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if "Pooling" not in kinds:
            return "last"
        others = [kind for kind in kinds if kind not in _KNOWN]
        if others:
            log.warning("no_embeddings", reason=f"the model has modules that are not served: {others}")
            return ""
        place = directory / str(modules[kinds.index("Pooling")]["path"])
        found = _mode(json.loads((place / "config.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("no_embeddings", reason=f"the files of sentence-transformers cannot be read: {error}")
        return ""
    if not found:
        log.warning("no_embeddings", reason="the model pools in a way that is not served")
    return found


def _modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    return list(json.loads(path.read_bytes())) if path.is_file() else []


def _mode(config: dict[str, Any]) -> Pooling:
    if "pooling_mode" in config:
        return _NAMES.get(str(config["pooling_mode"]), "")
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    return _MODES.get(chosen[0], "") if len(chosen) == 1 else ""
