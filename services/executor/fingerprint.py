"""What a seed's text depends on, as one short name: of the model's files and of how they are computed."""

import hashlib
from pathlib import Path

from services.executor.settings import ExecutorSettings
from shared.messages import ModelCard

_SAMPLE = 1 << 16
"""Bytes of the end of each weights file that are looked at, beside its name and size."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SETTINGS = (
    "engine",
    "dtype",
    "weight_dtype",
    "device",
    "tp",
    "kv_dtype",
    "kv_dtype_layers",
    "block_size",
    "collectives",
)


def fingerprint_of(settings: ExecutorSettings, card: ModelCard, numerics: str) -> str:
    """`fp_` and ten hexadecimal digits; the same for rings that draw the same tokens of the same seed, which
    compute with the same `numerics` (`EngineSpec`)."""
    parts = [card.tokenizer, card.fingerprint, str(card.vocab_size), numerics]
    parts += [f"{name}={getattr(settings, name)}" for name in _SETTINGS]
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


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
