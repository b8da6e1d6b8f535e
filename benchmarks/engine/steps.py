"""A model on one rank of this process, as the executor has it, and the steps that benchmarks of the engine measure,
with those that compute the contexts they read.

Cache that nobody has written is one page of zeros to the system, which costs no memory traffic. So every
context is computed before it is measured, and its full blocks are compressed where a ring compresses:

    writable   | each sequence's last block | the full blocks of the sequence that is being computed |
    quantized  | sequence 0's full blocks | sequence 1's | ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from benchmarks.engine.in_process import set_threads
from services.executor.core.step_plan import StepPlan, to_bytes

if TYPE_CHECKING:
    from services.executor.kv_cache.store import KvStore
    from services.executor.model.weight_formats import WeightCodec
    from services.executor.worker.runner import ModelRunner
    from shared.data_types import BlockDType


BLOCK = 16
SLOTS = 65  # of recurrent state: of so many sequences at once, the first for prompts


def load_one_rank(
    directory: Path,
    dtype_name: str,
    threads: int,
    num_blocks: int,
    kind: "BlockDType" = "bf16",
    weights: "WeightCodec | None" = None,
    *,
    summaries: bool = False,
) -> "tuple[ModelRunner, KvStore]":
    """A runner and its store of `num_blocks` writable blocks, and as many quantized ones unless `kind` is bf16; its
    weights quantized where `weights` says how. `summaries`: with those that sparse attention chooses pages by.

    `dtype_name`: bf16 or fp32.
    """
    set_threads(threads)
    import torch

    from services.executor.collectives.base import SingleRank
    from services.executor.core.settings import ExecutorSettings
    from services.executor.core.sharding import ShardLayout
    from services.executor.kv_cache.capacity import store_shape
    from services.executor.kv_cache.store import KvStore
    from services.executor.model.layer_states import layer_states
    from services.executor.model.loading.loader import load_config, load_model
    from services.executor.worker.backends.base import RunnerRequest
    from services.executor.worker.backends.catalog import backend_of

    torch.set_num_threads(threads)
    device, dtype = torch.device("cpu"), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, dtype, layout, SingleRank(), device, lambda done, total: None, weights)
    settings = ExecutorSettings(block_size=BLOCK, sparse_attention=summaries)
    shape = store_shape(settings, kind, layer_states(config, layout), dtype, in_groups=True)
    quantized, slots = 0 if kind == "bf16" else num_blocks, SLOTS if shape.slot else 0
    store = KvStore(shape, num_blocks, device, quantized, slots)
    return backend_of(device).runner(RunnerRequest(model, store, layout, SingleRank(), device, threads)), store


_TOKENS = 100  # ids are drawn below this: every vocabulary has as many

Ints = NDArray[np.int64]


class Row(NamedTuple):
    """The last `width` tokens of a sequence that is `context` tokens long with them."""

    context: int
    width: int
    table: "Ints | Sequence[int]"  # its blocks, as they are read
    written: "Ints | None" = None  # where its tokens are written to; None: to the same blocks


def step_plan(rows: Sequence[Row], block: int = BLOCK, **others: Any) -> StepPlan:
    """A step of these sequences, decodes first. `others`: fields of the plan beside what follows from the rows; the
    last row of each sequence is sampled where they say nothing else."""
    spans = [np.arange(row.context - row.width, row.context) for row in rows]
    written = [np.asarray(row.table if row.written is None else row.written) for row in rows]
    slots = [table[at // block] * block + at % block for table, at in zip(written, spans, strict=True)]
    widths = [row.width for row in rows]
    fields: dict[str, Any] = {
        "num_decodes": sum(width == 1 for width in widths),
        "token_ids": to_bytes([_TOKENS] * sum(widths)),
        "sample_rows": to_bytes(np.cumsum(widths) - 1),
    }
    return StepPlan(
        step=1,
        positions=to_bytes(np.concatenate(spans)),
        slots=to_bytes(np.concatenate(slots)),
        query_lens=to_bytes(widths),
        context_lens=to_bytes([row.context for row in rows]),
        block_tables=to_bytes(np.concatenate([row.table for row in rows])),
        **{**fields, **others},
    )


def decode_plan(sequences: int, context: int) -> StepPlan:
    """One token for each of `sequences` sequences whose context has `context` tokens, the new one included."""
    blocks = -(-context // BLOCK)
    rows = [Row(context, 1, range(at * blocks, (at + 1) * blocks)) for at in range(sequences)]
    return step_plan(rows, num_decodes=sequences, state_slots=to_bytes(np.arange(1, 1 + sequences)))


def fill_quantized(store: "KvStore") -> None:
    """Random content in all quantized blocks, of an int8 store."""
    for quantized in store.quantized_layers():
        if quantized.scales is None:
            quantized.codes.normal_()  # summaries
        else:
            quantized.codes.random_(-127, 128)
            quantized.scales.fill_(0.01)


@dataclass(frozen=True)
class Steps:
    """A kind of step over a store."""

    before: list[StepPlan]  # run once
    measured: StepPlan


@dataclass(frozen=True)
class Decode:
    """One token for each of `sequences` sequences with `context` tokens each, the new one included."""

    sequences: int
    context: int

    def steps(self, num_writable: int, num_quantized: int) -> Steps:
        """For a ring of so many blocks; without quantized ones nothing is compressed."""
        full = (self.context - 1) // BLOCK
        staged = self.sequences + np.arange(full)
        first = num_writable if num_quantized else self.sequences
        kept = (first + np.arange(self.sequences * full)).reshape(self.sequences, full)
        before = []
        for sequence in range(self.sequences):
            written = np.append(staged if num_quantized else kept[sequence], sequence)
            prompt = _prompt(self.context - 1, written, kept[sequence])
            before.append(structs.replace(prompt, state_slots=to_bytes([1 + sequence])))
        rows = [Row(self.context, 1, np.append(kept[at], at)) for at in range(self.sequences)]
        slots = to_bytes(np.arange(1, 1 + self.sequences))
        measured = step_plan(rows, num_decodes=self.sequences, token_ids=_tokens(self.sequences), state_slots=slots)
        return Steps(before, measured)


@dataclass(frozen=True)
class Prefill:
    """A prompt of `tokens` tokens after `cached` whole blocks' tokens of its conversation."""

    tokens: int
    cached: int = 0

    def steps(self, num_writable: int, num_quantized: int) -> Steps:
        total = self.cached + self.tokens
        written = np.arange(-(-total // BLOCK))
        kept = written + num_writable if num_quantized else written
        before = [_prompt(self.cached, written, kept)] if self.cached else []
        plan = _prompt(total, written, kept, self.cached)
        return Steps(before, structs.replace(plan, sample_rows=to_bytes([self.tokens - 1])))


def _prompt(tokens: int, written: Ints, kept: Ints, cached: int = 0) -> StepPlan:
    """The first `tokens` tokens of a sequence but for the `cached` ones. It is `written` to these blocks, of which the
    full ones are `kept` in those; nothing is sampled."""
    full, last = tokens // BLOCK, (tokens - 1) // BLOCK
    pairs = np.stack((written[:full], kept[:full]), axis=1)[cached // BLOCK :]
    return step_plan(
        [Row(tokens, tokens - cached, np.append(kept[:last], written[last]), written)],
        num_decodes=0,
        token_ids=_tokens(tokens - cached),
        sample_rows=b"",
        compressions=to_bytes(pairs[pairs[:, 0] != pairs[:, 1]]),
        state_slots=to_bytes([0]),
    )


def _tokens(count: int) -> bytes:
    return to_bytes(np.random.default_rng(1).integers(0, _TOKENS, count))
