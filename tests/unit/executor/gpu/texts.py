"""What an engine makes of requests, with the batcher around it, one step at a time or one ahead."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.on_gpu.served import Served
from benchmarks.on_gpu.shapes import TINY
from services.executor.core.engine import Launched
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=7, top_p=0.9, seed=5)

ONE_LAYER = replace(TINY, layers=1)  # interpreted kernels take most of the time

Launch = Callable[[StepPlan, Sequence[SamplingState]], Launched]


def requests(
    prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], new: int
) -> list[GenerationRequest]:
    """`new` tokens for each of `prompts`, sampled by `samplings`."""
    return [
        GenerationRequest(str(number), "r", "m", "c", list(prompt), new, sampling)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def texts(
    ring: Served,
    wanted: Sequence[GenerationRequest],
    *,
    ahead: bool,
    launch: Launch | None = None,
    batcher: Scheduler | None = None,
) -> tuple[list[list[int]], int]:
    """What `wanted` become, and how many steps were launched before the one before was over. `launch`: what launches,
    in place of the engine itself; `batcher`: one that may have served others before."""
    batcher, begin = batcher or ring.batcher(), launch or ring.engine.launch
    for request in wanted:
        assert batcher.add(request) is None
    found: dict[str, list[int]] = {request.generation_id: [] for request in wanted}
    under_way: list[Launched] = []
    launched_ahead = 0

    def start(scheduled: Any) -> None:
        plan, rows = scheduled
        under_way.append(begin(plan, [row.sampling for row in rows]))

    while batcher.has_work:
        if not under_way:
            start(batcher.schedule())
        if ahead and (scheduled := batcher.schedule_ahead()):
            launched_ahead += 1
            start(scheduled)
        for entries in batcher.update(under_way.pop(0).result()).values():
            for entry in entries:
                found[entry.generation_id] += entry.tokens
    batcher.check()
    return list(found.values()), launched_ahead
