"""A GPU decoder whose decode steps are replayed from graphs; of other steps it launches the kernels one by one.

plan ─┬─ decodes, no more than the top of the ladder ─▶ padded, staged, replayed     graphs.py
      └─ everything else ─────────────────────────────▶ staged, launched by kernels
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from services.executor.engine.plan import Int32Array, StepPlan, as_int32
from services.executor.engine.vectors import Floats
from services.executor.gpu.graphs import Computed, Shape, StepGraphs
from services.executor.gpu.inputs import StepInputs, arrays_of, as_inputs, splits_for
from services.executor.gpu.sampling import resolve
from services.executor.gpu.staging import Staging, to_device
from services.executor.model.decoder import sums_of
from services.executor.progress import Progress


class Inner(Protocol):
    """The decoder, `gpu/decoder.py`."""

    @property
    def label(self) -> str: ...

    def compute(self, inputs: StepInputs, on_layer: Callable[[], None] = ...) -> Tensor: ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor: ...

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def pairs_of(self, plan: StepPlan) -> Tensor | None: ...

    def compress(self, plan: StepPlan) -> None: ...


class GraphedDecoder:
    """A `model.decoder.Decoder`. What it returns of a step lies on the device, and is gone with the next one."""

    def __init__(
        self,
        inner: Inner,
        shape: Shape,
        staging: Staging,
        before: Tensor,
        device: torch.device,
        graphs: StepGraphs | None,
    ) -> None:
        """`before` int64: where the tokens of the step before come to lie, by row; `graphs` over the same `staging`;
        None: every step is launched by kernels."""
        self._inner = inner
        self._shape = shape
        self._staging = staging
        self._before = before
        self._device = device
        self._graphs = graphs
        self.label = inner.label

    def forward(self, plan: StepPlan, progress: Progress, pools: Int32Array) -> tuple[Tensor, Floats]:
        computed = None if len(pools) else self._replay(plan, progress)
        if computed is not None:
            return computed.logits, sums_of(computed.logits, pools)
        inputs = self._inputs(plan)
        hidden = self._inner.compute(inputs, progress.tick)
        return self._inner.logits(hidden, inputs.sample_rows), sums_of(hidden, pools)

    def forward_to_largest(self, plan: StepPlan, progress: Progress) -> tuple[Tensor, Tensor]:
        computed = self.launch(plan, progress)
        return computed.largest, computed.tokens

    def launch(self, plan: StepPlan, progress: Progress) -> Computed:
        """`forward` of a plan without pools, and `largest` of its logits. Waits for nothing."""
        computed = self._replay(plan, progress)
        if computed is not None:
            return computed
        inputs = self._inputs(plan)
        logits = self._inner.logits(self._inner.compute(inputs, progress.tick), inputs.sample_rows)
        return Computed(logits, *self._inner.largest(logits))

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.largest(logits)

    def _replay(self, plan: StepPlan, progress: Progress) -> Computed | None:
        computed = None if self._graphs is None else self._graphs.replay(plan)
        if computed is not None:
            self._inner.compress(plan)  # which blocks were filled, and how many, no graph can know
            progress.tick()  # for all of its layers: nothing on the host sees them go by
        return computed

    def _inputs(self, plan: StepPlan) -> StepInputs:
        shape = self._shape
        step = arrays_of(plan, shape.block_size, shape.group, alone=shape.batch_invariant)
        arrays = step.flat()
        if self._staging.fits(arrays):
            self._staging.stage(arrays)
            tensors = self._staging.views([len(array) for array in arrays])
        else:
            tensors = to_device(arrays, self._device)
        inputs = as_inputs(step, tensors, splits_for(step, shape.kv_heads, shape.processors))
        inputs = inputs._replace(compressions=self._inner.pairs_of(plan))
        if (as_int32(plan.token_ids) < 0).any():
            inputs = inputs._replace(token_ids=resolve(inputs.token_ids, self._before))
        return inputs
