"""Small models with a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.executor.model.tiny import make_model

TOKENIZER: dict[str, Any] = {
    "added_tokens": [
        {"id": 0, "content": "<|end|>", "special": True},
        {"id": 1, "content": "<|begin|>", "special": True},
        {"id": 2, "content": "<plain>", "special": False},
    ],
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
    },
    "model": {
        "type": "BPE",
        "vocab": {"a": 3, "b": 4, "ab": 5, "Ġ": 6, "Ġab": 7},
        "merges": [["a", "b"], "Ġ ab"],
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
