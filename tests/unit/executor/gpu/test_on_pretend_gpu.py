"""A rank on a GPU that is not there (`tests/pretend_gpu`): what it computes, and that it does not wait on the way."""

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")


from benchmarks.on_gpu.served import served
from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.engine import Launched
from services.executor.core.progress import DeviceProgress, ProgressCounter
from services.executor.core.sampling_state import SamplingState
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan
from services.executor.gpu import quantized_matmul
from services.executor.gpu.draft_head import GraphedHead
from services.executor.gpu.graphs import Computed, GraphedDecoder, StepGraphs
from services.executor.gpu.sampling import Pending
from services.executor.gpu.steps import GpuSteps, warmup_chunks, warmup_plans
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.catalogue import longest_context
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS
from services.executor.model.rotary import fix_frequencies
from services.executor.model.weight_formats import Quantized, WeightCodec
from services.executor.platforms.cuda import CudaMarks
from services.executor.sampling.sampler import Sampler, wants_of
from tests.pretend_gpu.device import pretend_gpu
from tests.pretend_gpu.ring import PretendNccl
from tests.pretend_gpu.streams import Host
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, runner_of, small_model
from tests.unit.executor.gpu.texts import DRAWN, GREEDY, ONE_LAYER, requests, texts
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, Script
from tests.unit.executor.model.tiny import build, logits_of
from tests.unit.executor.worker.draft_heads import Eagle3Reference, make_eagle3
from tests.unit.executor.worker.drafting_ring import Generated, ring_of
from tests.unit.executor.worker.test_draft_heads import check
from tests.unit.executor.worker.test_draft_model import PROMPT, model_in

GPU = torch.device("cuda", 0)
LIMITS = StepLimits(max_sequences=3, max_batch_tokens=16, context_length=32, graph_memory=1 << 30)
NEW = 4
# Tokens of each sequence, and how all of them are sampled.
STEPS = (({0: 4}, GREEDY), ({0: 1, 1: 3}, GREEDY), ({0: 1, 1: 1}, GREEDY), ({1: 1, 0: 1}, DRAWN))


# --- steps ---------------------------------------------------------------------------------------


def run_steps(directory: Path, codec: Codec | None, host: Host | None, collectives: Collectives) -> list[Any]:
    """The tokens of `STEPS`; on `host`'s GPU, else on the CPU, waited for step by step."""
    if host is None:
        runner = runner_of(directory, collectives, codec=codec)
    else:
        ring = PretendNccl(collectives) if collectives.world_size > 1 else collectives
        runner = runner_of(directory, ring, codec=codec, limits=LIMITS, device=GPU)
        runner.warm_up()
        assert isinstance(runner._decoder, GraphedDecoder)
        assert runner._decoder._graphs.rungs == [1, 2, 3]
        host.waits.clear()
    script, found = Script([8, 8]), []
    for number, (step, params) in enumerate(STEPS):
        plan, sampled = script.step(dict(step))
        states = [SamplingState(params, [1], [0] * number) for _ in sampled]
        wants = wants_of(states, runner.vocab_size).tobytes()
        plan = structs.replace(plan, candidates=wants, on_device=host is not None)
        if host is None:
            logits = runner.forward(plan)
            found.append([] if logits is None else Sampler().sample(logits, states))
        else:
            pending = runner.launch(plan, None if collectives.rank else states, ProgressCounter.unread())
            assert pending is not None
            found.append([] if collectives.rank else pending.wait())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "codec", "ranks"),
    [
        ("qwen2", None, 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("gemma3_text", INT8, 1), ("granite", None, 1), ("qwen2_moe", FP8, 2))
        ),
    ],
)
def test_graphs_and_sampling_give_the_host_s_tokens(
    tmp_path: Path, model_type: str, codec: Codec | None, ranks: int
) -> None:
    directory = small_model(tmp_path, model_type)
    on = on_gpu_ring if ranks > 1 else lambda _, work: [work(SingleRank())]
    expected = on(ranks, partial(run_steps, directory, codec, None))[0]
    with pretend_gpu() as gpu:
        assert on(ranks, partial(run_steps, directory, codec, gpu))[0] == expected
        assert gpu.waits == []


# --- a whole engine ------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_waits_for_tokens_alone(gpu: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()

    def counted(*given: Any) -> Tensor:
        seen.update(scaled=1)
        return quantized_matmul.scaled_by_rows(*given)

    def watched(plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        gpu.waits.clear()
        launched: Launched = ring.engine.launch(plan, samples)
        assert gpu.waits == []
        seen.update(compressing=bool(plan.compressions))
        return launched

    monkeypatch.setattr(quantized_matmul.coded_product, "__defaults__", (counted,))
    options = {"kv_dtype": "int8", "kv_memory": 1 << 20, "max_sequences": 2, "context_length": 64}
    prompts = [[7 * at % 250 + 3 for at in range(length)] for length in (40, 28)]
    wanted = requests(prompts, (GREEDY, DRAWN), NEW)
    with served(ONE_LAYER, GPU, weight_dtype="fp8", **options) as ring:
        assert ring.spec.overlaps
        one_by_one, _ = texts(ring, wanted, ahead=False, launch=watched)
        found, launched_ahead = texts(ring, wanted, ahead=True, launch=watched)
    assert found == one_by_one
    assert [len(tokens) for tokens in found] == [NEW, NEW]
    assert launched_ahead >= NEW - 2
    assert seen["compressing"] >= 2
    assert seen["scaled"]  # the prompts have more rows than kernels of ours take


# --- other models, and what lies around the steps ------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("bloom", "gpt2", "phimoe/longrope")),
    ],
)
def test_models_that_transformers_modules_compute(tmp_path: Path, name: str) -> None:
    model, script = build(name, settings_of(name)), Script([9, 6])
    model.save_pretrained(str(tmp_path))
    fix_frequencies(model, longest_context(model.config))  # as they are served
    expected = logits_of(model, script.sequences)
    with pretend_gpu():
        runner = runner_of(tmp_path, SingleRank(), device=GPU)
        assert runner._decoder is None
        runner.warm_up(warmup_plans(warmup_chunks(8, 9, 2), BLOCK_SIZE, None))
        for tokens in ({0: 7}, {0: 1, 1: 5}, {0: 1, 1: 1}):
            plan, sampled = script.step(dict(tokens))
            logits = runner.forward(plan)
            assert isinstance(logits, Tensor)
            assert logits.device == GPU
            for row, (sequence, position) in zip(logits.cpu(), sampled, strict=True):
                assert (row - expected[sequence][position]).abs().max() < 1e-4


@pytest.mark.parametrize("codec", [None, INT8, FP8, CODECS["q4_k"]])
def test_weights_come_as_to_the_host(tmp_path: Path, codec: WeightCodec | None) -> None:
    directory = small_model(tmp_path, "qwen3")
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)

    def weights(device: torch.device) -> dict[str, Tensor]:
        model = load_model(directory, torch.bfloat16, layout, SingleRank(), device, lambda done, total: None, codec)
        assert all(parameter.device == device for parameter in model.parameters() if parameter.numel())
        assert all(buffer.device == device for buffer in model.buffers())
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        for name, module in model.named_modules():
            stored = module.stored if isinstance(module, WeightShard) else None
            if isinstance(stored, Quantized | QuantizedRows):
                parts = stored._asdict() if isinstance(stored, Quantized) else vars(stored)
                held = {part: value for part, value in parts.items() if isinstance(value, Tensor)}
                where = CPU if isinstance(stored, QuantizedRows) else device
                assert all(value.device == where for value in held.values())
                weights |= {f"{name}.{part}": value.cpu() for part, value in held.items()}
        return weights

    here = weights(CPU)
    with pretend_gpu():
        there = weights(GPU)
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(value, there[name]), name


@pytest.mark.usefixtures("gpu")
def test_blocks_are_saved_and_come_back() -> None:
    shape = StoreShape.uniform(2, BLOCK_SIZE, 1, 16, torch.bfloat16, (INT8, FP8))
    here, there = (KvStore(shape, 4, device, 4) for device in (CPU, GPU))
    content = [bytes([at]) * here.block_bytes(0) for at in (3, 5)]
    for store in (here, there):
        for block, saved in enumerate(content):
            store.load(block, saved)
        store.compress([(0, 4), (1, 6)])
    for block in (0, 1, 4, 6):
        assert here.save(block) == there.save(block)
    assert there.save(1) == content[1]


def test_marks_are_passed_when_the_device_has_come_to_them(gpu: Host) -> None:
    ended: list[int] = []
    progress = DeviceProgress((ctypes.c_int64 * 1)(), CudaMarks(GPU), ended.append)
    gpu.waits.clear()
    progress.end(1)
    assert not progress.look()
    assert ended == []
    assert gpu.waits == []
    torch.cuda.synchronize()
    assert progress.look()
    assert ended == [1]


# --- draft heads ------------------------------------------------------------------------------------------

ON_GPU = {"device": "cuda", "dtype": "fp32", "kv_memory": 1 << 20, "max_sequences": 4, "max_batch_tokens": 16}


@pytest.fixture
def steps_seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps the graphs have replayed, and how many were launched kernel by kernel."""
    seen = Counter[str]()
    replay = StepGraphs.replay

    def watched(self: StepGraphs, plan: StepPlan, input_states: Tensor | None = None) -> Computed | None:
        found = replay(self, plan, input_states)
        rows = "one row" if len(plan.token_ids) == 4 else "rows"
        seen[f"{rows}, {'launched' if found is None else 'replayed'}"] += 1
        return found

    monkeypatch.setattr(StepGraphs, "replay", watched)
    return seen


@pytest.fixture
def launched(gpu: Host, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Steps that the device was given, none of which the host waited for."""
    steps: list[StepPlan] = []
    launch = GpuSteps.launch

    def watched(self: GpuSteps, plan: StepPlan, *others: Any) -> Pending:
        gpu.waits.clear()
        pending = launch(self, plan, *others)
        assert gpu.waits == []
        steps.append(plan)
        return pending

    monkeypatch.setattr(GpuSteps, "launch", watched)
    return steps


@pytest.mark.nightly
def test_an_eagle3_head_reads_steps_that_graphs_hold(
    tmp_path: Path, launched: list[StepPlan], steps_seen: Counter[str]
) -> None:
    model = model_in(tmp_path / "model", num_hidden_layers=2)
    layers = (0, 1, 1)
    head = make_eagle3(tmp_path / "head", 144, eagle_config={"eagle_aux_hidden_state_layer_ids": list(layers)})
    with ring_of(tmp_path, model, **ON_GPU) as ring:
        plain = Generated(ring, PROMPT, GREEDY).run(4)
    with ring_of(tmp_path, model, head, **ON_GPU) as ring:
        assert ring.spec.drafts, ring.spec.draft_left_out
        assert ring.spec.draft_reads_states
        draft = ring.engine._loaded.draft
        assert isinstance(draft._head, GraphedHead)
        steps_seen.clear()
        followed = Generated(ring, PROMPT, GREEDY, rewrites=True).run(6, 2)
        launched.clear()
        behind = Generated(ring, PROMPT, GREEDY, 12, rewrites=True).run(6, 2, followed=False)
    assert steps_seen["rows, replayed"] > 0
    assert steps_seen["one row, replayed"] > 0
    assert steps_seen["one row, launched"] == 0
    assert len(launched) > 4
    check(followed, Eagle3Reference(head, model, layers))
    check(behind, Eagle3Reference(head, model, layers))
    assert followed.text[:4] == behind.text[:4] == plain.text
