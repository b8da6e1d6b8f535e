"""Recurrent state that is moved in the middle of its sequence: what comes behind it is what transformers computes."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.worker.runner import ModelRunner
from tests.docs.models import PROVEN_ERROR
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import NUM_BLOCKS, NUM_SLOTS, Script, make_runner, on_ring, runner_around
from tests.unit.executor.model.tiny import build, logits_of

LENGTHS = [21, 17, 12]
Step = tuple[StepPlan, list[tuple[int, int]]]


def moved(script: Script, parts: int) -> Iterator[Step]:
    """Steps in which two sequences move. `parts`: blocks of a snapshot."""
    blocks = range(NUM_BLOCKS, NUM_BLOCKS + parts)
    first, second, _ = script.state_slots
    # Behind an inner row of a chunk, to the slot in which another sequence begins once it has been saved.
    yield changed(script.step({0: 11}, every_token=True), state_snapshots=[(6, second)])
    yield changed(script.step({1: 7}, every_token=True), state_saves=[second, *blocks])
    script.go_back(0, 7)
    script.state_slots[0] = 0
    yield changed(script.step({0: 4, 1: 1, 2: 5}, every_token=True), state_loads=[0, *blocks])
    # Behind a decode, to where it goes on.
    yield changed(script.step({0: 1, 1: 1, 2: 1}, every_token=True), state_snapshots=[(1, first)])
    script.state_slots[1] = first
    for _ in range(6):
        yield script.step({0: 1, 1: 1, 2: 1}, every_token=True)


def changed(step: Step, **arrays: list[int] | list[tuple[int, int]]) -> Step:
    plan, sampled = step
    return msgspec.structs.replace(plan, **{key: to_bytes(value) for key, value in arrays.items()}), sampled


def drafted(script: Script) -> Iterator[Step]:
    """Steps in which a sequence checks three drafts, and goes on with the state behind the last that is right."""
    yield script.step({0: 9, 1: 7, 2: 5}, every_token=True)
    begin = 9
    for right in (0, 2, 3, 1):
        free = [slot for slot in range(NUM_SLOTS) if slot not in script.state_slots][:3]
        plan, sampled = script.step({0: 4, 1: 1, 2: 1}, every_token=True)
        tokens = as_int32(plan.token_ids).copy()
        tokens[3 + right :] ^= 1  # two other sequences come first
        count = 3 + right
        yield changed(
            (plan, sampled[:count]),
            token_ids=tokens.tolist(),
            state_snapshots=list(zip((2, 3, 4), free, strict=True)),
            sample_rows=list(range(count)),
        )
        begin += 1 + right
        script.go_back(0, begin)
        if right < 3:
            script.state_slots[0] = free[right]
    yield script.step({0: 1, 1: 1, 2: 1}, every_token=True)
    yield script.step({0: 1, 1: 1}, every_token=True)


# One of each mechanism.
FAMILIES = (
    *("deepseek_v4", "falcon_h1", "kimi_linear", "lfm2", "mamba", "minimax", "nemotron_h", "qwen3_5_text"),
    *("qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
)


@pytest.mark.parametrize("ranks", in_lanes([1, 2], [1], []))
@pytest.mark.parametrize("name", in_lanes(FAMILIES, ["falcon_h1", "lfm2", "qwen3_5_text", "rwkv"]))
def test_a_sequence_goes_on_from_a_state_that_was_kept(name: str, ranks: int, tmp_path: Path) -> None:
    model = build(name, settings_of(name))
    model.save_pretrained(str(tmp_path))
    expected = logits_of(model, Script(LENGTHS).sequences)

    def errors_of(runner: ModelRunner, steps: Iterator[Step]) -> list[float]:
        errors = []
        for plan, sampled in steps:
            logits = runner.forward(plan)
            if isinstance(logits, torch.Tensor):
                wanted = torch.stack([expected[sequence][position] for sequence, position in sampled])
                errors.append(float((logits - wanted).abs().max()))
        return errors

    def work(collectives: Collectives) -> tuple[list[float], list[float]]:
        runner, script = make_runner(tmp_path, collectives), Script(LENGTHS)
        snapshots = errors_of(runner, moved(script, runner._store.blocks_per_snapshot))
        fresh = runner_around(runner._model, tmp_path, collectives)
        return snapshots, errors_of(fresh, drafted(Script(LENGTHS)))

    snapshots, drafts = on_ring(ranks, work)[0]
    assert (len(snapshots), len(drafts)) == (10, 7)
    assert max(snapshots) < PROVEN_ERROR, "snapshots"
    assert max(drafts) < PROVEN_ERROR, "drafts"
