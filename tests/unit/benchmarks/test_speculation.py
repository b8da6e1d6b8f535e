"""The benchmark of speculation, on a tiny model with a draft model: all kinds say the same greedy texts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import speculation
from services.executor.native import library
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.worker.test_draft_model import model_in


@pytest.mark.slow
@pytest.mark.skipif(bool(library.why_not()), reason=f"native kernels: {library.why_not()}")
def test_each_kind_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "KV_MEMORY", 64 << 20)
    model, draft = (
        model_in(tmp_path / name, None, "llama", max_position_embeddings=speculation.CONTEXT)
        for name in ("model", "draft")
    )
    prompts = np.random.default_rng(4).integers(64, size=(4, 24)).tolist()
    requests = [
        GenerationRequest(str(number), "r", "m", "c", prompt, 32, SamplingParams(0.0))
        for number, prompt in enumerate(prompts)
    ]
    with speculation.engine_of(model, str(draft), "bf16", 1, "cpu") as engine:
        found = speculation.measure(engine, requests, 1, 1, 4)
    rows = speculation.rows_of("words", 1, found)
    assert [row[2] for row in rows] == ["none", "n-gram", "draft model"]
    assert all(row[-1] == "4/4" for row in rows)
    assert found["none"].drafted == 0 < found["draft model"].drafted
