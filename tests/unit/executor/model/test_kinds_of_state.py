"""Each kind of state, compressed, cut over ranks, and moved to another store in the middle of its sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.kv_cache.store import KvStore
from services.executor.worker.runner import ModelRunner
from shared.data_types import BlockDType
from tests.docs.models import PROVEN_ERROR
from tests.unit.executor.model.architectures import KINDS, settings_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import NUM_BLOCKS, Script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of

LENGTHS = [27, 19, 14]
STEPS = ({0: 11}, {1: 9, 0: 6}, {0: 1, 1: 1, 2: 7}, {0: 1, 1: 1, 2: 1})
LATER = ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 5, 2: 1}, {0: 6, 1: 1, 2: 1})  # after the sequences have been moved


def move(script: Script, source: KvStore, target: KvStore) -> None:
    """What spilling and hand-over move, as they move it: whole blocks as bytes, and slots by way of blocks."""
    for block in sorted({block + first for block in script.blocks for first in (0, source.num_writable)}):
        target.load(block, source.save(block))
    if source.states is None or target.states is None:
        return
    blocks = range(source.num_blocks - source.blocks_per_snapshot, source.num_blocks)
    for slot in script.state_slots:
        snapshot = np.array([[slot, *blocks]], dtype=np.int32)
        source.save_states(snapshot)
        for block in blocks:
            target.load(block, source.save(block))
        target.load_states(snapshot)


def run(runner: ModelRunner, script: Script, steps: tuple[dict[int, int], ...]) -> list[torch.Tensor]:
    found = [runner.forward(script.step(step, every_token=True)[0]) for step in steps]
    return [logits for logits in found if isinstance(logits, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", in_lanes([1, 2], [2], []))
@pytest.mark.parametrize(
    ("kv_dtype", "most"), in_lanes([("bf16", 0.0), ("int8", 0.05), ("fp8", 0.15)], [("int8", 0.05)], [("bf16", 0.0)])
)
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_was_moved_is_read_as_it_was(
    kind: str, kv_dtype: BlockDType, most: float, ranks: int, tmp_path: Path
) -> None:
    """Bit for bit; and what is compressed reads nearly as what it was made of. `most`: the mean error, in standard
    deviations of the logits."""
    model = build(KINDS[kind], settings_of(KINDS[kind]))
    model.save_pretrained(str(tmp_path))
    sequences = Script(LENGTHS).sequences

    def work(collectives: Collectives) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        runner, other = (
            make_runner(tmp_path, collectives, kv_dtype=kv_dtype, num_quantized=NUM_BLOCKS) for _ in range(2)
        )
        script = Script(LENGTHS, compresses=True)
        first = run(runner, script, STEPS)
        move(script, runner._store, other._store)
        done = script._done.copy()
        stayed = run(runner, script, LATER)
        script._done = done
        moved = run(other, script, LATER)
        return first + stayed, first + moved

    stayed, moved = on_ring(ranks, work)[0]
    assert len(stayed) == len(STEPS) + len(LATER)
    for one, same in zip(stayed, moved, strict=True):
        assert torch.equal(one, same)
    expected = logits_of(model, sequences)
    script = Script(LENGTHS, compresses=True)
    at = [place for step in STEPS + LATER for place in script.step(step, every_token=True)[1]]
    wanted = torch.stack([expected[sequence][position] for sequence, position in at])
    errors = (torch.cat(moved) - wanted).abs()
    if kv_dtype == "bf16":
        assert errors.max() < PROVEN_ERROR
    else:
        assert 0 < errors.mean() < most * wanted.std()
