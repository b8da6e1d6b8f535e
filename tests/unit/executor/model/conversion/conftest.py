"""Small models with a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.executor.model.tiny import make_model

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BEGIN = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<|end|>", "special": True, **PLAIN},
        {"id": 1, "content": "<|begin|>", "special": True, **PLAIN},
        {"id": 2, "content": "<plain>", "special": False, **PLAIN},
    ],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [BEGIN, TEXT],
        "pair": [BEGIN, TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [1], "tokens": ["<|begin|>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {"<|end|>": 0, "<|begin|>": 1, "<plain>": 2, "a": 3, "b": 4, "ab": 5, "Ġ": 6, "Ġab": 7},
        "merges": [["a", "b"], ["Ġ", "ab"]],
    },
}

MakeModel = Callable[..., Path]


@pytest.fixture
def model_of(tmp_path: Path) -> MakeModel:
    """Makes a random fp32 model of a type, with its tokenizer."""

    def make(model_type: str, **changes: Any) -> Path:
        directory = make_model(tmp_path / model_type, model_type, **changes)
        (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
        return directory

    return make
