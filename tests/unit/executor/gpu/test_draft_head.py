"""Draft heads by the GPU's decoder, interpreted on the CPU, against their own modules."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.step_plan import StepLimits
from services.executor.gpu.draft_head import GpuHead, GraphedHead
from services.executor.gpu.graphs import Rerun
from services.executor.gpu.steps import GpuSteps
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.draft_heads import HeadModel
from services.executor.model.loading.draft_heads import HeadPlacement, LoadedHead, load_eagle3_head, load_mtp_head
from services.executor.model.lowering import lower
from services.executor.worker.backends.base import Backend, RunnerRequest
from services.executor.worker.runner import ModelRunner, widths_of
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script
from tests.unit.executor.worker.draft_heads import DEEPSEEK, NEXT, add_mtp_head, make_eagle3
from tests.unit.executor.worker.test_draft_model import model_in

LIMITS = StepLimits(max_sequences=2, max_batch_tokens=16, context_length=32, graph_memory=1 << 30)
STEPS = ({0: 4}, {0: 1, 1: 2}, {0: 1, 1: 1})
KINDS = ("eagle3", "eagle3 of normed states", "glm4_moe", "mellum")


def made(directory: Path, kind: str) -> tuple[Path, Path]:
    """The directories of a model and of its head."""
    if kind.startswith("eagle3"):
        model = model_in(directory / "model", num_hidden_layers=1)
        return model, make_eagle3(directory / "head", 144, norm_before_residual=kind != "eagle3")
    model = model_in(directory / "model", None, kind, **settings_of(kind))
    add_mtp_head(model, names=NEXT if kind == "mellum" else DEEPSEEK, shared=kind == "mellum")
    return model, model


def load(directories: tuple[Path, Path], place: HeadPlacement) -> LoadedHead:
    model, head = directories
    return load_mtp_head(head, place) if model == head else load_eagle3_head(head, model, place)


def computed(directories: tuple[Path, Path], collectives: Collectives, *, gpu: bool) -> list[Tensor]:
    """The logits of all rows and the head's own states, on the leader; of the decoder, or of the head's modules."""
    place = HeadPlacement(torch.float32, CPU, collectives)
    loaded = load(directories, place)
    head, layout = loaded.model, place.layout(loaded.config)
    shape = StoreShape.uniform(1, BLOCK_SIZE, layout.kv_heads.size, layout.head_dim, torch.float32, (None,))
    store, widths = KvStore(shape, NUM_BLOCKS, CPU), widths_of(head)
    reader: HeadModel | GraphedHead = head
    if gpu:
        decoder = GpuHead(head, lower(head.model, torch.float32), store, layout, collectives)
        steps = GpuSteps(decoder, store, collectives, widths, LIMITS, Rerun())
        runner = ModelRunner(head, widths, store, collectives, CPU, None, steps.decoder, steps=steps)
        reader = GraphedHead(decoder, steps.decoder)
        runner.warm_up()
        assert steps.decoder._graphs.rungs == [1, 2]
    else:
        runner, _ = Backend().head_runner(RunnerRequest(head, store, layout, collectives, CPU, 1))
    script, found = Script([12, 6]), []
    random = torch.Generator().manual_seed(4)
    for step in STEPS:
        plan, sampled = script.step(dict(step), every_token=True)
        with reader.reading(torch.randn((len(sampled), reader.hidden), generator=random)):
            logits = runner.forward(plan)
        if isinstance(logits, Tensor):
            found += [logits.clone(), reader.made.clone()]
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("eagle3 of normed states", 1),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
        *(pytest.param(kind, 1, marks=pytest.mark.nightly) for kind in ("eagle3", "glm4_moe", "mellum")),
        *(pytest.param(kind, 2, marks=pytest.mark.nightly) for kind in KINDS[1:]),
    ],
)
def test_the_decoder_computes_what_the_modules_do(tmp_path: Path, kind: str, ranks: int) -> None:
    directories = made(tmp_path, kind)
    on = on_gpu_ring if ranks > 1 else lambda _, work: [work(SingleRank())]
    expected = on(ranks, partial(computed, directories, gpu=False))[0]
    found = on(ranks, partial(computed, directories, gpu=True))[0]
    assert len(found) == len(expected) == 2 * len(STEPS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
