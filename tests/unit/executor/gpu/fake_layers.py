"""A model that reads and writes all that a step says, in a few lines of PyTorch: each token's state is a sum over the
blocks of its sequence, so a wrong id, position, slot, table or length changes the logits. All numbers are whole and
exact: no order of a sum changes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.executor.core.step_plan import StepPlan
from services.executor.gpu.decoder import AuxHiddenStates
from services.executor.gpu.inputs import StepInputs
from services.executor.gpu.kernels.attention_launch import Batch

HIDDEN = 8
VOCABULARY = 24


class FakeLayers:
    """What `gpu.graphs` asks of a `GpuDecoder`, over a store of its own."""

    states_width, dtype, adapters = 0, torch.float64, None

    def __init__(self, num_blocks: int, block_size: int, group: int) -> None:
        random = torch.Generator().manual_seed(3)
        self._block_size, self._group = block_size, group
        self._embedding = torch.randint(-9, 10, (VOCABULARY, HIDDEN), generator=random).double()
        self._head = torch.randint(-9, 10, (HIDDEN, VOCABULARY), generator=random).double()
        self.store = torch.zeros((num_blocks * block_size, HIDDEN), dtype=torch.float64)
        self.label = "compute: fake"

    def compute(self, inputs: StepInputs, on_layer: object = None, taps: AuxHiddenStates | None = None) -> Tensor:
        ids, positions = inputs.token_ids.long(), inputs.positions.double()[:, None] + 1
        states = self._embedding[ids] * positions
        written = inputs.slots >= 0
        self.store[inputs.slots[written].long()] = states[written]
        hidden = torch.zeros_like(states)
        for batch in inputs.batches:
            self._attend(batch, hidden)
        if taps is not None:
            taps.take(0, states)
            taps.take(1, hidden)
            taps.take_last(hidden + states)
        return hidden + states

    def taps(self, rows: int, layers: Sequence[int]) -> AuxHiddenStates:
        return AuxHiddenStates(layers, torch.full((rows, max(1, len(layers)) * HIDDEN), torch.nan, dtype=torch.float64))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden.index_select(0, rows) @ self._head

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.max(dim=-1)
        return values, tokens

    def pairs_of(self, plan: StepPlan) -> Tensor | None:
        return None

    def adapters_of(self, plan: StepPlan) -> Tensor | None:
        return None

    def sparse_of(self, plan: StepPlan) -> None:
        return

    def compress(self, plan: StepPlan) -> None:
        return

    def _attend(self, batch: Batch, hidden: Tensor) -> None:
        for sequence, first in zip(batch.tile_sequence.tolist(), batch.tile_first.tolist(), strict=True):
            start, end = batch.query_starts[sequence : sequence + 2].tolist()
            context = int(batch.context_lens[sequence])
            table = batch.tables[int(batch.table_starts[sequence]) :]
            for token in range(first, min(first + batch.rows_per_tile // self._group, end - start)):
                keys = torch.arange(max(context - (end - start) + token + 1, 0))
                slots = table[keys // self._block_size].long() * self._block_size + keys % self._block_size
                weights = (7.0 * keys) % 11 + 1
                hidden[start + token] = (self.store[slots] * weights[:, None]).sum(dim=0)
