"""A real forward pass with drafts among its tokens says what it says without them, on one rank and on two."""

import queue
from pathlib import Path

import pytest
from msgspec import structs

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec
from services.executor.core.step_plan import StepPlan
from services.executor.sampling.sampler import Sampler, wants_of
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafting import Drafter
from services.executor.scheduler.proposers.catalog import PROPOSERS
from services.executor.worker.runner import ModelRunner
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, make_runner, on_ring
from tests.unit.executor.model.tiny import make_model

Texts = dict[str, list[int]]


def requests() -> list[GenerationRequest]:
    prompt = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9]
    of = {
        "greedy": SamplingParams(temperature=0.0),
        "penalised": SamplingParams(temperature=0.0, frequency_penalty=0.3, logit_bias={17: 2.0}),
        "seeded": SamplingParams(temperature=0.3, seed=7),
        "top-k": SamplingParams(temperature=0.4, top_k=3, seed=8, logprobs=2),
        "top-p": SamplingParams(temperature=0.4, top_p=0.8, seed=9),
    }
    return [
        GenerationRequest(name, "r", "m", "c", [*prompt, 3 + at], 80, sampling)
        for at, (name, sampling) in enumerate(of.items())
    ]


def lead(runner: ModelRunner, plans: "queue.Queue[StepPlan | None]", drafts: int) -> tuple[Texts, int]:
    spec = EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 100, runner.vocab_size)
    settings = BatchSettings(48, 3, max_drafts=drafts)
    batcher = Scheduler(spec, settings, "m", Drafter(spec, settings, PROPOSERS))
    for request in requests():
        assert batcher.add(request) is None
    texts: Texts = {}
    while batcher.has_work:
        scheduled = batcher.schedule()
        assert scheduled is not None
        plan, rows = scheduled
        states = [row.sampling for row in rows]
        plan = structs.replace(plan, candidates=wants_of(states, runner.vocab_size).tobytes())
        plans.put(plan)
        logits = runner.forward(plan)
        assert logits is not None
        # Every token costs next to nothing, so that what may be right is drafted.
        seconds = 1 + 0.001 * len(plan.token_ids)
        for entry in batcher.update(Sampler().sample(logits, states), seconds).get("c", []):
            texts.setdefault(entry.generation_id, []).extend(entry.tokens)
    plans.put(None)
    return texts, batcher.drafter.accepted


@pytest.mark.parametrize("world_size", in_lanes([1, 2], [1]))
def test_the_text_is_the_same(tmp_path: Path, world_size: int) -> None:
    directory = make_model(tmp_path, "llama")

    def run(drafts: int) -> tuple[Texts, int]:
        plans: queue.Queue[StepPlan | None] = queue.Queue()

        def member(collectives: Collectives) -> tuple[Texts, int]:
            runner = make_runner(directory, collectives)
            if collectives.rank == 0:
                return lead(runner, plans, drafts)
            while (plan := plans.get(timeout=60)) is not None:
                runner.forward(plan)
            return {}, 0

        return on_ring(world_size, member)[0]

    plain, none = run(0)
    fast, accepted = run(8)
    assert none == 0
    assert accepted > 20
    assert fast == plain
    assert sum(map(len, plain.values())) == 5 * 80
