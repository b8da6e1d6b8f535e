"""Log probabilities of prompts on the GPU's way, interpreted on the CPU: its decoder, and graphs of decodes."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.graphs import GraphedDecoder
from services.executor.gpu.steps import StepLimits
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, runner_of, small_model
from tests.unit.executor.model.tiny import reference_logits
from tests.unit.executor.sampling import test_prompt_logprobs as scores

PROMPTS = {"s0": [5, 9, 7, 11, 3, 2], "s1": [8, 6], "s2": [4, 1, 30]}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted attention costs most."""
    monkeypatch.setattr(scores, "prompts", lambda: PROMPTS)


@pytest.mark.parametrize(
    ("model_type", "world_size"),
    [
        ("llama", 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("gemma2", 1), ("llama", 1), ("gemma2", 2))
        ),
    ],
)
def test_they_equal_transformers(tmp_path: Path, model_type: str, world_size: int) -> None:
    directory = small_model(tmp_path, model_type)
    truth = dict(zip(PROMPTS, reference_logits(directory, list(PROMPTS.values())), strict=True))

    def work(collectives: Collectives) -> dict[str, list[scores.Row]]:
        runner = runner_of(directory, collectives)
        assert isinstance(runner._decoder, GpuDecoder)
        return scores.served(runner, leads=collectives.rank == 0, chunk=5)

    assert scores.worst_error(on_gpu_ring(world_size, work)[0], truth) < scores.TOLERANCE


@pytest.mark.nightly
def test_steps_of_single_tokens_are_replayed_from_graphs(tmp_path: Path) -> None:
    """A chunk of one token is a decode to the graphs, whatever is made of its row."""
    directory = small_model(tmp_path, "llama", num_hidden_layers=1)
    truth = dict(zip(PROMPTS, reference_logits(directory, list(PROMPTS.values())), strict=True))

    def work(collectives: Collectives) -> dict[str, list[scores.Row]]:
        runner = runner_of(directory, collectives, limits=StepLimits(4, 5, 64, 1 << 30))
        runner.warm_up()
        assert isinstance(runner._decoder, GraphedDecoder)
        return scores.served(runner, leads=True, chunk=4)

    assert scores.worst_error(on_gpu_ring(1, work)[0], truth) < scores.TOLERANCE
