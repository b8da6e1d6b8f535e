"""A step that begins before the blocks that it reads are there: the same bits, and what is lost is told behind it."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from services.executor.collectives.base import SingleRank
from services.executor.core.engine import RestoreFailed
from services.executor.core.progress import ProgressCounter
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache import restore
from services.executor.kv_cache.codecs import INT8, Codec
from services.executor.kv_cache.offload import BlockCopier, SpillStore
from services.executor.worker.runner import ModelRunner
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, Script
from tests.unit.executor.model.tiny import make_model

pytestmark = natively
LAYERS = 4


class Spilled(SpillStore):
    """On disk; a page layer is read when the one before it has been computed."""

    def __init__(self, runner: ModelRunner, directory: Path) -> None:
        super().__init__(0, 64, runner._store.shape.bytes_per_spilled_block, directory, beside=True)
        parts = runner._store.parts_of_pages()
        self._page = {offset: page for page, found in enumerate(parts) for offset, _ in found}
        self.progress: ProgressCounter | None = None  # of the step that is waited for; None: nothing is

    def read_into(self, slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        page, pause = self._page[offset], threading.Event()
        for _ in range(30_000):
            # Every layer ticks, and so does every page layer that was brought.
            if self.progress is None or self.progress.count >= 2 * page:
                return super().read_into(slot, rooms, offset)
            pause.wait(0.001)
        return False


class Case:
    """A sequence of whole blocks whose keys and values are on disk alone."""

    def __init__(self, tmp_path: Path, codec: Codec | None) -> None:
        directory = make_model(tmp_path / "model", "llama", head_dim=32, num_hidden_layers=LAYERS)
        self.runner = runner_of(directory, native=True, codec=codec)
        self.spill = Spilled(self.runner, tmp_path / "spilled")
        store = self.runner._store
        self.runner._copier = BlockCopier(store, self.spill, SingleRank())
        self.script = Script([8 * BLOCK_SIZE + 5, 3], compresses=codec is not None)
        first, _ = self.script.step({0: 8 * BLOCK_SIZE, 1: 2})
        self.runner.forward(first)
        blocks = [NUM_BLOCKS * (codec is not None) + block for block in self.script._tables[0][:8]]
        saves = [(block, slot) for slot, block in enumerate(blocks)]
        self.runner.forward(structs.replace(first, token_ids=b"", saves=to_bytes(saves)))
        self.spill.disk.flush()
        for block in blocks:
            store.load(block, bytes(store.block_bytes(block)))
        self.restores = to_bytes([(slot, block) for block, slot in saves])

    def step(self, tokens: dict[int, int]) -> tuple[StepPlan, StepPlan]:
        """(what computes them, and the same with the restores)."""
        plan, _ = self.script.step(tokens)
        return plan, structs.replace(plan, restores=self.restores)


@pytest.mark.parametrize("codec", [None, INT8], ids=["bf16", "int8"])
def test_layers_wait_for_their_own_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    monkeypatch.setattr(restore, "READ_BYTES", 1)  # a page layer at a time
    monkeypatch.setattr(restore, "SMALL_BYTES", 1)
    case = Case(tmp_path, codec)
    plain, restoring = case.step({0: 5})
    case.spill.progress = progress = ProgressCounter.unread()
    logits = case.runner.forward(restoring, progress)
    assert isinstance(logits, torch.Tensor)
    assert progress.count == 2 * LAYERS
    expected = case.runner.forward(plain)  # with all of them there
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(logits, expected)
    assert bool(logits.isfinite().all())


def test_a_step_that_reads_none_of_them_waits_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "READ_BYTES", 1)
    case = Case(tmp_path, INT8)
    _, restoring = case.step({1: 1})
    held, progress = threading.Event(), ProgressCounter.unread()

    def read_into(slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        """Nothing comes before all is computed."""
        for _ in range(30_000):
            if progress.count >= LAYERS:
                held.set()
                return SpillStore.read_into(case.spill, slot, rooms, offset)
            threading.Event().wait(0.001)
        return False

    monkeypatch.setattr(case.spill, "read_into", read_into)
    assert isinstance(case.runner.forward(restoring, progress), torch.Tensor)
    assert held.is_set()
    store = case.runner._store
    assert all(any(store.save(block)) for block in np.frombuffer(case.restores, np.int32)[1::2])


@pytest.mark.parametrize("codec", [None, INT8], ids=["bf16", "int8"])
def test_without_a_core_to_spare_blocks_are_there_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    case = Case(tmp_path, codec)
    case.spill.beside = False
    plain, restoring = case.step({0: 5})
    progress, computed = ProgressCounter.unread(), []

    def read_into(slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        computed.append(progress.count)
        return SpillStore.read_into(case.spill, slot, rooms, offset)

    monkeypatch.setattr(case.spill, "read_into", read_into)
    logits = case.runner.forward(restoring, progress)
    assert computed == [0] * 8, "each block is read at once"
    expected = case.runner.forward(plain)
    assert isinstance(logits, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("beside", [False, True])
def test_a_block_that_is_lost_fails_the_step_and_the_next_one_does_without(tmp_path: Path, beside: bool) -> None:
    case = Case(tmp_path, INT8)
    case.spill.beside = beside
    plain, restoring = case.step({0: 5})
    assert case.spill.disk is not None
    del case.spill.disk._checksums[3]
    with pytest.raises(RestoreFailed) as failed:
        case.runner.forward(restoring)
    assert failed.value.slots == [3]
    # What was not lost is there; the lost block is computed again, and then the step.
    case.script.go_back(0, 3 * BLOCK_SIZE)
    again, _ = case.script.step({0: BLOCK_SIZE})
    case.runner.forward(again)
    logits = case.runner.forward(plain)
    whole = Case(tmp_path / "whole", INT8)
    expected = whole.runner.forward(whole.step({0: 5})[1])
    assert isinstance(logits, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(logits, expected)
