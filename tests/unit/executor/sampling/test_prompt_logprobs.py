"""Log probabilities of prompts' tokens against transformers' own log-softmax: same weights, same tokens."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.prompt_results import PromptTokenScores
from services.executor.sampling.candidates import score
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.worker.runner import ModelRunner
from shared.messages import GenerationRequest
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, in_shared_memory, make_runner, on_ring
from tests.unit.executor.model.tiny import make_model, reference_logits
from tests.unit.executor.sampling.test_candidates import VOCAB, logits_of, of_leader, spans_of

TOLERANCE = 1e-4
LENGTHS = (41, 2, 17, 16, 30)
TOPS = (0, 1, 5, 3, 20)
Row = tuple[float, int, list[tuple[int, float]]]


def prompts() -> dict[str, list[int]]:
    dice = np.random.default_rng(3)
    return {f"s{at}": dice.integers(0, 131, length).tolist() for at, length in enumerate(LENGTHS)}


def told(data: bytes, top: int) -> list[Row]:
    rows = struct.iter_unpack("<fi" + top * "if", data)
    return [(row[0], row[1], list(zip(row[2::2], row[3::2], strict=True))) for row in rows]


def served(runner: ModelRunner, leads: bool, vocab: int = 131, chunk: int = 16) -> dict[str, list[Row]]:
    """What a ring tells of the prompts, in chunks of 16 beside a request with output; every second prompt has
    output too."""
    batcher = Scheduler(EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, vocab), BatchSettings(chunk, 4))
    batcher.add(GenerationRequest("text", "r", "m", "c", [5, 6, 7], 6))
    for at, (name, prompt) in enumerate(prompts().items()):
        request = GenerationRequest(name, "r", "m", "c", prompt, at % 2 * 3, prompt_logprobs=TOPS[at])
        assert batcher.add(request) is None
    found: dict[str, list[Row]] = {}
    while batcher.has_work:
        scheduled = batcher.schedule()
        plan, rows = scheduled
        runner.forward(plan)
        scores = runner.scored if leads else nothing(len(plan.score_rows) // 4, plan.score_top)
        entries = batcher.update([SampledToken(9) for _ in rows], scores=scores if plan.score_rows else None)
        for entry in (entry for of_consumer in entries.values() for entry in of_consumer):
            assert entry.finish != "error", entry.error
            if entry.prompt_scores:
                top = TOPS[int(entry.generation_id[1:])]
                found[entry.generation_id] = told(entry.prompt_scores, top)
    return found


def nothing(rows: int, top: int) -> PromptTokenScores:
    tokens = np.zeros((rows, top), np.int32)
    return PromptTokenScores(np.zeros(rows, np.float32), np.zeros(rows, np.int32), tokens, tokens.astype(np.float32))


def worst_error(found: dict[str, list[Row]], logits: dict[str, Tensor]) -> float:
    """Of all log probabilities against those of whole `logits`; ranks and tokens must be theirs, but for near ties."""
    worst = 0.0
    for at, (name, prompt) in enumerate(prompts().items()):
        truth = logits[name].double().log_softmax(dim=-1)
        assert len(found[name]) == len(prompt) - 1
        for row, (logprob, rank, top) in enumerate(found[name]):
            target = prompt[row + 1]
            worst = max(worst, abs(logprob - float(truth[row, target])))
            if rank <= len(top):
                assert top[rank - 1] == (target, logprob)
            assert len(top) == TOPS[at]
            values = truth[row].topk(len(top)).values.tolist()
            worst = max([worst, *(abs(ours - theirs) for (_, ours), theirs in zip(top, values, strict=True))])
            worst = max([worst, *(abs(ours - float(truth[row, token])) for token, ours in top)])
            larger = truth[row] > truth[row, target] + 2 * TOLERANCE
            smaller = truth[row] < truth[row, target] - 2 * TOLERANCE
            assert int(larger.sum()) < rank <= len(truth[row]) - int(smaller.sum()) or worst > TOLERANCE
    return worst


def truths(directory: Path) -> dict[str, Tensor]:
    return dict(zip(prompts(), reference_logits(directory, list(prompts().values())), strict=True))


@pytest.mark.parametrize("world_size", in_lanes([1, 2, 3], [3], []))
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "granite"])
def test_they_equal_transformers(tmp_path: Path, model_type: str, world_size: int) -> None:
    directory = make_model(tmp_path, model_type)

    def work(collectives: Collectives) -> dict[str, list[Row]]:
        return served(make_runner(directory, collectives), leads=collectives.rank == 0)

    assert worst_error(on_ring(world_size, work)[0], truths(directory)) < TOLERANCE


@natively
@pytest.mark.parametrize("world_size", in_lanes([1, 2, 3], [2], []))
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_native_kernels_tell_what_their_logits_are(tmp_path: Path, model_type: str, world_size: int) -> None:
    """Against the log-softmax of transformers' logits of the same bf16 weights, as near as bf16 comes to them."""
    from tests.unit.executor.cpu.test_decoder import runner_of
    from tests.unit.executor.cpu.test_decoder import truth as exact

    directory = make_model(tmp_path, model_type, head_dim=32)

    def work(ring: Collectives) -> dict[str, list[Row]]:
        runner = runner_of(directory, native=True, collectives=ring)
        assert runner.is_native
        return served(runner, leads=ring.rank == 0)

    found = in_shared_memory(world_size, work)[0]
    logits = dict(zip(prompts(), exact(directory, list(prompts().values())), strict=True))
    spread = float(torch.cat(list(logits.values())).std())
    assert TOLERANCE < worst_error(found, logits) < 0.3 * spread


# --- out of logits alone -------------------------------------------------------------------------


def on_shards(logits: Tensor, targets: list[int], top: int, widths: list[int]) -> PromptTokenScores:
    wanted = np.array(targets, np.int32)
    return of_leader(logits, widths, lambda local, ring: score(local, wanted, top, ring, widths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("top", [0, 1, 7])
def test_any_number_of_ranks_gives_the_same(dtype: torch.dtype, world_size: int, top: int) -> None:
    """Coarse logits with many ties, more rows than are looked at at once, shares smaller than what is asked for."""
    rows = 131
    logits = logits_of(5, rows, dtype)
    targets = [(7 * row) % VOCAB for row in range(rows)]
    found = on_shards(logits, targets, top, spans_of(world_size))
    truth = logits.float().log_softmax(dim=-1)
    for row, target in enumerate(targets):
        assert found.logprobs[row] == pytest.approx(float(truth[row, target]), abs=1e-5)
        assert found.ranks[row] == 1 + int((logits[row] > logits[row, target]).sum())
        order = sorted(range(VOCAB), key=lambda token: (-float(logits[row, token]), token))[:top]
        assert found.top_tokens[row].tolist() == order
        assert found.top_logprobs[row].tolist() == pytest.approx([float(truth[row, at]) for at in order], abs=1e-5)


def test_the_most_likely_token_has_one_number_wherever_it_is_told() -> None:
    """lm-eval compares the two to find out whether a text is the greedy one."""
    logits = logits_of(6, 40, torch.float32) + torch.rand(40, VOCAB)
    best = logits.argmax(dim=-1).tolist()
    found = on_shards(logits, best, 1, spans_of(3))
    assert found.top_tokens[:, 0].tolist() == best
    assert found.top_logprobs[:, 0].tolist() == found.logprobs.tolist()
    assert set(found.ranks.tolist()) == {1}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("spoil", [torch.nan, torch.inf])
def test_rows_that_are_no_numbers_are_told_so(world_size: int, spoil: float) -> None:
    logits = logits_of(7, 3, torch.float32)
    logits[1, VOCAB - 1] = spoil
    found = on_shards(logits, [4, 5, 6], 2, spans_of(world_size))
    assert np.isnan(found.logprobs).tolist() == [False, True, False]


def test_a_token_that_cannot_come_is_no_fault() -> None:
    logits = logits_of(8, 2, torch.float32)
    logits[:, 3] = -torch.inf
    found = on_shards(logits, [3, 4], 1, spans_of(2))
    assert found.logprobs[0] == -np.inf
    assert np.isfinite(found.logprobs[1])
