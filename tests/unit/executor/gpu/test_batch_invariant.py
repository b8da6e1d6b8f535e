"""`--batch-invariant`: every row has the bits that it has alone, in the interpreter and on a GPU that is not there."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.served import served
from services.executor.collectives.base import InRankOrder, SingleRank
from services.executor.core.progress import ProgressCounter
from services.executor.core.step_plan import StepLimits
from services.executor.gpu.kernels import matmul
from services.executor.gpu.linear import invariant_product
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.weight_formats import Quantized
from shared.errors import ModelLoadError
from tests.pretend_gpu.device import pretend_gpu
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.gpu.texts import GREEDY, ONE_LAYER, requests, texts
from tests.unit.executor.model.ring import Script, on_ring

LIMITS = StepLimits(3, 16, 32, 1 << 30, batch_invariant=True)


@pytest.mark.parametrize("codec", [FP8, pytest.param(None, marks=pytest.mark.nightly)], ids=str)
def test_a_row_of_a_product_has_the_bits_that_it_has_alone(
    codec: Codec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MOST_ROWS", 64)  # so that rows are multiplied in several turns
    random = torch.Generator().manual_seed(2)
    dtype = torch.float32 if codec is None else torch.bfloat16
    values = torch.randn((70, 1100), generator=random)
    weight = values if codec is None else Quantized(*codec.encode(values))
    product = invariant_product(weight, torch.randn(70, generator=random).to(dtype))
    x = torch.randn((67, 1100), generator=random).to(dtype)
    whole = product(x)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 20), slice(60, 67)):
        assert torch.equal(product(x[rows]), whole[rows])
    plain = values if codec is None else codec.decode(*codec.encode(values))
    expected = x.double() @ plain.double().T + product._bias.double()  # type: ignore[attr-defined]
    torch.testing.assert_close(whole.double(), expected, rtol=2**-7, atol=2e-2)


def test_sums_are_taken_in_the_ranks_order() -> None:
    """In another order these would be 1, not 0."""
    numbers = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 512.0, -512.0)]
    found = on_ring(3, lambda ring: InRankOrder(ring).all_reduce(numbers[ring.rank].clone()).item())
    assert found == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", 1),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.nightly),
        pytest.param("gemma3_text", 2, marks=pytest.mark.nightly),
    ],
)
def test_rows_have_the_same_bits_however_steps_are_cut(tmp_path: Path, model_type: str, layers: int) -> None:
    """Alone and beside others, token by token through graphs and in chunks; gemma3 has windows."""
    directory = small_model(tmp_path, model_type, num_hidden_layers=layers)

    def logits_of(steps: Sequence[dict[int, int]]) -> Tensor:
        runner = runner_of(directory, SingleRank(), torch.bfloat16, codec=INT8, limits=LIMITS)
        assert runner.is_exact
        runner.warm_up()  # which captures graphs
        script, rows = Script([9, 5], compresses=True), []
        for step in steps:
            plan, sampled = script.step(dict(step), every_token=True)
            found = runner.forward(plan, ProgressCounter.unread())
            assert isinstance(found, Tensor)
            rows += [row.clone() for row, (sequence, _) in zip(found, sampled, strict=True) if not sequence]
        return torch.stack(rows)

    whole = logits_of([{0: 9}])
    assert torch.equal(logits_of([{0: 1}] * 9), whole)
    assert torch.equal(logits_of([{0: 3, 1: 2}, {0: 5, 1: 1}, {0: 1, 1: 2}]), whole)


@pytest.mark.slow
def test_a_text_is_the_same_whatever_is_computed_beside_it_and_after_a_kill() -> None:
    """A whole engine: another ring that continues an answer computes its prompt and what was said in chunks."""
    options = {"kv_dtype": "int8", "kv_memory": 1 << 20, "max_sequences": 2, "context_length": 64}
    options |= {"max_batch_tokens": 16, "batch_invariant": True, "prefix_caching": False, "cuda_graphs": "all"}
    prompts = [[7 * at % 250 + 3 for at in range(length)] for length in (17, 20)]
    wanted = requests(prompts, (GREEDY, GREEDY), 4)
    with pretend_gpu() as gpu:
        from tests.unit.executor.gpu.test_on_pretend_gpu import GPU

        del gpu
        with served(ONE_LAYER, GPU, **options) as ring:
            assert ring.spec.exact
            assert "batch-invariant" in ring.spec.numerics
            both, _ = texts(ring, wanted, ahead=True)
            alone, _ = texts(ring, wanted[:1], ahead=False)
            assert alone == both[:1]
            continued = requests([prompts[0] + both[0][:2]], (GREEDY,), 2)
            assert texts(ring, continued, ahead=False)[0] == [both[0][2:]]


def test_a_model_that_the_decoder_does_not_compute_is_refused(tmp_path: Path) -> None:
    directory = small_model(tmp_path, "llama", hidden_act="relu")
    with pytest.raises(ModelLoadError, match="--batch-invariant is for models"):
        runner_of(directory, SingleRank(), limits=LIMITS)
