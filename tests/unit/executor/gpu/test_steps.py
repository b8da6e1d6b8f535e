"""Steps that are replayed, sampled on the device and planned ahead give what steps one by one on the host give."""

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.served import Served, served
from benchmarks.on_gpu.shapes import TINY
from services.executor.engine.protocol import Launched
from shared.messages import GenerationRequest, SamplingParams

NEW = 5
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=7, top_p=0.9, seed=5)


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
