"""Whole steps on a GPU, from the plan to the tokens, without waiting for any of it.

plan ─▶ GraphedDecoder ─▶ logits, largest ─▶ DeviceSampler ─▶ Pending
              ▲                                    │
              └──── tokens of the step before ─────┘

`warmup_plans`: steps that a rank computes before it is ready, so that no request waits for a kernel to be compiled.
What Triton compiles depends on a step by these alone:

    attention     rows of a tile (16, 32 .. 128), and whether keys are split
    merging       parts that keys are split in (2, 4 .. 64)
    products      tokens of the step, in powers of two up to 128

Each of them comes up in one of the steps here, and so do compressing a block and choosing blocks to read. The longest
is as long as a step may be, so that memory that does not suffice is told before the ring is ready. All read block 0
again and again, and write nothing but the first quantized block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.progress import ProgressCounter
from services.executor.core.sampling_state import SamplingState
from services.executor.core.sparse_attention import PAGES, WINDOW, SparsePattern
from services.executor.core.step_plan import StepLimits, StepPlan, plan_alone, to_bytes
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.graphs import Capture, Computed, CudaCapture, GraphedDecoder, StepGraphs
from services.executor.gpu.inputs import Shape, Staging, capacity_of
from services.executor.gpu.kernels.matmul import MOST_ROWS
from services.executor.gpu.kernels.tiles import LEAST_KEYS, MOST_SPLITS, PREFILL_ROWS, rows_for
from services.executor.gpu.prompt_graphs import PromptGraphs, PromptShape
from services.executor.gpu.sampling import DeviceSampler, Pending, largest_of_ranks, resolve, tell
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.sampling.candidates import WANT, only_largest
from services.executor.sampling.sampler import wants_of
from shared.messages import SamplingParams


class SequenceChunk(NamedTuple):
    """Of one sequence."""

    tokens: int
    context: int  # tokens behind it, its own included


def warmup_chunks(most_tokens: int, context_length: int, group: int) -> list[SequenceChunk]:
    """One for each way of computing a step of up to `most_tokens`, of sequences of up to `context_length`, with `group`
    query heads per KV head; the longest first, whose memory the others find free."""
    most = min(most_tokens, context_length)
    least = rows_for(group, 1)
    tiles = [max(1, min(rows // group, most)) for rows in _powers(least, max(least, PREFILL_ROWS))]
    products = [min(tokens, most) for tokens in (1, *_powers(16, MOST_ROWS), most)]
    split = [parts // 2 * LEAST_KEYS + 1 for parts in _powers(2, MOST_SPLITS)]
    split = [context for context in split if context <= context_length]
    found = {SequenceChunk(tokens, tokens) for tokens in (*tiles, *products)}
    found |= {SequenceChunk(tokens, context) for context in split[:1] for tokens in tiles if tokens <= context}
    found |= {SequenceChunk(1, context) for context in split}
    return sorted(found, reverse=True)


def warmup_plans(
    found: Sequence[SequenceChunk], block_size: int, compression: tuple[int, int] | None
) -> list[StepPlan]:
    """A step of each of `found` alone; the first one compresses the blocks (writable id, quantized id), where there are
    some."""
    made = [plan_alone(context, [-1] * tokens, block_size) for tokens, context in found]
    if compression is not None:
        made[0] = structs.replace(made[0], compressions=to_bytes([compression]))
    return made


def sparse_warmups(shape: StoreShape, context_length: int) -> list[StepPlan]:
    """A step whose row reads some blocks only, where requests may choose that: by summaries where there are any."""
    context = 3 * shape.block_size + 1
    if not shape.choosing or context > context_length:
        return []
    summarised = any(pages.summary for pages in shape.pages)
    choice = SparsePattern(PAGES if summarised else WINDOW, 0, 0, 1, 1, 0, 0)
    return [structs.replace(plan_alone(context, [-1], shape.block_size), sparse=to_bytes(list(choice)))]


def _powers(first: int, last: int) -> list[int]:
    """`first` and its doubles up to `last`."""
    return [first << times for times in range((last // first).bit_length())]


class GpuSteps:
    """One rank's."""

    def __init__(
        self,
        decoder: GpuDecoder,
        store: KvStore,
        collectives: Collectives,
        widths: Sequence[int],
        limits: StepLimits,
        capture: Capture | None = None,
    ) -> None:
        """`widths`: each rank's share of the vocabulary. `capture` makes the graphs; None: CUDA does."""
        device = store.device
        self._collectives = collectives
        self._widths = list(widths)
        self._limits = limits
        rows = max(limits.max_sequences, limits.max_batch_tokens)
        staging = Staging(capacity_of(limits, store.block_size), device)
        shape = decoder.shape._replace(context_length=limits.context_length)
        self._sampler = DeviceSampler(rows, sum(widths), device)
        before = self._sampler.tokens
        self._graphs = None
        if limits.graph_memory:
            capture = capture or CudaCapture(device)
            self._graphs = StepGraphs(decoder, shape, limits.max_sequences, staging, before, capture)
            self._graphs.prompts = self._prompts(decoder, store, shape, staging, before)
        self.decoder = GraphedDecoder(decoder, shape, staging, before, self._graphs)
        self._take: Callable[[StepPlan, Tensor], None] | None = None

    def _prompts(
        self, decoder: GpuDecoder, store: KvStore, shape: Shape, staging: Staging, before: Tensor
    ) -> PromptGraphs | None:
        """None where they are not wanted, or a layer reads more of a step than graphs have room for."""
        if not self._limits.prompt_graphs or decoder.states_width or any(pages.summary for pages in store.shape.pages):
            return None
        of_step = PromptShape(shape, self._limits.max_sequences, compresses=store.num_quantized > 0)
        most = self._limits.max_batch_tokens
        return PromptGraphs(decoder, of_step, most, staging, lambda token_ids: resolve(token_ids, before))

    def tap(self, layers: Sequence[int], take: Callable[[StepPlan, Tensor], None]) -> None:
        """Hands what `layers` read of each step that is launched to `take`, as a draft head's; before `prepare`."""
        self.decoder.tap(layers)
        self._take = take

    def prepare(self) -> None:
        """Makes the graphs, and runs a step that is sampled in every way, so that no request waits for a kernel to be
        compiled; by all ranks, through block 0, which must be free. Where graphs cannot be made steps are launched
        kernel by kernel."""
        if self._graphs is not None:
            self._graphs.capture(self._limits.graph_memory, self._agree)
        params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
        states = [SamplingState(params, [0], [])]
        wants = wants_of(states, sum(self._widths))
        plan = structs.replace(plan_alone(1, [0], 1), candidates=wants.tobytes(), on_device=True)
        pending = self.launch(plan, states if self._collectives.rank == 0 else None, ProgressCounter.unread())
        pending.wait()  # else what has failed on the device is told to the first request

    @torch.inference_mode()
    def launch(self, plan: StepPlan, states: Sequence[SamplingState] | None, progress: ProgressCounter) -> Pending:
        """Begins a step, without pools, that some rows are sampled of; by all ranks. `states`, of rows that do not
        need the host, are rank 0's; the others' are None, and so are not asked for their tokens."""
        computed = self.decoder.launch(plan, progress)
        if self._take is not None and self.decoder.tapped is not None:
            self._take(plan, self.decoder.tapped)
        greedy = only_largest(np.frombuffer(plan.candidates, WANT))
        if greedy:
            start = sum(self._widths[: self._collectives.rank])
            found = largest_of_ranks(computed.largest, computed.tokens, self._collectives, start)
            return self._sampler.sample(computed.logits, *found, states or ())
        whole = self._gathered(computed)
        if whole is None or states is None:
            nothing = self._sampler.tokens[: len(computed.tokens)]
            return self._sampler.sample(computed.logits, computed.largest, tell(nothing, self._collectives), ())
        pending = self._sampler.sample(*whole, states)
        if self._collectives.world_size > 1:
            tell(self._sampler.tokens[: len(states)], self._collectives)
        return pending

    def close(self) -> None:
        """Lets go of what keeps the collectives from being closed: NCCL waits for graphs that hold its operations."""
        if self._graphs is not None:
            self._graphs.close()

    def can_sample(self, rows: int) -> bool:
        """Whether it has room for as many rows."""
        return 0 < rows <= len(self._sampler.tokens)

    def _gathered(self, computed: Computed) -> Computed | None:
        """`computed` of the whole vocabulary on rank 0, None on the others."""
        if self._collectives.world_size == 1:
            return computed
        parts = self._collectives.gather_to_leader(computed.logits.contiguous(), self._widths)
        if parts is None:
            return None
        logits = torch.cat(parts, dim=-1)
        return Computed(logits, *logits.max(dim=-1))

    def _agree(self, fine: bool) -> bool:
        """Whether every rank says so."""
        if self._collectives.world_size == 1:
            return fine
        refused = torch.tensor([0.0 if fine else 1.0], device=self._sampler.tokens.device)
        return self._collectives.all_reduce(refused).item() == 0.0
