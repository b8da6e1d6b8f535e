"""Checkpoints with heads for multi-token prediction are served without them, and say so."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.model.conversion.inspection import inspect
from services.executor.model.loading.loader import load_model
from services.executor.model.loading.prediction_heads import PredictionHeads, heads_among, is_of_heads
from shared.errors import ModelLoadError
from tests.unit.executor.model.ring import CPU
from tests.unit.executor.model.tiny import build, settings_for

CONFIG = SimpleNamespace(num_hidden_layers=3, num_nextn_predict_layers=1)
HEADS = ["mtp.fc.weight", "model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"]


@pytest.mark.parametrize(
    ("name", "of_heads"),
    [
        *((name, True) for name in HEADS),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("model.mtp_block.0.mlp.up_proj.weight", True),
        ("language_model.mtp.layers.0.fc.weight", True),
        ("model.layers.2.mlp.up_proj.weight", False),
        ("model.layers.4.eh_proj.weight", False),
        ("model.smtp.weight", False),
    ],
)
def test_names(name: str, of_heads: bool) -> None:
    assert is_of_heads(name, CONFIG) == of_heads
    assert not is_of_heads("model.layers.3.eh_proj.weight", SimpleNamespace(num_hidden_layers=3))


def test_bytes_are_counted() -> None:
    assert heads_among([*HEADS, "lm_head.weight"], CONFIG, len) == PredictionHeads(3, sum(map(len, HEADS)))


def load(directory: Path) -> None:
    layout = ShardLayout.of(HeadCounts(4, 2, 16), 1, 0)
    load_model(directory, torch.float32, layout, SingleRank(), CPU, lambda done, total: None)


def test_a_checkpoint_with_heads_is_served_without_them(tmp_path: Path) -> None:
    settings = settings_for("glm4_moe", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    layers = settings["num_hidden_layers"]
    build("glm4_moe", settings).save_pretrained(str(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    heads = {
        f"model.layers.{layers}.eh_proj.weight": torch.zeros(4, 8),
        f"model.layers.{layers}.mlp.experts.0.up_proj.weight": torch.zeros(4, 4),
        "mtp.norm.weight": torch.zeros(2),
    }
    save_file(tensors | heads, path, {"format": "pt"})
    with capture_logs() as logs:
        load(tmp_path)
    (said,) = (log for log in logs if log["event"] == "prediction_heads_left_out")
    assert (said["tensors"], said["bytes"]) == (3, 4 * (32 + 16 + 2))
    facts = inspect(tmp_path)
    assert facts.prediction_heads == PredictionHeads(3, 200)
    assert facts.refused == ""
    save_file(tensors | {"model.layers.0.other.weight": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"hold a tensor model\.layers\.0\.other\.weight"):
        load(tmp_path)
