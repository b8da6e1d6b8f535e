"""A model on one rank of this process, as the executor has it, and the steps that benchmarks of the engine measure,
with those that compute the contexts they read.

Cache that nobody has written is one page of zeros to the system, which costs no memory traffic. So every
context is computed before it is measured, and its full blocks are compressed where a ring compresses:

    hot     | each sequence's last block | the full blocks of the sequence that is being computed |
    cold    | sequence 0's full blocks | sequence 1's | ...
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.supervisor.rank_process import SPIN_COUNT

if TYPE_CHECKING:
    from services.executor.core.settings import BlockDType
    from services.executor.kv_cache.block_memory import MappedFiles
    from services.executor.kv_cache.store import KvStore
    from services.executor.model.weight_formats import WeightCodec
    from services.executor.worker.runner import ModelRunner


BLOCK = 16
SLOTS = 65
"""Of recurrent state: of so many sequences at once, the first for prompts."""


def load_one_rank(
    directory: Path,
    dtype_name: str,
    threads: int,
    num_blocks: int,
    kind: "BlockDType" = "bf16",
    weights: "WeightCodec | None" = None,
    *,
    summaries: bool = False,
    files: "MappedFiles | None" = None,
) -> "tuple[ModelRunner, KvStore]":
    """A runner and its store of `num_blocks` hot blocks, and as many cold ones unless `kind` is bf16; its weights
    quantized where `weights` says how. `summaries`: with those that sparse attention chooses pages by.
    `files`: where the cold blocks lie.

    `dtype_name`: bf16 or fp32.
    """
    # OpenMP reads its settings when torch is imported; they are the executor's.
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    from services.executor.collectives.base import SingleRank
    from services.executor.core.settings import ExecutorSettings
    from services.executor.core.sharding import ShardLayout
    from services.executor.kv_cache.capacity import store_shape
    from services.executor.kv_cache.store import KvStore
    from services.executor.model.layer_states import layer_states
    from services.executor.model.loading.loader import load_config, load_model
    from services.executor.worker.backend import make_runner

    torch.set_num_threads(threads)
    device, dtype = torch.device("cpu"), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, dtype, layout, SingleRank(), device, lambda done, total: None, weights)
    settings = ExecutorSettings(block_size=BLOCK, sparse_attention=summaries)
    shape = store_shape(settings, kind, layer_states(config, layout), dtype)
    store = KvStore(
        shape,
        num_blocks,
        device,
        0 if kind == "bf16" else num_blocks,
        SLOTS if shape.slot else 0,
        files=files,
    )
    return make_runner(model, store, layout, SingleRank(), device, threads), store


_TOKENS = 100
"""Ids are drawn below this: every vocabulary has as many."""

Ints = NDArray[np.int64]


def decode_plan(sequences: int, context: int) -> StepPlan:
    """One token for each of `sequences` sequences whose context has `context` tokens, the new one included."""
    blocks = -(-context // BLOCK)
    tables = np.arange(sequences * blocks).reshape(sequences, blocks)
    slots = tables[:, -1] * BLOCK + (context - 1) % BLOCK
    return StepPlan(
        step=1,
        num_decodes=sequences,
        token_ids=to_bytes([100] * sequences),
        positions=to_bytes([context - 1] * sequences),
        slots=to_bytes(slots),
        query_lens=to_bytes([1] * sequences),
        context_lens=to_bytes([context] * sequences),
        block_tables=to_bytes(tables.ravel()),
        sample_rows=to_bytes(np.arange(sequences)),
        state_slots=to_bytes(np.arange(1, 1 + sequences)),
    )


def prefill_plan(tokens: int) -> StepPlan:
    """A whole prompt of `tokens` tokens."""
    positions = to_bytes(np.arange(tokens))
    return StepPlan(
        step=1,
        num_decodes=0,
        token_ids=to_bytes([100] * tokens),
        positions=positions,
        slots=positions,
        query_lens=to_bytes([tokens]),
        context_lens=to_bytes([tokens]),
        block_tables=to_bytes(np.arange(-(-tokens // BLOCK))),
        sample_rows=to_bytes([tokens - 1]),
        state_slots=to_bytes([0]),
    )


@dataclass(frozen=True)
class Steps:
    """A kind of step over a store."""

    before: list[StepPlan]
    """Run once."""
    measured: StepPlan


@dataclass(frozen=True)
class Decode:
    """One token for each of `sequences` sequences with `context` tokens each, the new one included."""

    sequences: int
    context: int

    def steps(self, num_hot: int, num_cold: int) -> Steps:
        """For a ring of so many blocks; without cold ones nothing is compressed."""
        full = (self.context - 1) // BLOCK
        last = np.arange(self.sequences)[:, None]
        staged = self.sequences + np.arange(full)
        kept = (num_hot if num_cold else self.sequences) + np.arange(self.sequences * full)
        kept = kept.reshape(self.sequences, full)
        before = []
        for sequence in range(self.sequences):
            written = np.append(staged if num_cold else kept[sequence], sequence)
            prompt = _prompt(self.context - 1, written, kept[sequence])
            before.append(structs.replace(prompt, state_slots=to_bytes([1 + sequence])))
        plan = decode_plan(self.sequences, self.context)
        measured = structs.replace(
            plan,
            token_ids=_tokens(self.sequences),
            slots=to_bytes(last[:, 0] * BLOCK + (self.context - 1) % BLOCK),
            block_tables=to_bytes(np.concatenate((kept, last), axis=1).ravel()),
        )
        return Steps(before, measured)


@dataclass(frozen=True)
class Prefill:
    """A whole prompt of `tokens` tokens."""

    tokens: int

    def steps(self, num_hot: int, num_cold: int) -> Steps:
        written = np.arange(-(-self.tokens // BLOCK))
        plan = _prompt(self.tokens, written, written + num_hot if num_cold else written)
        return Steps([], structs.replace(plan, sample_rows=to_bytes([self.tokens - 1])))


def _prompt(tokens: int, written: Ints, kept: Ints) -> StepPlan:
    """The first `tokens` tokens of a sequence that is `written` to these blocks, of which the full ones are `kept` in
    those; nothing is sampled."""
    positions = np.arange(tokens)
    full, last = tokens // BLOCK, (tokens - 1) // BLOCK
    pairs = np.stack((written[:full], kept[:full]), axis=1)
    return structs.replace(
        prefill_plan(tokens),
        token_ids=_tokens(tokens),
        slots=to_bytes(written[positions // BLOCK] * BLOCK + positions % BLOCK),
        block_tables=to_bytes(np.append(kept[:last], written[last])),
        sample_rows=b"",
        compressions=to_bytes(pairs[pairs[:, 0] != pairs[:, 1]]),
    )


def _tokens(count: int) -> bytes:
    return to_bytes(np.random.default_rng(1).integers(0, _TOKENS, count))
