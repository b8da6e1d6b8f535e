"""LoRA adapters in the GPU's decoder, interpreted on the CPU, against models that peft has merged them into."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, as_int32, to_bytes
from services.executor.gpu.adapters import AdaptedProduct
from services.executor.gpu.kernels import low_rank
from services.executor.model.adapters.files import LowRank
from services.executor.model.adapters.targets import targets_of
from services.executor.model.loading.loader import build_split, load_config
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, runner_of, small_model, small_script
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in
from tests.unit.executor.model.tiny import logits_of

SLOTS = (1, -1, 0)  # of each sequence of `small_script`
STEPS = ({0: 3, 1: 2}, {1: 1, 0: 1, 2: 1})


class Adapted:
    """A small model with two adapters."""

    def __init__(self, directory: Path, model_type: str) -> None:
        self.model_type = model_type
        self.directory = small_model(directory / "base", model_type)
        base, self.targets = base_of(self.directory), targets_in(self.directory)
        self.paths = [directory / "first", directory / "second"]
        sequences = small_script().sequences
        merged = [
            logits_of(save_adapter(base, path, self.targets, rank), sequences)
            for path, rank in zip(self.paths, (5, 24), strict=True)
        ]
        plain = logits_of(base, sequences)
        self.expected = [plain[index] if slot < 0 else merged[slot][index] for index, slot in enumerate(SLOTS)]

        changed = max(float((a - b).abs().max()) for a, b in zip(self.expected, plain, strict=True))
        assert changed > 0.05, "adapters that change nothing prove nothing"
        self.plain = plain

    def furthest(self, collectives: Collectives, limits: StepLimits | None = None) -> float:
        """From what the merged models compute; 0 but on the leader."""
        runner = runner_of(self.directory, collectives, limits=limits)
        assert (runner._decoder is None) == (self.model_type == "olmoe")
        config = load_config(self.directory)
        layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
        share = build_split(config, torch.float32, layout, collectives)
        runner.serve_adapters(targets_of(share), torch.float32, 3, 32)
        if limits is not None:
            runner.warm_up()
        script, worst = small_script(), 0.0
        loads = [(slot, str(path)) for slot, path in enumerate(self.paths)]
        for index, tokens in enumerate(STEPS):
            plan, sampled = script.step(dict(tokens), every_token=True)
            order = [script.state_slots.index(slot) for slot in as_int32(plan.state_slots).tolist()]
            slots = to_bytes([SLOTS[sequence] for sequence in order])
            logits = runner.forward(structs.replace(plan, adapters=slots, adapter_loads=[] if index else loads))
            for row, (sequence, at) in zip(() if logits is None else logits, sampled, strict=False):
                worst = max(worst, float((row - self.expected[sequence][at]).abs().max()))
        if limits is not None:
            graphs = runner._steps._graphs
            assert list(graphs._with_adapters) == [4], "three decodes are replayed by a graph of four"
        return worst


@pytest.mark.parametrize(
    ("model_type", "ranks"),
    [
        ("qwen2_moe", 1),
        pytest.param("olmoe", 1, marks=pytest.mark.nightly),  # experts' kernels beside PyTorch
        *(pytest.param(family, 2, marks=pytest.mark.nightly) for family in ("llama", "phi3", "qwen2_moe")),
    ],
)
def test_rows_of_a_step_use_their_own_adapters(tmp_path: Path, model_type: str, ranks: int) -> None:
    model = Adapted(tmp_path, model_type)
    assert max(on_gpu_ring(ranks, model.furthest)) < 1e-4


@pytest.mark.slow
def test_graphs_of_steps_with_adapters_are_made_as_they_come(tmp_path: Path) -> None:
    model = Adapted(tmp_path, "llama")
    assert model.furthest(SingleRank(), StepLimits(4, 16, 32, 1 << 30)) < 1e-4


def test_gate_and_up_projections_of_experts_have_the_ranks_of_both() -> None:
    """peft may hold them apart: of an adapter of rank 24, their factors are of 48. The rows lie apart."""
    count, inputs, outputs, rank = 3, 40, 24, 24
    name = "model.layers.0.mlp.experts.gate_up_proj"
    product = AdaptedProduct([name], [outputs], torch.device("cpu"))
    product.reserve(2, rank)
    random = torch.Generator().manual_seed(1)
    a = torch.randn((count, 2 * rank, inputs), generator=random)
    b = torch.randn((count, outputs, 2 * rank), generator=random)
    product.load(1, {name: LowRank(a, b)})
    x = torch.randn((2, inputs + 7), generator=random)[:, :inputs]
    chosen = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    pairs = low_rank.pairs_by_slot(torch.tensor([1, 1], dtype=torch.int32), chosen, 2, count)
    found = product.add(x, torch.zeros(4, outputs), pairs).view(2, 2, outputs)
    exact = torch.einsum("tkor,tkri,ti->tko", b[chosen].double(), a[chosen].double(), x.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)
