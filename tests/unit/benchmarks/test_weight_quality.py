"""The benchmark computes as the model does, and leaves it as it was."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.weight_quality import WAYS, computing, linears_of, read_text, widened
from services.executor.kv_cache.codecs import FP8, INT8
from tests.unit.executor.model.tiny import make_model, reference_logits

TEXTS = np.random.default_rng(5).integers(0, 131, (3, 40))


def test_each_way_changes_what_it_says_and_no_more(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    expected = torch.stack(reference_logits(directory, TEXTS.tolist()))
    known = torch.from_numpy(TEXTS[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), known, reduction="sum")
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    assert len(list(linears_of(model))) == 3 * 7
    losses = []
    for way in (*WAYS, WAYS[0]):
        with computing(model, way):
            reading = read_text(model, TEXTS, 2)
        losses.append(reading.loss)
    assert losses[0] == losses[-1] == pytest.approx(float(loss), rel=1e-5)
    assert len(set(losses)) == len(WAYS)
    assert all(abs(other / losses[0] - 1) < 0.05 for other in losses)


def test_a_rounded_row_is_near(tmp_path: Path) -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    most = rows.abs().amax(1, keepdim=True)
    assert bool(((widened(rows, INT8) - rows).abs() <= most / 253).all())
    assert bool(((widened(rows, FP8) - rows).abs() <= rows.abs() / 15.9 + most / 2**17).all())
