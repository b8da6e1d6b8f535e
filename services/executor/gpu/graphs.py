"""Decode steps as CUDA graphs: one for each of a ladder of batch sizes, captured at start-up.

    decodes of 11 sequences ─▶ padded to 16 ─▶ staged ─▶ graph of 16 ─▶ logits [:11], largest [:11], tokens [:11]

A row that only fills up has token 0, position 0, slot -1 (nothing is written) and context 0 (nothing is attended to):
it changes no other row, and nobody looks at it. Steps that check drafts, and passes of a draft model behind them, are
replayed with each of their rows as a decode (`is_like_decodes`):

    a: t d1 d2, b: t ─▶ rows t | d1 | d2 | t, the first three with a's blocks, each with its own context ─▶ graph of 4

What is neither and what is larger than the ladder is not replayed: `replay` says so, and the caller computes it. Prompt
chunks have graphs of their own (`prompt_graphs.py`).

`GraphedDecoder` is a decoder that replays them, and of other steps launches the kernels one by one:

    plan ─┬─ decodes and drafts, no more rows than the top of the ladder ─▶ padded, staged, replayed
          ├─ chunks of no more tokens than the top of theirs ─────────────▶ padded, staged, replayed; logits by kernels
          └─ everything else ─────────────────────────────────────────────▶ staged, launched by kernels
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats
from services.executor.core.step_plan import Int32Array, StepPlan, as_int32
from services.executor.gpu.decoder import AuxHiddenStates, GpuDecoder
from services.executor.gpu.inputs import (
    Shape,
    Staging,
    StepArrays,
    StepInputs,
    StepPart,
    arrays_of,
    as_inputs,
    filled,
    is_decode,
    is_like_decodes,
    rows_of,
    rung_for,
    splits_for,
    to_device,
)
from services.executor.gpu.kernels.tiles import StepTiles, rows_for, splits_of
from services.executor.gpu.prompt_graphs import PromptGraphs
from services.executor.gpu.sampling import resolve
from services.executor.gpu.sparse_attention import sparse_rows
from services.executor.model.adapters.holder import slots_of_rows
from services.executor.model.lowering import sums_of
from services.executor.platforms.base import sent
from shared.errors import reason_of

Work = Callable[[], None]  # launches kernels over tensors that stay where they are, and waits for nothing


class Capture(Protocol):
    """Records work. What is recorded may share its memory with what was recorded before: the results of one are
    gone once another is replayed, unless they lie in tensors made outside."""

    def warm_up(self, work: Work) -> None:
        """Does `work` once, so that everything it compiles, loads or sets up the first time is there."""
        ...

    def record(self, work: Work) -> Work:
        """What does `work` again, once it has been warmed up. Raises what PyTorch does where it cannot be recorded."""
        ...

    def memory(self) -> int:
        """Bytes of the device's memory that are in use, by whomever."""
        ...


class CudaCapture:
    """CUDA graphs, whose intermediate results lie in one pool of memory
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Work is warmed up on the stream that it is recorded on, so that the workspaces of matrix products, which PyTorch
    keeps for each stream, are not in the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # Kept: torch before 2.12 does not forget a capture that was spoiled, and asks its graph at allocations.
        self._spoiled: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, work: Work) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads may ask for events or memory meanwhile: only what this one calls is recorded.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._spoiled.append(graph)
            raise
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own as the current one
        replay: Work = graph.replay
        return replay

    def memory(self) -> int:
        torch.cuda.empty_cache()  # else what an earlier step has left counts, and is gone at the next capture
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class Rerun:
    """For devices without graphs: work is done by doing it. Staging, padding and the reuse of buffers are the same,
    and so tests of them need no GPU."""

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Work:
        return work

    def memory(self) -> int:
        return 0


log = structlog.get_logger(__name__)

_MIB = 1 << 20
# Bytes that graphs may take where nothing else is said: what is captured first decides, and has some 100 MiB.
MOST_MEMORY = 1 << 30


class Computed(NamedTuple):
    """What a replay has left, of R sampled rows: on the device, until the next one."""

    logits: Tensor  # [R, share]
    largest: Tensor  # [R], of the logits' data type: NaN where a row holds NaN
    tokens: Tensor  # int64 [R]: the column of each row's largest logit, the first of those that tie


def ladder(most: int) -> list[int]:
    """Sizes of batches to capture, ascending: 1, 2, 4, then steps of 8, of 16 beyond 128 and of 32 beyond 256, so
    that padding stays below an eighth once there are many; and `most`."""
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, most + 1, 32)]
    return [size for size in steps if size < most] + [most]


def padded(step: StepArrays, rung: int) -> StepArrays:
    """Decodes, filled up to `rung` rows, of which as many are sampled."""
    count = len(step.token_ids)
    (part,) = step.parts
    return StepArrays(
        filled(step.token_ids, rung, 0),
        filled(step.positions, rung, 0),
        filled(step.slots, rung, -1),
        filled(step.sample_rows, rung, 0),
        filled(step.table_starts, rung, 0),
        np.arange(rung + 1, dtype=np.int32),
        filled(step.context_lens, rung, 0),
        step.tables,
        [
            StepPart(
                StepTiles(np.arange(rung, dtype=np.int32), np.zeros(rung, np.int32)),
                part.rows_per_tile,
                part.tile_tokens,
                part.longest,
                0,
                rung + part.num_rows - count,
            )
        ],
    )


def empty_step(group: int) -> StepArrays:
    """Decodes of nobody: to be padded."""
    none = np.zeros(0, np.int32)
    part = StepPart(StepTiles(none, none), rows_for(group, 1), 1, 0, 0, 0)
    return StepArrays(none, none, none, none, none, np.zeros(1, np.int32), none, none, [part])


class StepGraphs:
    """The graphs of one rank. Captured by every rank in the same order, and replayed for the same plans."""

    def __init__(
        self, layers: GpuDecoder, shape: Shape, most_sequences: int, staging: Staging, before: Tensor, capture: Capture
    ) -> None:
        """`before` int64, of at least as many numbers as a step has sampled rows: the tokens of the step before, which
        token ids of -1 - k stand for."""
        self._layers = layers
        self._shape = shape
        self._capture = capture
        self._staging = staging
        self._before = before
        self._ladder = ladder(most_sequences)
        self._graphs: dict[int, Work] = {}
        self.prompts: PromptGraphs | None = None
        # Captured as steps with adapters come; None: it could not be.
        self._with_adapters: dict[int, Work | None] = {}
        self._adapter_slots = torch.full((most_sequences,), -1, dtype=torch.int32, device=before.device)
        self._most_memory = MOST_MEMORY
        # Layers whose inputs a draft head reads, as `AuxHiddenStates` has them; None: there is none. To be set before
        # graphs are captured.
        self.tapped_layers: Sequence[int] | None = None
        # `StepInputs.states`, of a draft head.
        self._input_states = torch.zeros(
            (most_sequences, layers.states_width), dtype=layers.dtype, device=before.device
        )
        self._tapped: Tensor | None = None  # of the largest size, as `_results`
        # Of the largest size. Outside the graphs' pool, where the next capture may put something else.
        self._results = Computed(*(torch.empty(0),) * 3)

    @property
    def rungs(self) -> list[int]:
        """Sizes that have a graph, ascending."""
        return sorted(self._graphs)

    @torch.no_grad()
    def capture(self, most_memory: int = MOST_MEMORY, agree: Callable[[bool], bool] = lambda fine: fine) -> None:
        """Captures the ladder, the largest size first, whose memory the others share; ends early where the graphs
        take more than `most_memory` bytes, or one cannot be captured.

        `agree`: whether every rank says yes, so that all have the same graphs. Block 0 must be free.
        """
        began = time.perf_counter()
        self._most_memory = most_memory
        self._results = self._room_for_results()
        before = self._capture.memory()
        for rung in reversed(self._ladder):
            graph = self._captured(rung, self._work(rung), before)
            agreed = agree(graph is not None)
            if graph is None or not agreed:
                graph = None  # with its memory
                break
            self._graphs[rung] = graph
        else:
            self._capture_prompts(before, agree)
        log.info(
            "cuda_graphs_captured" if self._graphs else "cuda_graphs_none",
            sizes=self.rungs,
            prompt_tokens=[] if self.prompts is None else self.prompts.rungs,
            seconds=round(time.perf_counter() - began, 2),
            mib=(self._capture.memory() - before) // _MIB,
        )

    def _capture_prompts(self, before: int, agree: Callable[[bool], bool]) -> None:
        """As the ladder, within the same memory."""
        if (prompts := self.prompts) is None:
            return
        for tokens in reversed(prompts.ladder):
            work, output = prompts.work(tokens)
            graph = self._captured(tokens, work, before)
            agreed = agree(graph is not None)
            if graph is None or not agreed:
                break
            prompts.keep(tokens, graph, output)

    def replay_prompt(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """As `PromptGraphs.replay`, of any plan."""
        if self.prompts is None or self.tapped_layers is not None:
            return None
        if sparse_rows(plan, self._shape.block_size) or slots_of_rows(plan) is not None:
            return None
        return self.prompts.replay(plan)

    def replay(self, plan: StepPlan, input_states: Tensor | None = None) -> Computed | None:
        """Has the device compute `plan`; None where there is no graph for it, as where rows read some blocks only.
        `input_states`: `StepInputs.states`. Does not wait."""
        rung = rung_for(len(plan.token_ids) // 4, self.rungs)
        if rung is None or not (is_decode(plan) or is_like_decodes(plan)):
            return None
        if sparse_rows(plan, self._shape.block_size):
            return None
        slots = slots_of_rows(plan)
        graph = self._graphs[rung] if slots is None else self._graph_with_adapters(rung)
        lay_out = arrays_of if is_decode(plan) else rows_of
        arrays = padded(lay_out(plan, self._shape), rung).flat()
        if graph is None or not self._staging.fits(arrays):
            return None
        self._staging.stage(arrays)
        if slots is not None:
            longer = filled(slots, rung, -1)
            self._adapter_slots[:rung].copy_(sent(longer, self._adapter_slots.device))
        if input_states is not None:
            self._input_states[: len(input_states)].copy_(input_states)
        graph()
        count = len(plan.sample_rows) // 4
        return Computed(*(result[:count] for result in self._results))

    def tapped(self, rows: int) -> Tensor | None:
        """What the last replay, of so many rows, has left as `AuxHiddenStates` has it; None: nothing is tapped."""
        return None if self._tapped is None else self._tapped[:rows]

    def _graph_with_adapters(self, rung: int) -> Work | None:
        """The graph of steps of which some rows have LoRA adapters, captured when the first one comes: most models get
        none. All ranks are here for the same step. None where it cannot be captured."""
        if rung not in self._with_adapters:
            before = self._capture.memory()
            self._adapter_slots.fill_(-1)
            self._with_adapters[rung] = self._captured(rung, self._work(rung, with_adapters=True), before)
        return self._with_adapters[rung]

    def close(self) -> None:
        """Lets the graphs go, with what they hold of the collectives. Steps are computed without them."""
        self._graphs.clear()
        self._with_adapters.clear()
        if self.prompts is not None:
            self.prompts.close()

    def _room_for_results(self) -> Computed:
        """As many rows as the largest size has, each like those of a step of one."""
        inputs = self._inputs(1)
        logits = self._layers.logits(self._layers.compute(inputs), inputs.sample_rows)
        rows = self._ladder[-1]
        if self.tapped_layers is not None:
            self._tapped = self._layers.taps(rows, self.tapped_layers).into
        return Computed(
            logits.new_zeros((rows, logits.shape[1])), logits.new_zeros(rows), logits.new_zeros(rows, dtype=torch.int64)
        )

    def _captured(self, rung: int, work: Work, before: int) -> Work | None:
        """None where it cannot be recorded, or takes more than the memory that there is for all that is captured since
        `before` bytes were in use."""
        self._capture.warm_up(work)  # what fails here would fail without a graph too
        try:
            graph = self._capture.record(work)
        except Exception as error:  # whatever it was that a graph cannot hold: kernel by kernel it runs
            log.warning("cuda_graph_failed", size=rung, reason=reason_of(error), instead="launching kernel by kernel")
            return None
        used, most = self._capture.memory() - before, self._most_memory
        if used <= most:
            return graph
        log.warning("cuda_graphs_too_large", size=rung, mib=used // _MIB, most_mib=most // _MIB)
        return None

    def _work(self, rung: int, *, with_adapters: bool = False) -> Work:
        """A step of `rung` decodes over the tensors that are staged for it; they hold a step of nobody now."""
        inputs = self._inputs(rung)
        if with_adapters:
            inputs = inputs._replace(adapters=self._adapter_slots[:rung])
        if self._input_states.numel():
            inputs = inputs._replace(states=self._input_states[:rung])
        logits_of, largest_of, tokens_of = (result[:rung] for result in self._results)
        tapped = self.tapped(rung)
        taps = None if tapped is None else AuxHiddenStates(self.tapped_layers or (), tapped)

        def work() -> None:
            resolved = inputs._replace(token_ids=resolve(inputs.token_ids, self._before))
            hidden = self._layers.compute(resolved, taps=taps)
            logits = self._layers.logits(hidden, inputs.sample_rows)
            logits_of.copy_(logits)
            torch.max(logits, dim=-1, out=(largest_of, tokens_of))

        return work

    def _inputs(self, rung: int) -> StepInputs:
        """Those that a step of `rung` decodes will be staged to; a step of nobody is."""
        step = padded(empty_step(self._shape.group), rung)
        arrays = step.flat()
        self._staging.stage(arrays)
        tensors = self._staging.open_views([len(array) for array in arrays[:-1]])
        # Chosen once for contexts of any length: a part without keys costs its launch, a long one too few parts.
        splits = splits_of(rung * self._shape.kv_heads, self._shape.context_length, self._shape.processors)
        return as_inputs(step, tensors, [splits])


class GraphedDecoder:
    """A `model.decoder.Decoder`. What it returns of a step lies on the device, and is gone with the next one."""

    def __init__(
        self, inner: GpuDecoder, shape: Shape, staging: Staging, before: Tensor, graphs: StepGraphs | None
    ) -> None:
        """`before` int64: where the tokens of the step before come to lie, by row; `graphs` over the same `staging`;
        None: every step is launched by kernels."""
        self._inner = inner
        self._shape = shape
        self._staging = staging
        self._before = before
        self._graphs = graphs
        self._tapped_layers: Sequence[int] | None = None
        self.tapped: Tensor | None = None  # [T, width]: what the last step has left, where layers are tapped
        self.input_states: Tensor | None = None  # `StepInputs.states` of the steps from now on
        self.label, self.adapters = inner.label, inner.adapters

    def tap(self, layers: Sequence[int]) -> None:
        """Has steps leave what a draft head reads, as `AuxHiddenStates` has it; to be called before graphs are
        captured."""
        self._tapped_layers = layers
        if self._graphs is not None:
            self._graphs.tapped_layers = layers

    def forward(self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array) -> tuple[Tensor, Floats]:
        computed = None if len(pools) else self._replay(plan, progress)
        if computed is not None:
            return computed.logits, sums_of(computed.logits, pools)
        hidden, sampled = self._compute(plan, progress)
        return self._inner.logits(hidden, sampled), sums_of(hidden, pools)

    def forward_with_states(
        self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array, layers: Sequence[int]
    ) -> tuple[Tensor, Floats, Tensor]:
        """`layers`: those of `tap`."""
        logits, pooled = self.forward(plan, progress, pools)
        assert self.tapped is not None, "they are tapped"
        return logits, pooled, self.tapped

    def forward_to_largest(self, plan: StepPlan, progress: ProgressCounter) -> tuple[Tensor, Tensor]:
        computed = self.launch(plan, progress)
        return computed.largest, computed.tokens

    def launch(self, plan: StepPlan, progress: ProgressCounter) -> Computed:
        """`forward` of a plan without pools, and `largest` of its logits. Waits for nothing."""
        computed = self._replay(plan, progress)
        if computed is not None:
            return computed
        logits = self._inner.logits(*self._compute(plan, progress))
        return Computed(logits, *self._inner.largest(logits))

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.largest(logits)

    def _replay(self, plan: StepPlan, progress: ProgressCounter) -> Computed | None:
        computed = None if self._graphs is None else self._graphs.replay(plan, self.input_states)
        if self._graphs is not None and computed is not None:
            self.tapped = self._graphs.tapped(len(plan.token_ids) // 4)
            self._inner.compress(plan)  # which blocks were filled, and how many, no graph can know
            progress.tick()  # for all of its layers: nothing on the host sees them go by
        return computed

    def _compute(self, plan: StepPlan, progress: ProgressCounter) -> tuple[Tensor, Tensor]:
        """The normed hidden states, and which rows of them are sampled."""
        if self._graphs is not None and (computed := self._graphs.replay_prompt(plan)) is not None:
            self.tapped = None
            progress.tick()
            return computed
        inputs = self._inputs(plan)
        layers = self._tapped_layers
        taps = None if layers is None else self._inner.taps(len(inputs.token_ids), layers)
        hidden = self._inner.compute(inputs, progress.tick, taps)
        self.tapped = None if taps is None else taps.into
        return hidden, inputs.sample_rows

    def _inputs(self, plan: StepPlan) -> StepInputs:
        step = arrays_of(plan, self._shape)
        arrays = step.flat()
        if self._staging.fits(arrays):
            self._staging.stage(arrays)
            tensors = self._staging.views([len(array) for array in arrays])
        else:
            tensors = to_device(arrays, self._staging.device)
        inputs = as_inputs(step, tensors, splits_for(step, self._shape))
        inputs = inputs._replace(
            compressions=self._inner.pairs_of(plan),
            adapters=self._inner.adapters_of(plan),
            sparse=self._inner.sparse_of(plan),
            states=self.input_states,
        )
        if (as_int32(plan.token_ids) < 0).any():
            inputs = inputs._replace(token_ids=resolve(inputs.token_ids, self._before))
        return inputs
