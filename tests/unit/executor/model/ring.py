"""A ring in one process, one thread per rank, and step plans for sequences whose tokens are known."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.collectives.shared_memory import SharedMemory, make_area
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.store import KvStore
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.worker.runner import ModelRunner, widths_of
from shared.data_types import BlockDType

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_SLOTS = 16
CPU = torch.device("cpu")
SETTINGS = ExecutorSettings(block_size=BLOCK_SIZE)
Result = TypeVar("Result")


class ThreadRing:
    """What the members of a ring share."""

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.shared: list[Tensor] = [torch.empty(0)] * world_size


class ThreadMember:
    """`Collectives` between threads."""

    def __init__(self, ring: ThreadRing, rank: int):
        self._ring = ring
        self.rank = rank
        self.world_size = len(ring.shared)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange(tensor)
        return tensor.copy_(torch.stack(parts).sum(0))

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        parts = self._exchange(tensor)
        assert [part.shape[-1] for part in parts] == list(widths)
        return parts if self.rank == 0 else None

    def barrier(self) -> None:
        self._ring.barrier.wait()

    def close(self) -> None:
        return

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._ring.shared[self.rank] = tensor.clone()
        self._ring.barrier.wait()
        parts = list(self._ring.shared)
        self._ring.barrier.wait()
        return parts


def on_ring(world_size: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """`work` on each rank of a ring at once; the results in rank order. The first error is raised."""
    if world_size == 1:
        return [work(SingleRank())]
    ring = ThreadRing(world_size)

    def member(rank: int) -> Result:
        try:
            return work(ThreadMember(ring, rank))
        except BaseException:
            ring.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(member, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def in_shared_memory(ranks: int, work: Callable[[Collectives], Result], lanes: int = 1) -> list[Result]:
    """The same on ranks that sum in shared memory."""
    if ranks == 1:
        return [work(SingleRank())]
    area = make_area(ranks, lanes)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: work(SharedMemory(area, rank, ranks, lanes=lanes, timeout=60)), range(ranks)))


def make_runner(
    directory: Path,
    collectives: Collectives,
    dtype: torch.dtype = torch.float32,
    kv_dtype: BlockDType = "bf16",
    num_quantized: int = 0,
    context: int | None = None,
) -> ModelRunner:
    """A rank's model and store, ready to run; `context` as of `load_model`."""
    config = load_config(directory)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    model = load_model(directory, dtype, layout, collectives, CPU, lambda *_: None, context=context)
    return runner_around(model, directory, collectives, dtype, kv_dtype, num_quantized)


def runner_around(
    model: Any,
    directory: Path,
    collectives: Collectives,
    dtype: torch.dtype = torch.float32,
    kv_dtype: BlockDType = "bf16",
    num_quantized: int = 0,
) -> ModelRunner:
    """The same of a rank's share that is loaded."""
    config = load_config(directory)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    shape = store_shape(SETTINGS, kv_dtype, layer_states(config, layout), dtype)
    for_snapshot = shape.blocks_per_snapshot if shape.slot else 0
    writable, quantized = (
        (NUM_BLOCKS, num_quantized + for_snapshot) if num_quantized else (NUM_BLOCKS + for_snapshot, 0)
    )
    store = KvStore(shape, writable, CPU, quantized, NUM_SLOTS if shape.slot else 0)
    return ModelRunner(model, widths_of(model), store, collectives, CPU)


class Script:
    """Steps over sequences of known tokens, each with a block table of blocks scattered over the store."""

    def __init__(
        self, lengths: Sequence[int], vocab_size: int = 131, num_blocks: int = NUM_BLOCKS, compresses: bool = False
    ):
        """`compresses`: full blocks are read as the steps that fill them compress them, block b as `num_blocks` + b."""
        random = np.random.default_rng(7)
        self.sequences = [random.integers(0, vocab_size, length).tolist() for length in lengths]
        blocks = random.permutation(num_blocks).tolist()
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        starts = np.cumsum(needed) - needed
        self._tables = [blocks[start : start + count] for start, count in zip(starts, needed, strict=True)]
        self._done = [0] * len(lengths)
        self._first_quantized = num_blocks if compresses else 0
        self.state_slots = [NUM_SLOTS - 1 - sequence for sequence in range(len(lengths))]

    @property
    def blocks(self) -> set[int]:
        """All that its sequences write to."""
        return {block for table in self._tables for block in table}

    def go_back(self, sequence: int, position: int) -> None:
        """Has `sequence` go on from `position`, which it has passed."""
        self._done[sequence] = position

    def step(
        self, tokens: dict[int, int], sample: bool = True, every_token: bool = False
    ) -> tuple[StepPlan, list[tuple[int, int]]]:
        """(the plan that computes `tokens` {sequence: count}, decodes first; [(sequence, position)] sampled).

        Sampled is the last token of each sequence, or every token.
        """
        order = sorted(tokens, key=lambda sequence: tokens[sequence] > 1)
        ids, positions, slots, contexts, tables, rows, sampled = [], [], [], [], [], [], []
        pairs: list[tuple[int, int]] = []
        for sequence in order:
            begin = self._done[sequence]
            end = self._done[sequence] = begin + tokens[sequence]
            table = self._tables[sequence]
            ids += self.sequences[sequence][begin:end]
            positions += range(begin, end)
            slots += [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)]
            contexts.append(end)
            last = (end - 1) // BLOCK_SIZE
            tables += [self._first_quantized + block for block in table[:last]] + [table[last]]
            if self._first_quantized:
                filled = table[begin // BLOCK_SIZE : end // BLOCK_SIZE]
                pairs += [(block, self._first_quantized + block) for block in filled]
            if sample:
                first = begin if every_token else end - 1
                rows += range(len(ids) - (end - first), len(ids))
                sampled += [(sequence, position) for position in range(first, end)]
        plan = StepPlan(
            step=1,
            num_decodes=sum(tokens[sequence] == 1 for sequence in order),
            token_ids=to_bytes(ids),
            positions=to_bytes(positions),
            slots=to_bytes(slots),
            query_lens=to_bytes([tokens[sequence] for sequence in order]),
            context_lens=to_bytes(contexts),
            block_tables=to_bytes(tables),
            sample_rows=to_bytes(rows),
            compressions=to_bytes(pairs),
            state_slots=to_bytes([self.state_slots[sequence] for sequence in order]),
        )
        return plan, sampled


def mixed_script() -> tuple[Script, list[tuple[StepPlan, list[tuple[int, int]]]]]:
    """Chunked prefill, decodes and both at once, with contexts from one block to many."""
    script = Script([47, 25, 14, 7])
    steps = [
        script.step({0: 16, 2: 11}),
        script.step({2: 1, 0: 16, 1: 7}),
        script.step({0: 13, 1: 16}, sample=False),
        script.step({2: 1, 0: 1, 1: 1, 3: 6}),
        script.step({3: 1, 2: 1, 0: 1, 1: 1}),
    ]
    return script, steps


def decode_script() -> tuple[Script, list[tuple[StepPlan, list[tuple[int, int]]]]]:
    """Prefill in two chunks, then 6 decode steps; other sequences join on the way. Every token is sampled."""
    script = Script([34, 23, 20])
    joins = [{0: 20}, {0: 8, 1: 17}, {0: 1, 1: 1, 2: 15}]
    decodes = [{0: 1, 1: 1, 2: 1}] * 5
    return script, [script.step(tokens, every_token=True) for tokens in joins + decodes]
