"""What the GPU's decoder hands over of what layers read, for draft heads, interpreted on the CPU."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.progress import ProgressCounter
from services.executor.gpu.decoder import GpuDecoder
from services.executor.worker.runner import NO_POOLS
from tests.unit.executor.cpu.test_taps import states_read
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.model.ring import Script


@pytest.mark.parametrize(
    "model_type", ["gemma2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("granite", "qwen2_moe"))]
)
def test_hands_over_what_layers_read(tmp_path: Path, model_type: str) -> None:
    """With norms behind layers, with scaled residuals, with experts: others share all of their code with these."""
    directory = small_model(tmp_path, model_type)
    decoder = runner_of(directory, SingleRank())._decoder
    assert isinstance(decoder, GpuDecoder)
    script = Script([8])
    plan, _ = script.step({0: 8})
    for layers in ((), (0, 1, 1)):
        *_, states = decoder.forward_with_states(plan, ProgressCounter.unread(), NO_POOLS, layers)
        expected = states_read(directory, script.sequences[0][:8], layers, torch.float32)
        torch.testing.assert_close(states, torch.cat(expected, dim=-1), rtol=1e-3, atol=1e-4)
