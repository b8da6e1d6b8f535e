"""Steps that are replayed, sampled on the device and planned ahead give what steps one by one on the host give."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.served import Served, served
from benchmarks.on_gpu.shapes import TINY
from services.executor.engine.protocol import Launched, SampledToken
from services.executor.engine.sampling import Sampler, wants_of
from services.executor.engine.sampling_state import SamplingState
from services.executor.gpu.graphed import GraphedDecoder
from services.executor.gpu.sampling import Pending
from services.executor.gpu.steps import StepLimits
from services.executor.model import backend
from services.executor.model.collectives import Collectives, SingleRank
from services.executor.progress import Progress
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, runner_of, small_model
from tests.unit.executor.model.ring import Script

LIMITS = StepLimits(max_sequences=3, max_batch_tokens=16, context_length=32, graph_memory=1 << 30)
NEW = 5
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=7, top_p=0.9, seed=5)
STEPS = (({0: 4}, GREEDY), ({0: 1, 1: 3}, GREEDY), ({0: 1, 1: 1}, GREEDY), ({1: 1, 0: 1}, DRAWN))
"""Tokens of each sequence, and how all of them are sampled."""


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_are_those_of_steps_that_are_waited_for(tmp_path: Path, world_size: int) -> None:
    directory = small_model(
        tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
    )

    def run(collectives: Collectives, *, ahead: bool) -> list[list[int]]:
        limits = LIMITS if ahead else None
        runner = runner_of(directory, collectives, limits=limits)
        if ahead:
            runner.warm_up()
            assert isinstance(runner._decoder, GraphedDecoder)
            assert runner.can_launch(2)
        script, found = Script([8, 8]), []
        for number, (step, params) in enumerate(STEPS):
            plan, sampled = script.step(dict(step))
            states = [SamplingState(params, [1], [0] * number) for _ in sampled]
            vocab_size = runner.vocab_size
            plan = structs.replace(plan, candidates=wants_of(states, vocab_size).tobytes(), on_device=ahead)
            if ahead:
                if collectives.rank:
                    assert runner.forward(plan) is None
                    continue
                pending = runner.launch(plan, states, Progress.unread())
                assert pending is not None
                found.append([token.token for token in pending.wait()])
            else:
                logits = runner.forward(plan)
                if logits is not None:
                    found.append([token.token for token in Sampler().sample(logits, states)])
        return found

    if world_size == 1:
        assert run(SingleRank(), ahead=True) == run(SingleRank(), ahead=False)
    else:
        found = on_gpu_ring(world_size, partial(run, ahead=True))
        assert found[0] == on_gpu_ring(world_size, partial(run, ahead=False))[0]
        assert len(found[0]) == len(STEPS)


def test_what_joining_weights_leaves_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a library asks the driver for memory that torch still holds."""
    given: list[torch.device] = []
    monkeypatch.setattr(backend, "give_back", given.append)
    directory = small_model(tmp_path, "llama", num_hidden_layers=1)
    runner_of(directory, SingleRank())
    assert given == [torch.device("cpu")]


def test_preparing_waits_for_the_step_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device cannot do it says when it is waited for: before the ring is ready, not to a request."""
    directory = small_model(tmp_path, "llama", num_hidden_layers=1)
    runner = runner_of(directory, SingleRank(), limits=LIMITS._replace(max_sequences=1, graph_memory=0))

    def fail(pending: Pending) -> list[SampledToken]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Pending, "wait", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.warm_up()


def texts(ring: Served, samplings: Sequence[SamplingParams], *, ahead: bool) -> tuple[list[list[int]], int]:
    """What prompts become that are sampled so, and how many steps were launched before the one before was over."""
    batcher, engine = ring.batcher(), ring.engine
    for number, sampling in enumerate(samplings):
        request = GenerationRequest(str(number), "r", "m", "c", [5 + number, 9, 7], NEW, sampling)
        assert batcher.add(request) is None
    found: list[list[int]] = [[] for _ in samplings]
    under_way: list[Launched] = []
    launched_ahead = 0
    while batcher.has_work:
        if not under_way:
            scheduled = batcher.schedule()
            assert scheduled is not None
            under_way.append(engine.launch(scheduled[0], [row.sampling for row in scheduled[1]]))
        if ahead and (scheduled := batcher.schedule_ahead()):
            launched_ahead += 1
            under_way.append(engine.launch(scheduled[0], [row.sampling for row in scheduled[1]]))
        for entries in batcher.update(under_way.pop(0).result()).values():
            for entry in entries:
                found[int(entry.generation_id)] += entry.tokens
    batcher.check()
    return found, launched_ahead


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the benchmark's correctness section does this"
)
def test_texts_are_the_same_however_far_ahead_the_engine_is() -> None:
    options = {"kv_dtype": "bf16", "kv_memory": 1 << 20, "max_sequences": 2, "context_length": 64}
    with served(TINY, torch.device("cpu"), torch.float32, **options) as ring:
        assert ring.spec.overlaps
        for samplings in ((GREEDY, DRAWN), (GREEDY, SamplingParams(temperature=0.9, seed=4, logprobs=1))):
            one_by_one, none = texts(ring, samplings, ahead=False)
            found, launched_ahead = texts(ring, samplings, ahead=True)
            assert none == 0
            assert launched_ahead >= NEW - 2
            assert found == one_by_one
            assert [len(tokens) for tokens in found] == [NEW, NEW]
