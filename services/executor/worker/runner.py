"""One rank's forward pass over a step plan."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import structlog
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.core.engine import PendingTokens, RestoreFailed
from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats, PromptTokenScores, no_scores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import AdapterDtype
from services.executor.core.spans import span
from services.executor.core.step_plan import Int32Array, StepPlan, as_int32, plan_alone
from services.executor.kv_cache.offload import BlockCopier, Spill, TransferEndpoint
from services.executor.kv_cache.store import KvStore
from services.executor.model.adapters.holder import AdapterHolder, ReservingHolder, RoundingHolder
from services.executor.model.adapters.modules import AdapterLoader, ModuleAdapters
from services.executor.model.adapters.targets import AdapterTarget
from services.executor.model.dtypes import not_finite
from services.executor.model.lowering import Decoder, sums_of
from services.executor.model.parallel.layers import VocabParallelHead
from services.executor.model.step_context import AttentionBackend, StepContext
from services.executor.native.library import LEVEL
from services.executor.sampling.candidates import (
    WANT,
    RowLogits,
    collect,
    collect_largest,
    only_largest,
    score,
    threads_for,
)
from services.executor.sampling.sampler import RowKernels, TorchKernels
from shared.errors import ModelLoadError

log = structlog.get_logger(__name__)


def widths_of(model: Any) -> list[int]:
    """Each rank's share of the vocabulary."""
    head = model.get_output_embeddings()
    assert isinstance(head, VocabParallelHead)
    return head.widths


NO_POOLS = np.zeros((0, 2), np.int32)


class _HiddenStateHook:
    """The hidden states behind a model's last norm, of the forward pass in the context."""

    def __init__(self, model: Any, *, wanted: bool) -> None:
        self._model, self._wanted = model, wanted
        self._states: Tensor | None = None

    def __enter__(self) -> "_HiddenStateHook":
        self._handle = self._model.base_model.register_forward_hook(self._keep) if self._wanted else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _keep(self, module: nn.Module, args: object, output: Any) -> None:
        self._states = output[0]

    def sums(self, pools: Int32Array) -> Floats:
        """float32 [P, hidden] over the rows [first, end) of each pool."""
        if not len(pools):
            return np.zeros((0, 0), np.float32)
        assert self._states is not None, "the model has no base model"
        return sums_of(self._states[0], pools)


@runtime_checkable
class NativeKernels(Decoder, Protocol):
    """A decoder on the host whose layers wait for blocks that are restored meanwhile."""

    level: str  # of instructions (`native/library.py`)
    packed: Any  # the weights that it multiplies with
    # Address of the number of layers whose blocks are there, of the step that comes; 0: all are.
    restored: int

    @property
    def pages(self) -> list[int]:
        """The page layer of each layer."""
        ...

    @property
    def rows(self) -> RowKernels:
        """Searches its logits, and draws from them."""
        ...

    def spent(self) -> dict[str, float]: ...

    def level_with_finite_logits(self, plan: StepPlan) -> str: ...


class DeviceSteps(Protocol):
    """Steps that a device computes and samples beside the host (`gpu/steps.py`)."""

    def tap(self, layers: Sequence[int], take: Callable[[StepPlan, Tensor], None]) -> None: ...

    def prepare(self) -> None: ...

    def launch(
        self, plan: StepPlan, states: Sequence[SamplingState] | None, progress: ProgressCounter
    ) -> PendingTokens: ...

    def can_sample(self, rows: int) -> bool: ...

    def close(self) -> None: ...


class Draft(Protocol):
    """A ring's draft model, on one rank (`drafting/model.py`)."""

    def follow(self, plan: StepPlan, progress: ProgressCounter) -> None:
        """Computes the rows of a step of the model that is served, for its own keys and values."""
        ...

    def copied(self, plan: StepPlan) -> None:
        """The plan's blocks have been copied. Compresses its own keys and values of those that a step fills which it
        does not follow: it has computed their rows before."""
        ...

    @property
    def reads_layers(self) -> Sequence[int] | None:
        """The layers whose inputs it reads; none: what comes behind the last norm. None where it reads no states."""
        ...

    def watching(self, model: Any, plan: StepPlan) -> AbstractContextManager[object]:
        """Around the forward pass of `plan` by transformers' modules, whose states it may read."""
        ...

    def take(self, plan: StepPlan, states: Tensor) -> None:
        """`states` [T, layers * hidden] of the plan's rows, as `reads_layers` says."""
        ...

    def forward(self, plan: StepPlan, progress: ProgressCounter) -> Tensor | RowLogits | None:
        """Computes a plan that is `of_draft`, as `ModelRunner.forward` does."""
        ...


class ModelRunner:
    """Runs step plans on one rank's share of a model. Every rank of the ring runs the same plans in order."""

    def __init__(
        self,
        model: nn.Module | None,
        widths: list[int],
        store: KvStore,
        collectives: Collectives,
        device: torch.device,
        spill: Spill | None = None,
        decoder: Decoder | None = None,
        attention: AttentionBackend | None = None,
        steps: DeviceSteps | None = None,
        kernels: str = "",
        exact: bool = False,
    ):
        """`widths`: each rank's share of the vocabulary. `decoder` computes in place of `model`, which need not be
        there then; `attention` is what the model's attention uses;
        `steps`, around the same decoder, need not be waited for.
        `kernels`: what computes; empty: PyTorch's. `exact`: whether each row is computed as if it were alone."""
        # What computes, by a name that stands for one order of sums and one way of rounding.
        self.kernels = kernels or f"PyTorch {device.type}"
        self._model: Any = model
        self._decoder = decoder
        # None: the native kernels do not compute.
        self.native = decoder if isinstance(decoder, NativeKernels) else None
        # Whether what a row comes to is a function of its token, its position and what it reads, to the bit.
        self.is_exact = self.is_native or exact
        self._attention = attention
        self._steps = steps
        by_torch = TorchKernels() if decoder is None else TorchKernels(decoder.largest)
        self.rows: RowKernels = by_torch if self.native is None else self.native.rows
        self._store = store
        self._copier = BlockCopier(store, spill, collectives)
        self.collectives = collectives
        self._device = device
        self._widths = widths
        self._adapters: AdapterLoader | None = None
        self._draft: Draft | None = None
        self._left_out: Tensor | None = None
        # What the last step has summed up of `plan.pools`, on rank 0: float32 [P, hidden].
        self.pooled: Floats = np.zeros((0, 0), np.float32)
        self.scored: PromptTokenScores = no_scores()  # what the last step's `plan.score_rows` gave, on rank 0

    def serve_adapters(
        self,
        targets: Sequence[AdapterTarget],
        dtype: torch.dtype,
        slots: int,
        max_rank: int,
        kept: AdapterDtype = "auto",
    ) -> None:
        """Has steps load and use LoRA adapters of up to `max_rank`, in as many `slots`, where what computes can;
        `targets`: this rank's, `dtype`: the model's, `kept`: as `ExecutorSettings.adapter_dtype`. Raises
        `ModelLoadError` where what computes does not keep them so."""
        holder: Any = getattr(self._decoder, "adapters", None)
        if self._decoder is None:
            holder = ModuleAdapters(self._model, targets, self._device)
        if isinstance(holder, RoundingHolder):
            holder.keep_as(kept)
        elif kept not in ("auto", "bf16" if dtype is torch.bfloat16 else ""):
            raise ModelLoadError(
                f"The adapter dtype {kept} is for the native CPU kernels, and what computes here keeps LoRA adapters "
                "in the model's data type; leave RYZANSTEIN_ADAPTER_DTYPE at auto."
            )
        if isinstance(holder, ReservingHolder):
            holder.reserve(slots, max_rank)
        if isinstance(holder, AdapterHolder):
            self._adapters = AdapterLoader(holder, targets, dtype, max_rank)

    @property
    def takes_adapters(self) -> bool:
        return self._adapters is not None

    @property
    def adapter_modules(self) -> set[str] | None:
        """Names of the modules that what computes takes adapters for; None: of all that adapters may change."""
        held: Any = getattr(self._decoder, "adapters", None)
        return None if held is None else held.modules

    def add_draft(self, draft: Draft, copier: BlockCopier) -> None:
        """Has `draft` compute beside the model. `copier`: of the blocks that both share, in place of the own one."""
        self._draft, self._copier = draft, copier
        if self._steps is not None and draft.reads_layers is not None:
            self._steps.tap(draft.reads_layers, draft.take)

    def leave_out(self, tokens: NDArray[np.bool_]) -> None:
        """See `collect`: `tokens`, bool [vocabulary], are no candidates from now on."""
        begin = sum(self._widths[: self.collectives.rank])
        own = tokens[begin : begin + self._widths[self.collectives.rank]]
        self._left_out = torch.from_numpy(np.flatnonzero(own)).to(self._device)

    def connect(self, endpoint: TransferEndpoint) -> None:
        self._copier.endpoint = endpoint

    def close(self) -> None:
        """To be called before the collectives are closed. No step comes after it."""
        if self._steps is not None:
            self._steps.close()

    @property
    def vocab_size(self) -> int:
        return sum(self._widths)

    @property
    def is_native(self) -> bool:
        return self.native is not None

    @property
    def packed(self) -> Any:
        """The weights that the native kernels multiply with; None where they do not compute."""
        return None if self.native is None else self.native.packed

    def compress(self, plan: StepPlan) -> None:
        """Compresses the blocks that the plan says in all layers, and computes nothing."""
        self._store.compress(as_int32(plan.compressions).reshape(-1, 2))

    def spent(self) -> dict[str, float]:
        """Seconds that the native kernels have spent on each part of the steps so far."""
        assert self.native is not None, "the native kernels do not compute"
        return self.native.spent()

    @torch.inference_mode()
    def forward(self, plan: StepPlan, progress: ProgressCounter | None = None) -> Tensor | RowLogits | None:
        """Copies what the plan copies, then computes the step; `progress` counts the layers.

        Returns the logits of `plan.sample_rows` on rank 0 and None on the others: as much of them as
        `plan.candidates` asks for, or without it float32 [R, vocab]. R may be 0.
        Raises `shared.errors.RingLost` when another rank is gone. Where some rank cannot restore a block no
        rank's result is used, and rank 0 raises `RestoreFailed`.
        """
        progress = progress or ProgressCounter.unread()
        if plan.on_device:
            self.launch(plan, None, progress)
            return None
        native = self.native
        if native is not None and plan.token_ids and not plan.of_draft and self._copier.can_begin(plan):
            return self._forward_beside_restores(native, plan, progress)
        if not self._copy(plan, progress) or not plan.token_ids:
            return self._no_logits()
        if plan.of_draft:
            assert self._draft is not None, "a plan is of a draft model, and the ring has none"
            return self._draft.forward(plan, progress)
        logits = self._logits(plan, progress)
        self._follow(plan, progress)
        return logits

    def _forward_beside_restores(
        self, native: NativeKernels, plan: StepPlan, progress: ProgressCounter
    ) -> Tensor | RowLogits | None:
        """Each layer waits for the blocks that it attends to; where no sequence of the step does, none waits."""
        self._load_adapters(plan, progress)
        restore = self._copier.begin(plan, native.pages, progress.tick)
        try:
            blocks = as_int32(plan.restores)[1::2]
            native.restored = restore.address if np.isin(blocks, as_int32(plan.block_tables)).any() else 0
            logits = self._logits(plan, progress)
        finally:
            restore.join()
            native.restored = 0
        if self._failed(self._copier.finish(plan, restore)):
            return self._no_logits()
        self._tell_draft(plan)
        self._follow(plan, progress)
        return logits

    def _follow(self, plan: StepPlan, progress: ProgressCounter) -> None:
        if plan.followed and self._draft is not None:
            self._draft.follow(plan, progress)

    def _no_logits(self) -> Tensor | None:
        """Of a step that samples no row."""
        return torch.empty((0, self.vocab_size), dtype=torch.float32, device=self._device) if self._is_leader else None

    def _logits(self, plan: StepPlan, progress: ProgressCounter) -> Tensor | RowLogits | None:
        wants = np.frombuffer(plan.candidates, WANT)
        fused = None if plan.pools or plan.score_rows or self._read_draft else self._decoder
        if fused is not None and len(wants) and only_largest(wants):
            with span(fused.label):
                largest = fused.forward_to_largest(plan, progress)
            return collect_largest(largest, self.collectives, self._widths)
        local = self._compute_and_score(plan, progress)
        if not plan.sample_rows:
            return self._no_logits()
        if plan.candidates:
            with threads_for(len(wants)):
                return collect(local, wants, self.collectives, self._widths, self.rows, self._left_out)
        parts = self.collectives.gather_to_leader(local, self._widths)
        if parts is None:
            return None
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return whole.float()

    @property
    def _read_draft(self) -> Draft | None:
        """The draft model, where it reads states."""
        return None if self._draft is None or self._draft.reads_layers is None else self._draft

    def can_launch(self, rows: int) -> bool:
        """Whether `launch` takes a step of which so many rows are sampled."""
        return self._steps is not None and self._steps.can_sample(rows)

    def launch(
        self, plan: StepPlan, states: Sequence[SamplingState] | None, progress: ProgressCounter
    ) -> PendingTokens | None:
        """Has the device begin a plan that is `on_device`, with its `candidates` and without pools, and sample its
        rows; waits for nothing but the plan's copies.

        `states`, on rank 0, of rows whose tokens do not need the host; None on the others, whose result is of no use.
        Raises as `forward` does; None where a restore has failed on another rank than 0.
        """
        assert self._steps is not None, "steps are waited for here"
        if not self._copy(plan, progress):
            return None
        return self._steps.launch(plan, states, progress)

    def _copy(self, plan: StepPlan, progress: ProgressCounter) -> bool:
        """Loads and copies what the plan does; False where some rank cannot restore a block, on rank 0
        `RestoreFailed`. Adapters come first: the next plan counts on them, whatever becomes of this one."""
        self._load_adapters(plan, progress)
        with span("copy KV blocks"):
            failed = self._copier.run(plan)
        if self._failed(failed):
            return False
        self._tell_draft(plan)
        return True

    def _failed(self, slots: list[int]) -> bool:
        """Whether there are any; on rank 0 `RestoreFailed` then."""
        if slots and self._is_leader:
            raise RestoreFailed(slots)
        return bool(slots)

    def _load_adapters(self, plan: StepPlan, progress: ProgressCounter) -> None:
        if self._adapters is not None:
            for load in plan.adapter_loads:
                self._adapters.load([load])
                progress.tick()

    def _tell_draft(self, plan: StepPlan) -> None:
        if self._draft is not None:
            self._draft.copied(plan)

    def _compute_and_score(self, plan: StepPlan, progress: ProgressCounter) -> Tensor:
        """This rank's share of the logits [R, vocab share] of the rows that are sampled; those that are scored have
        given what they are for."""
        if not plan.score_rows:
            return self._compute(plan, progress)
        both = structs.replace(plan, sample_rows=plan.sample_rows + plan.score_rows)
        local = self._compute(both, progress)
        sampled = len(as_int32(plan.sample_rows))
        with span("score prompts"):
            found = score(local[sampled:], as_int32(plan.score_targets), plan.score_top, self.collectives, self._widths)
        self.scored = found or no_scores(plan.score_top)
        return local[:sampled]

    def _compute(self, plan: StepPlan, progress: ProgressCounter) -> Tensor:
        """This rank's share of the logits [R, vocab share]."""
        pools = as_int32(plan.pools).reshape(-1, 2) if self._is_leader else NO_POOLS
        if self._decoder is not None and (draft := self._read_draft) is not None:
            layers = draft.reads_layers or ()
            with span(self._decoder.label):
                logits, self.pooled, states = self._decoder.forward_with_states(plan, progress, pools, layers)
            draft.take(plan, states)
            return logits
        if self._decoder is not None:
            with span(self._decoder.label):
                logits, self.pooled = self._decoder.forward(plan, progress, pools)
            return logits
        watched = nullcontext() if self._draft is None else self._draft.watching(self._model, plan)
        with span("compute"), watched, _HiddenStateHook(self._model, wanted=len(pools) > 0) as kept:
            local = self._compute_with_pytorch(plan, progress)
        self.pooled = kept.sums(pools)
        return local

    def _compute_with_pytorch(self, plan: StepPlan, progress: ProgressCounter) -> Tensor:
        step = StepContext(plan, self._store, progress.tick, self._attention)
        # The model's own forward applies what some do to logits (scaling, soft caps): both work on shares.
        with nullcontext() if self._adapters is None else self._adapters.computing(plan, step):
            local: Tensor = self._model(
                input_ids=self._int64(plan.token_ids).unsqueeze(0),
                position_ids=self._int64(plan.positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._int64(plan.sample_rows),
                step=step,
            ).logits[0]
        return local

    def warm_up(self, rehearsal: Sequence[StepPlan] = ()) -> None:
        """Runs one step of two tokens through block 0, which must be free: what cannot run fails here. Then those of
        `rehearsal`, whatever they compute. Captures graphs where there are to be some, and compiles what samples.

        Raises `shared.errors.ModelLoadError` when the model asks for what attention does not support, or
        when its weights compute what is no number.
        """
        size = self._store.block_size
        first = plan_alone(min(2, size), list(range(min(2, size))), size)
        logits = self.forward(first)
        if isinstance(logits, Tensor) and not bool(logits.isfinite().all()):
            raise self._cause_of_infinite_logits(first)
        self._rehearse(rehearsal)
        if self._steps is not None:
            self._steps.prepare()

    def _cause_of_infinite_logits(self, plan: StepPlan) -> ModelLoadError:
        native = self.native
        if native is not None and (other := native.level_with_finite_logits(plan)):
            return ModelLoadError(
                f"The CPU kernels of the level {native.level!r} compute NaN or infinite values of the model's weights, "
                f"and those of {other!r} finite ones: the kernels are wrong on this CPU, not the weights; set "
                f"{LEVEL}={other}, and report it."
            )
        return not_finite()

    def _rehearse(self, steps: Sequence[StepPlan]) -> None:
        if not steps:
            return
        log.info("warming_up", steps=len(steps))
        began = time.perf_counter()
        for plan in steps:
            self.forward(plan)
        log.info("warmed_up", steps=len(steps), seconds=round(time.perf_counter() - began, 2))

    @property
    def _is_leader(self) -> bool:
        return self.collectives.rank == 0

    def _int64(self, payload: bytes) -> Tensor:
        return torch.from_numpy(as_int32(payload).astype(np.int64)).to(self._device)
