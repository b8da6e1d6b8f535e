"""Whether the checks of whole models see what is wrong: on the CPU, by the kernels as they are interpreted."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's decoder runs where Triton is")

from benchmarks.on_gpu import correctness
from benchmarks.on_gpu.bench import Bench, read_rows
from services.executor.gpu.kernels import attention_launch

CPU = torch.device("cpu")


def test_the_tokens_of_a_prompt_differ() -> None:
    assert len(set(correctness.different_ids(40, 250))) > 30


def test_a_model_that_attends_to_too_few_keys_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one key: the last block's first one."""
    assert correctness._logit_error("llama", CPU) < correctness.LOGITS
    real = attention_launch.attend

    def short(
        query: torch.Tensor, layer: attention_launch.Layer, batch: attention_launch.Batch, *rest: object
    ) -> None:
        real(query, layer, batch._replace(context_lens=(batch.context_lens - 1).clamp(min=1)), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_launch, "attend", short)
    assert correctness._logit_error("llama", CPU) > 10 * correctness.LOGITS


@pytest.mark.parametrize(
    ("noise", "verdicts"), [(1.0, [True, True]), (1.5, [True, False]), (60.0, [False, False])]
)
def test_a_bf16_model_is_judged_by_transformers_own(
    noise: float, verdicts: list[bool], tmp_path: Path
) -> None:
    bench = Bench(CPU, False, tmp_path / "rows.jsonl", 1.0, clock=lambda: 0.0)
    generator = torch.Generator().manual_seed(1)
    true = torch.randn((2048, 256), generator=generator)
    errors = torch.randn((2, 2048, 256), generator=generator) * 0.01
    correctness._judge(bench, "a model", true, true + noise * errors[0], true + errors[1])
    assert [row.ok for row in read_rows(bench.rows)] == verdicts
