"""Vocabularies spelled in two ways, and a model whose tokens have other numbers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

SPECIAL = ["<s>", "</s>"]


def in_pieces(texts: Sequence[str]) -> list[str]:
    """As SentencePiece spells them."""
    return [text.replace(" ", "\u2581") for text in texts]


def in_bytes(texts: Sequence[str]) -> list[str]:
    """As byte-level BPE spells them."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [spelled.pre_tokenize_str(text)[0][0] for text in texts]


def tokenizer_in(directory: Path, names: Sequence[str], **config: object) -> Path:
    """A directory with a tokenizer of `names`, behind which `SPECIAL` come; `config`: of config.json."""
    directory.mkdir(exist_ok=True)
    is_pieces = any("\u2581" in name for name in names)
    replaced = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    of_pieces = {"type": "Sequence", "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(names) + at, "content": text, **flags} for at, text in enumerate(SPECIAL)]
    vocab = {name: token for token, name in enumerate(names)}
    file = {
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor")),
        "version": "1.0",
        "added_tokens": added,
        "decoder": of_pieces if is_pieces else of_bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": is_pieces},
    }
    (directory / "tokenizer.json").write_text(json.dumps(file))
    if config:
        path = directory / "config.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**before, **config}))
    return directory


def renumbered(model: Path, directory: Path, tokens: Sequence[int]) -> Path:
    """A copy of `model` whose token t is `tokens[t]` of the model."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if "embed_tokens" in name or "lm_head" in name:
            weights[name] = weights[name][torch.tensor(list(tokens))].contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
