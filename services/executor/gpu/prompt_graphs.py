"""Steps with prompt chunks as CUDA graphs: one for each of a ladder of tokens, for whichever sequences those are of.

Launched kernel by kernel, a step takes the host some ten launches a layer, which is more than a GPU needs to compute a
few hundred tokens. So a graph holds room for what any such step may have, and steps leave some of it empty:

    tokens      | decodes | chunks              | filling            |      T of the ladder
    sequences   | decodes | chunks | filling | nobody ... | nobody |      `most_sequences` + 2
                                        │         └ no rows: what tiles without work belong to
                                        └ the rows that only fill up, which see no keys

    decode tiles   one token each, as many as there may be sequences
    prompt tiles   of `PREFILL_ROWS` rows, as many as T tokens of few chunks have

A step that has more tiles, adapters, rows that read some blocks only, or more tokens than the ladder is launched kernel
by kernel. Graphs hold all layers; the logits, of as many rows as are sampled, are computed behind them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.inputs import Ints, Shape, Staging, StepInputs, filled, rung_for
from services.executor.gpu.kernels.attention_launch import Batch
from services.executor.gpu.kernels.tiles import LEAST_KEYS, StepTiles, rows_for, splits_of, tiles_of

MOST_TOKENS = 1024  # a GPU computes more for as long as their launches take
MORE_TILES = 16  # than the tokens fill: each chunk may leave one in part empty
DECODE_SPLITS = 4  # parts of a decode's keys: not known is how many decodes there are
PROMPT_SPLITS = 8  # at most, of a chunk's keys


def token_ladder(most: int) -> list[int]:
    """Tokens of a step to capture, ascending, up to `most` or `MOST_TOKENS`; beyond 64 a third is filled up at most."""
    last = min(most, MOST_TOKENS)
    steps = [16, 32, 64, *range(96, 257, 32), *range(320, 513, 64), *range(640, MOST_TOKENS + 1, 128)]
    return [tokens for tokens in steps if tokens < last] + [last]


class PromptShape(NamedTuple):
    """How such a step is laid out."""

    step: Shape
    most_sequences: int
    compresses: bool  # blocks that a step fills

    def rows_per_tile(self, tokens: int) -> int:
        return rows_for(self.step.group, 1 if self.step.batch_invariant else tokens)

    def tile_tokens(self, tokens: int) -> int:
        return 1 if self.step.batch_invariant else self.rows_per_tile(tokens) // self.step.group

    def prompt_tiles(self, tokens: int) -> int:
        """Room for them in a step of so many tokens."""
        return tokens // self.tile_tokens(tokens) + MORE_TILES

    def decode_tiles(self, tokens: int) -> int:
        return min(self.most_sequences, tokens)

    def pairs(self, tokens: int) -> int:
        """Room for blocks that are filled."""
        return tokens // self.step.block_size + self.most_sequences if self.compresses else 0

    def splits(self, tokens: int) -> tuple[int, int]:
        """Parts of a decode's keys, and of a chunk's."""
        if not self.step.processors:
            return 1, 1
        decode = splits_of(1, min(self.step.context_length, LEAST_KEYS * DECODE_SPLITS), self.step.processors)
        programs = -(-tokens // self.tile_tokens(tokens)) * self.step.kv_heads
        return decode, min(splits_of(programs, self.step.context_length, self.step.processors), PROMPT_SPLITS)


class PromptArrays(NamedTuple):
    """Such a step on the host, filled up; int32."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]; -1: filling
    sample_rows: Ints  # [T], the first ones of a step
    table_starts: Ints  # [S + 2]
    query_starts: Ints  # [S + 3]
    context_lens: Ints  # [S + 2]
    decodes: StepTiles
    tiles: StepTiles  # of the chunks, and what fills up
    rows: Ints  # [3]: the first of the decodes' rows, of the chunks', of nobody's
    tables: Ints

    def flat(self) -> list[Ints]:
        """In the order of their places; the tables, whose length no graph knows beforehand, are the last."""
        return [*self[:7], *self.decodes, *self.tiles, self.rows, self.tables]


def prompt_arrays(plan: StepPlan, tokens: int, shape: PromptShape) -> PromptArrays | None:
    """`plan` filled up to `tokens`, which are enough; None where there is no room for its sequences or tiles."""
    query_lens = as_int32(plan.query_lens).astype(np.int64)
    context_lens = as_int32(plan.context_lens)
    count, decodes = len(query_lens), plan.num_decodes
    if count > shape.most_sequences or decodes > shape.decode_tiles(tokens):
        return None
    real = int(query_lens.sum())
    sequences = shape.most_sequences + 2
    nobody = sequences - 1
    chunks = np.append(query_lens[decodes:], tokens - real)  # and what fills up, as one more
    tiles = tiles_of(chunks, shape.tile_tokens(tokens))
    room = shape.prompt_tiles(tokens)
    if len(tiles.sequence) > room:
        return None
    blocks = -(-context_lens.astype(np.int64) // shape.step.block_size)
    return PromptArrays(
        filled(as_int32(plan.token_ids), tokens, 0),
        filled(as_int32(plan.positions), tokens, 0),
        filled(as_int32(plan.slots), tokens, -1),
        filled(as_int32(plan.sample_rows), tokens, 0),
        filled(np.cumsum(blocks) - blocks, sequences, 0),
        filled(np.concatenate(([0], np.cumsum(query_lens))), sequences + 1, tokens),
        filled(context_lens, sequences, 0),
        StepTiles(
            filled(np.arange(decodes), shape.decode_tiles(tokens), nobody),
            np.zeros(shape.decode_tiles(tokens), np.int32),
        ),
        StepTiles(filled(tiles.sequence + decodes, room, nobody), filled(tiles.first, room, 0)),
        np.asarray([0, decodes, tokens], np.int32),
        as_int32(plan.block_tables),
    )


def prompt_inputs(tokens: int, shape: PromptShape, tensors: Sequence[Tensor], pairs: Tensor | None) -> StepInputs:
    """All of it lies where it is staged: what has memory of its own would be gone once a graph is captured.

    `tensors` hold what `PromptArrays.flat` has, and `pairs` int64 [C, 2] what the step compresses; -1: nothing.
    """
    ids, positions, slots, sampled, starts, ends, lens, decodes, decode_first, tiles, tile_first, rows, tables = tensors
    whole = Batch(slots, tables, starts, ends, lens, tiles, tile_first, 0, 1, first_row=0, num_rows=tokens)
    of_decodes, of_chunks = shape.splits(tokens)
    batches = [
        whole._replace(
            tile_sequence=decodes,
            tile_first=decode_first,
            rows_per_tile=rows_for(shape.step.group, 1),
            tile_tokens=1,
            splits=of_decodes,
            num_rows=shape.decode_tiles(tokens),
            rows=rows[:2],
        ),
        whole._replace(
            rows_per_tile=shape.rows_per_tile(tokens),
            tile_tokens=shape.tile_tokens(tokens),
            splits=of_chunks,
            rows=rows[1:],
        ),
    ]
    return StepInputs(ids, positions, slots, sampled, batches, compressions=pairs)


@dataclass
class PromptOutput:
    """Where a graph leaves what it computes, and what is staged for those who read it."""

    sample_rows: Tensor  # int32 [T]
    hidden: Tensor | None = None  # [T, hidden], once it has run


class PromptGraphs:
    """Of one rank."""

    def __init__(
        self,
        layers: GpuDecoder,
        shape: PromptShape,
        most_tokens: int,
        staging: Staging,
        resolve: Callable[[Tensor], Tensor],
    ) -> None:
        """`resolve`: token ids as the graph has to read them, of which some may stand for those of the step before."""
        self._layers, self._shape, self._staging, self._resolve = layers, shape, staging, resolve
        self.ladder = token_ladder(most_tokens)
        self._graphs: dict[int, tuple[Callable[[], None], PromptOutput]] = {}
        pairs = shape.pairs(self.ladder[-1])
        self._pairs = torch.full((pairs, 2), -1, dtype=torch.int64, device=staging.device) if pairs else None

    @property
    def rungs(self) -> list[int]:
        """Tokens that have a graph, ascending."""
        return sorted(self._graphs)

    def work(self, tokens: int) -> tuple[Callable[[], None], PromptOutput]:
        """A step of `tokens` over what is staged for it, which is one of nobody now; and what it leaves."""
        arrays = self._of_nobody(tokens).flat()
        self._staging.stage(arrays)
        tensors = self._staging.open_views([len(array) for array in arrays[:-1]])
        pairs = None if self._pairs is None else self._pairs[: self._shape.pairs(tokens)]
        inputs = prompt_inputs(tokens, self._shape, tensors, pairs)
        output = PromptOutput(inputs.sample_rows)

        def work() -> None:
            output.hidden = self._layers.compute(inputs._replace(token_ids=self._resolve(inputs.token_ids)))

        return work, output

    def keep(self, tokens: int, graph: Callable[[], None], output: PromptOutput) -> None:
        """`graph` does what `work` said."""
        self._graphs[tokens] = graph, output

    def close(self) -> None:
        self._graphs.clear()

    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """The normed hidden states [T, hidden] of `plan`, in which all rows read everything, and which of them are
        sampled, int32 [R], until the next replay; None where there is no graph for it. Does not wait."""
        count = len(plan.token_ids) // 4
        tokens = rung_for(count, self.rungs)
        if tokens is None:
            return None
        laid_out = prompt_arrays(plan, tokens, self._shape)
        arrays = None if laid_out is None else laid_out.flat()
        if arrays is None or not self._staging.fits(arrays):
            return None
        self._staging.stage(arrays)
        if self._pairs is not None:
            self._pairs.fill_(-1)
            if (pairs := self._layers.pairs_of(plan)) is not None:
                self._pairs[: len(pairs)].copy_(pairs)
        graph, output = self._graphs[tokens]
        graph()
        assert output.hidden is not None, "it has run once before it was recorded"
        return output.hidden[:count], output.sample_rows[: len(plan.sample_rows) // 4]

    def _of_nobody(self, tokens: int) -> PromptArrays:
        nobody = prompt_arrays(_NOBODY, tokens, self._shape)
        assert nobody is not None, "a step that fills up alone has room"
        return nobody


_NOBODY = StepPlan(0, 0, b"", b"", b"", b"", b"", b"", b"")
