"""What is trained is what transformers and peft would train: log probabilities and gradients, packed or alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.models import (
    backward,
    backward_of_peft,
    batch_of,
    reference,
    trainable,
    worst,
)

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("mistral", {"sliding_window": 9}),
    ("phi3", {}),
    ("granite", {"logits_scaling": 3.0}),
]


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_gradients_are_those_of_peft(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    directory = make_model(tmp_path / "model", model_type, **changes)
    model, batch = trainable(directory), batch_of()
    ours, gradients = backward(model, batch)
    theirs, expected = backward_of_peft(reference(directory), model, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert worst(gradients, expected) < 1e-5
