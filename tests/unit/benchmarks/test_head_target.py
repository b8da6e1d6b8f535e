"""A model is made whose heads are right as often as wanted, and speculation with them is measured."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import head_target, speculation
from benchmarks.errors import BenchError
from services.executor.native import library
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.worker.drafting_ring import Generated, ring_of
from tests.unit.executor.worker.test_draft_model import PROMPT, model_in

natively = pytest.mark.skipif(bool(library.why_not()), reason=f"native kernels: {library.why_not()}")


def test_only_of_llamas_and_in_a_new_directory(tmp_path: Path) -> None:
    other = model_in(tmp_path / "other", None, "qwen3")
    with pytest.raises(BenchError, match="is no Llama"):
        head_target.make(other, tmp_path / "made", 2.0, 0.7, 1)
    with pytest.raises(BenchError, match="holds something already"):
        head_target.make(model_in(tmp_path / "small"), other, 2.0, 0.7, 1)


@pytest.mark.slow
@natively
def test_its_heads_are_right_as_often_as_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "KV_MEMORY", 64 << 20)
    small = model_in(
        tmp_path / "small",
        None,
        "llama",
        num_hidden_layers=2,
        vocab_size=4096,
        max_position_embeddings=speculation.CONTEXT,
    )
    made = tmp_path / "made"
    share = head_target.make(small, made, 3.0, 0.7, 1)
    assert 0.5 < share < 0.9
    for number, (draft, dtype) in enumerate((("mtp", "bf16"), (made / "eagle3", "fp32"))):
        place = tmp_path / str(number)
        place.mkdir()
        with ring_of(place, made, draft, dtype=dtype) as ring:
            drafted = [
                Generated(ring, [*PROMPT, at], SamplingParams(temperature=0.0), rewrites=True).run(20, 1)
                for at in range(100, 104)
            ]
        right = sum(one.accepted for one in drafted) / sum(one.proposed for one in drafted)
        assert 0.4 < right < 0.95, (draft, right)
    prompts = np.random.default_rng(4).integers(4096, size=(4, 24)).tolist()
    requests = [
        GenerationRequest(str(number), "r", "m", "c", prompt, 32, SamplingParams(0.0))
        for number, prompt in enumerate(prompts)
    ]
    with speculation.engine_of(made, "mtp", "bf16", 1, "cpu") as engine:
        rows = speculation.rows_of("words", 1, speculation.measure(engine, requests, 1, 1, 4))
    assert [row[2] for row in rows] == ["none", "n-gram", "draft head"]
    assert all(row[-1] == "4/4" for row in rows)
