"""A ring's draft head: what reads the hidden states of the model that is served (`model/draft_heads.py`).

    step, followed   model ─▶ states of its rows, kept by slot ─▶ head: the same rows, each with the state before it
    round            pass 0   the rows that it has not computed with the model's states, ... ─▶ d1
                     pass k   dk, with its own state of the pass before                     ─▶ d(k + 1)

Everything else is as with a draft model: its pages, its plans, and what is made of its proposals.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch import Tensor

from services.executor.core.draft_passes import slots_before
from services.executor.core.progress import ProgressCounter
from services.executor.core.settings import MTP, ExecutorSettings, thread_count
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan, as_int32
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.dtypes import pytorch_dtype
from services.executor.model.model_facts import ModelFacts
from services.executor.model.tokenizer_files import read_json
from services.executor.platforms.base import sent
from services.executor.sampling.candidates import RowLogits
from services.executor.worker.backends.base import HeadReader, RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.drafting.kind import DraftRequest, LoadedDraft
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.drafting.row_states import RowStates
from services.executor.worker.runner import ModelRunner, widths_of
from services.executor.worker.weights import Share

if TYPE_CHECKING:  # they import transformers
    from services.executor.model.draft_heads import StateTaps
    from services.executor.model.loading.draft_heads import LoadedHead


log = structlog.get_logger(__name__)


class HeadShare(Share):
    """One rank's share of a head."""

    reads_compressed = False

    def __init__(
        self, settings: ExecutorSettings, loaded: "LoadedHead", layout: ShardLayout, dtype: torch.dtype
    ) -> None:
        from services.executor.model.draft_heads import StateTaps
        from services.executor.model.layer_states import layer_states

        config, head = loaded.config, loaded.model
        self.layout, self.dtype = layout, dtype
        self._threads = thread_count(settings)
        self.facts = ModelFacts(
            states=layer_states(config, layout),
            hidden_size=head.hidden,
            context_length=loaded.context_length,
            heads=HeadCounts.from_config(config),
            widths=widths_of(head),
        )
        self.taps = StateTaps(loaded.layers)
        self.head = head
        self.reader: HeadReader = head  # what is handed states, and hands its own over
        self.layers = loaded.layers
        # Whose states are kept: those of a sequence's block that is not full, and those of the last steps.
        self.rows = 2 * settings.max_batch_tokens + settings.max_sequences * settings.block_size

    def runner(
        self, store: KvStore, spill: Spill, limits: StepLimits | None, beside: ModelRunner | None = None
    ) -> ModelRunner:
        assert beside is not None, "a head computes beside its model"
        where = (self.layout, beside.collectives, store.device, self._threads)
        request = RunnerRequest(self.head, store, *where, spill, limits=limits)
        runner, self.reader = backend_of(store.device).head_runner(request)
        return runner

    @property
    def imports(self) -> list[str]:
        return ["services.executor.model.loading.draft_heads"]


class DraftHeadModel(DraftModel):
    """One rank's share of it, beside the model whose states it reads."""

    reads_states = True

    def __init__(self, share: HeadShare, runner: ModelRunner, store: KvStore) -> None:
        super().__init__(share, runner)
        self.reads_layers = share.layers
        self._head = share.reader
        self._taps: StateTaps = share.taps
        self._size = store.block_size
        slots = (store.num_writable + store.num_quantized) * self._size
        self._states = RowStates(slots, share.rows, self._head.hidden, share.dtype, store.device)

    def follow(self, plan: StepPlan, progress: ProgressCounter) -> None:
        with self._reading(plan):
            super().follow(plan, progress)

    def forward(self, plan: StepPlan, progress: ProgressCounter) -> Tensor | RowLogits | None:
        with self._reading(plan):
            logits = super().forward(plan, progress)
        rows = as_int32(plan.sample_rows)
        # In place of the model's own, which the step behind the round computes.
        self._states.keep(
            as_int32(plan.slots)[rows],
            self._head.made.index_select(0, sent(rows.astype(np.int64), self._head.made.device)),
        )
        return logits

    def copied(self, plan: StepPlan) -> None:
        super().copied(plan)
        for pairs in (plan.restores, plan.adoptions):
            blocks = as_int32(pairs)[1::2]
            self._states.forget((blocks[:, None] * self._size + np.arange(self._size)).ravel())

    @contextmanager
    def watching(self, model: Any, plan: StepPlan) -> Iterator[None]:
        with self._taps.watching(model) as states:
            yield
        self.take(plan, torch.cat(states, dim=-1))

    def take(self, plan: StepPlan, states: Tensor) -> None:
        self._states.keep(as_int32(plan.slots), self._head.taken(states))
        filled = (as_int32(plan.compressions).reshape(-1, 2) + 1) * self._size - 1
        self._states.copy(filled[:, 0], filled[:, 1])

    def _reading(self, plan: StepPlan) -> Any:
        return self._head.reading(self._states.at(slots_before(plan, self._size)))


class Heads:
    """EAGLE-3 heads, and those for multi-token prediction of the model's own checkpoint."""

    def within(self, settings: ExecutorSettings, model: Path) -> Path | None:
        return model if settings.draft_model == MTP else None

    def recognizes(self, settings: ExecutorSettings, directory: Path) -> bool:
        named = read_json(directory / "config.json").get("architectures")
        eagle3 = isinstance(named, list) and any("eagle3" in str(one).lower() for one in named)
        return settings.draft_model == MTP or eagle3

    def check(self, settings: ExecutorSettings, model: Path, directory: Path) -> None:
        """A head has no tokenizer of its own; its weights tell the rest, when they are read."""

    def load(self, request: DraftRequest) -> LoadedDraft:
        from services.executor.model.loading.draft_heads import HeadPlacement, load_eagle3_head, load_mtp_head

        target, directory = request.target, request.directory

        def before_reading(least: int) -> None:
            request.has_room((), target.dtype, target.facts.context_length, None, least)

        dtype = pytorch_dtype(target.dtype, request.device, request.collectives)
        place = HeadPlacement(dtype, request.device, request.collectives, before_reading)
        if request.asked.draft_model == MTP:
            loaded = load_mtp_head(directory, place)
        else:
            loaded = load_eagle3_head(directory, request.model, place)
        share = HeadShare(request.asked, loaded, place.layout(loaded.config), dtype)
        return LoadedDraft(share, lambda runner, own, target: DraftHeadModel(share, runner, own))
