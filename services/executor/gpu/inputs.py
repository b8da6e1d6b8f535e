"""A step plan as tensors on a device: all that the kernels of a step read of it.

A decoder's `compute` reads nothing else, so that a CUDA graph of it can be captured over tensors that stay where
they are, and be replayed once the next plan's numbers lie in them.

    plan ─▶ StepArrays (NumPy, pure) ─▶ one copy ─▶ tensors ─▶ StepInputs
                    └─▶ padded to a graph's size (graphs.py)

The way there is one copy that nobody waits for. The arrays lie one after another, each at a place that depends on the
lengths before it alone. So steps of one graph's size always find theirs at the same addresses, and what is copied is no
more than what the step has:

    host    [ token_ids | positions | ... | tile_first | block tables ... ]      pinned; two, in turn, since the copy
                │                                            │                   of the step before may still be reading
    device  [ token_ids | positions | ... | tile_first | block tables ... ]      one: steps follow each other in the
            └─ places, multiples of ALIGN ─┘                                     stream, copies and kernels alike
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.settings import MOST_DRAFTS
from services.executor.core.step_plan import Int32Array, StepLimits, StepPlan, as_int32
from services.executor.gpu.kernels.attention_launch import Batch
from services.executor.gpu.kernels.pages import ChosenRows
from services.executor.gpu.kernels.tiles import StepTiles, rows_for, splits_of, tiles_of
from services.executor.platforms.base import sent
from services.executor.platforms.catalog import platform_of

# Numbers (of 4 bytes). Kernels are compiled anew for pointers that do not divide by 16 bytes; all of these do.
ALIGN = 32

ROOM_OF_GRAPHS = 32  # more sequences or tiles than a step has, of those that only fill up

MOST_ALIKE = 1 + MOST_DRAFTS  # rows of one sequence that may be computed as decodes
# Keys that a step may read once more so that a graph has place for its rows: some 4 GB of an 8B model's, 1 to 2 ms on
# an H100, which is less than what launching kernel by kernel takes the host.
MOST_READ_AGAIN = 1 << 15

Ints = NDArray[np.int32] | NDArray[np.int64]


class Round(NamedTuple):
    """Rows that read some blocks only, and are chosen for and attended to together."""

    rows: Tensor | None  # int64 [n]: which of the step's; None: all, in their order
    chosen: ChosenRows
    batch: Batch  # its tables are those that `chosen` leads to


class Split(NamedTuple):
    """A step as a layer attends in which some rows read some blocks only."""

    # The other rows, int64 [n], and what attention needs of them; None: there are none.
    dense: tuple[Tensor, Sequence[Batch]] | None
    rounds: list[Round]


class Shape(NamedTuple):
    """What of a model and its device decides how a step is laid out."""

    block_size: int
    kv_heads: int
    group: int  # query heads of a KV head
    processors: int  # that work at once on the device; 0: keys are never split among them
    context_length: int = 0  # most tokens of one sequence, which graphs are made for
    # Whether each token is attended to in a tile of its own, as a decode's, so that what it comes to does not depend on
    # its neighbours.
    batch_invariant: bool = False


class StepInputs(NamedTuple):
    """T tokens of S sequences, R of whose rows are sampled; all tensors int32, on one device."""

    token_ids: Tensor  # [T]; -1 - k stands for the token that row k of the step before has sampled
    positions: Tensor  # [T]
    slots: Tensor  # [T]; -1: a row that only fills up a graph's batch, whose key and value go nowhere
    sample_rows: Tensor  # [R]
    # What attention needs: the decodes, then the prefill chunks; none of the two is empty.
    batches: Sequence[Batch]
    # int64 [C, 2] (writable block, place among the quantized ones): what the step fills, compressed in each layer
    # between its writes and its attention. None: nothing, or behind the step, as decodes alone allow.
    compressions: Tensor | None = None
    adapters: Tensor | None = None  # [T]: slots of the rows' LoRA adapters, -1 for none; None: no row has one

    # How a layer attends in which not every row reads everything (`SparseStep.split`); None: there is none.
    sparse: Callable[[int], Split | None] | None = None

    states: Tensor | None = None  # [T, hidden]: what a draft head reads beside its tokens; None: zeros

    def of(self, kv_heads: int, group: int) -> Sequence[Batch]:
        """`batches`, which were made for these heads."""
        return self.batches

    def split(self, layer: int, kv_heads: int, group: int) -> Split | None:
        """How `layer` attends where some row reads some blocks only; None: all read everything."""
        return None if self.sparse is None else self.sparse(layer)


class StepPart(NamedTuple):
    """The decodes of a step, or its prefill chunks."""

    tiles: StepTiles  # their sequences are counted over the whole step
    rows_per_tile: int
    tile_tokens: int
    longest: int  # of their contexts
    first_row: int
    num_rows: int


class StepArrays(NamedTuple):
    """What `StepInputs` has, on the host."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    sample_rows: Ints
    table_starts: Ints  # [S]
    query_starts: Ints  # [S + 1]
    context_lens: Ints  # [S]
    tables: Ints  # the sequences' blocks, end to end
    parts: list[StepPart]

    def flat(self) -> list[Ints]:
        """In the order of their places; the tables, whose length no graph knows beforehand, are the last."""
        tiles = [array for part in self.parts for array in part.tiles]
        return [*self[:7], *tiles, self.tables]


def arrays_of(plan: StepPlan, shape: Shape) -> StepArrays:
    """`plan`, which computes some tokens."""
    query_lens = as_int32(plan.query_lens).astype(np.int64)
    context_lens = as_int32(plan.context_lens)
    blocks = -(-context_lens.astype(np.int64) // shape.block_size)
    bounds = ((0, plan.num_decodes), (plan.num_decodes, len(query_lens)))
    return StepArrays(
        as_int32(plan.token_ids),
        as_int32(plan.positions),
        as_int32(plan.slots),
        as_int32(plan.sample_rows),
        np.cumsum(blocks) - blocks,
        np.concatenate(([0], np.cumsum(query_lens))),
        context_lens,
        as_int32(plan.block_tables),
        [_part(query_lens, context_lens, first, end, shape) for first, end in bounds if end > first],
    )


def _part(query_lens: NDArray[np.int64], context_lens: Ints, first: int, end: int, shape: Shape) -> StepPart:
    most = 1 if shape.batch_invariant else int(query_lens[first:end].max())
    rows = rows_for(shape.group, most)
    tokens = 1 if most == 1 else rows // shape.group
    tiles = tiles_of(query_lens[first:end], tokens)
    return StepPart(
        StepTiles(tiles.sequence + np.int32(first), tiles.first),
        rows,
        tokens,
        int(context_lens[first:end].max()),
        int(query_lens[:first].sum()),
        int(query_lens[first:end].sum()),
    )


def rung_for(count: int, rungs: Sequence[int]) -> int | None:
    """The smallest of `rungs`, ascending, that holds `count` sequences."""
    return next((rung for rung in rungs if rung >= count), None)


def filled(array: Ints, length: int, value: int) -> Int32Array:
    """`array`, and `value` behind it, int32 [length]."""
    longer = np.full(length, value, np.int32)
    longer[: len(array)] = array
    return longer


def as_inputs(step: StepArrays, tensors: Sequence[Tensor], splits: Sequence[int]) -> StepInputs:
    """`tensors` hold what `step.flat()` has; `splits`: parts of the keys, for each of its parts."""
    token_ids, positions, slots, sample_rows, starts, ends, lens, *tiles, tables = tensors
    batches = [
        Batch(
            slots=slots,
            tables=tables,
            table_starts=starts,
            query_starts=ends,
            context_lens=lens,
            tile_sequence=tiles[2 * index],
            tile_first=tiles[2 * index + 1],
            rows_per_tile=part.rows_per_tile,
            tile_tokens=part.tile_tokens,
            splits=splits[index],
            first_row=part.first_row,
            num_rows=part.num_rows,
        )
        for index, part in enumerate(step.parts)
    ]
    return StepInputs(token_ids, positions, slots, sample_rows, batches)


def splits_for(step: StepArrays, shape: Shape) -> list[int]:
    """Parts of the keys that suit the contexts of `step`, for each of its parts."""
    return [splits_of(len(part.tiles.sequence) * shape.kv_heads, part.longest, shape.processors) for part in step.parts]


def inputs_of(plan: StepPlan, shape: Shape, device: torch.device) -> StepInputs:
    """`plan`, which computes some tokens, in tensors of its own: one copy to the device."""
    step = arrays_of(plan, shape)
    return as_inputs(step, to_device(step.flat(), device), splits_for(step, shape))


def is_decode(plan: StepPlan) -> bool:
    """Whether `plan` computes one token of each of some sequences, and sums nothing up."""
    return plan.num_decodes > 0 and 4 * plan.num_decodes == len(plan.query_lens) and not plan.pools


def is_like_decodes(plan: StepPlan) -> bool:
    """Whether `plan` may be computed as decodes, each row as if it were a sequence of its own: few rows of each
    sequence, as where drafts are checked, whose earlier keys are soon read once for each."""
    query_lens = as_int32(plan.query_lens)
    # Rows behind a block that the step fills read what is compressed of it.
    if not len(query_lens) or query_lens.max() > MOST_ALIKE or plan.pools or plan.compressions:
        return False
    return int((as_int32(plan.context_lens).astype(np.int64) * (query_lens - 1)).sum()) <= MOST_READ_AGAIN


def rows_of(plan: StepPlan, shape: Shape) -> StepArrays:
    """`plan`, whose rows are decodes of sequences of their own: those of one sequence share its blocks, and each reads
    what is before it, since a layer writes all keys before it attends."""
    step = arrays_of(plan, shape._replace(batch_invariant=True))
    query_lens, rows = as_int32(plan.query_lens), len(step.token_ids)
    part = StepPart(
        StepTiles(np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)),
        step.parts[0].rows_per_tile,
        1,
        max(part.longest for part in step.parts),
        0,
        rows,
    )
    return step._replace(
        table_starts=np.repeat(step.table_starts.astype(np.int64), query_lens),
        query_starts=np.arange(rows + 1),
        context_lens=step.positions + np.int32(1),
        parts=[part],
    )


# --- the way to the device ---------------------------------------------------------------------------


def capacity_of(limits: StepLimits, block_size: int) -> int:
    """Numbers that the largest step has that there may be, with the room between them."""
    tokens, sequences = max(limits.max_batch_tokens, limits.max_sequences), limits.max_sequences
    of_tokens = [tokens] * 4  # ids, positions, slots, sampled rows
    of_sequences = [sequences, sequences + 1, sequences]
    of_tiles = [sequences] * 2 + [tokens] * 2  # decodes', prefill chunks'
    of_graphs = [ROOM_OF_GRAPHS] * (len(of_sequences) + len(of_tiles))  # what they have more of
    tables = sequences * -(-limits.context_length // block_size)
    return total_of([*of_tokens, *of_sequences, *of_tiles, *of_graphs, tables])


def places_of(lengths: Sequence[int]) -> list[int]:
    """Where arrays of these lengths begin, and where the next one would."""
    return list(accumulate((-(-length // ALIGN) * ALIGN for length in lengths), initial=0))


def total_of(lengths: Sequence[int]) -> int:
    """Numbers from the first one's first to the last one's last, and on to the next place."""
    return places_of(lengths)[-1]


def to_device(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Each as int32 there, in memory of their own. One copy for all of them: each costs as much as many bytes."""
    lengths = [len(array) for array in arrays]
    whole = np.zeros(total_of(lengths), np.int32)
    _fill(whole, arrays)
    return _views(sent(whole, device), lengths)


class Staging:
    """Carries the arrays of one step after another to the same place. For one thread, and one stream."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: int32 numbers."""
        self.capacity, self.device = capacity, device
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        # When the last copy out of each has ended.
        self._read = [platform_of(device).event() for _ in self._hosts]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._turn = 0

    def fits(self, arrays: Sequence[Ints]) -> bool:
        return total_of([len(array) for array in arrays]) <= self.capacity

    def stage(self, arrays: Sequence[Ints]) -> None:
        """Has them copied to their places, once what is in the stream has run. They must fit."""
        self._turn = 1 - self._turn
        host, read = self._hosts[self._turn], self._read[self._turn]
        read.synchronize()  # the copy of two steps ago: over long since, unless the host runs far ahead
        used = _fill(host.numpy(), arrays)
        self._device[:used].copy_(host[:used], non_blocking=True)
        read.record()

    def views(self, lengths: Sequence[int]) -> list[Tensor]:
        """The tensors in which arrays of these lengths come to lie: int32, on the device."""
        return _views(self._device, lengths)

    def open_views(self, lengths: Sequence[int]) -> list[Tensor]:
        """`views`, and one more of all that is behind them."""
        return [*_views(self._device, lengths), self._device[total_of(lengths) :]]


def _fill(into: NDArray[Any], arrays: Sequence[Ints]) -> int:
    """Puts each at its place; returns where the last one ends."""
    end = 0
    places = places_of([len(array) for array in arrays])
    for start, array in zip(places, arrays, strict=False):  # the last place is nobody's
        end = start + len(array)
        into[start:end] = array
    return end


def _views(whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    starts = places_of(lengths)
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]
