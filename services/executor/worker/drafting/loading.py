"""Brings one rank's share of a draft model into memory, beside the model that is served.

Whatever keeps it from computing is told, and the ring serves without.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates, page_layers
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room, smallest
from services.executor.kv_cache.offload import BlockCopier, Spill
from services.executor.kv_cache.store import KvStore
from services.executor.worker.drafting.heads import DraftHead, HeadShare, load_head
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.drafting.translation import Translation
from services.executor.worker.drafting.vocabulary import is_head, translation_of
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, load_share
from shared.errors import ConfigurationError, ModelLoadError

if TYPE_CHECKING:  # it imports Triton
    from services.executor.gpu.steps import StepLimits

log = structlog.get_logger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class DraftShare(NamedTuple):
    """One rank's weights of a draft model, or why there are none."""

    share: Share | None = None
    reason: str = ""
    """One sentence; empty: no draft model was asked for."""
    translation: Translation | None = None
    """None: it has the vocabulary of the model that is served."""

    @property
    def states(self) -> LayerStates:
        return () if self.share is None else self.share.facts.states

    @property
    def imports(self) -> list[str]:
        """See `Share.imports`."""
        return [] if self.share is None else self.share.imports

    def beside(
        self,
        target: ModelRunner,
        store: KvStore,
        spill: Spill,
        collectives: Collectives,
        limits: "StepLimits | None",
    ) -> DraftModel | None:
        """Has it compute beside `target`, in the last page layers of `store`, whose blocks are copied whole from then
        on; `limits`: of a GPU's steps. To be called once; None: there is no draft model."""
        if self.share is None:
            return None
        count = len(page_layers(self.states))
        own = store.part(store.shape.num_layers - count, count)
        draft = self._computing(self.share, own, spill, target, limits)
        draft.runner.warm_up()
        target.add_draft(draft, BlockCopier(store, spill, collectives))
        return draft

    def _computing(
        self, share: Share, own: KvStore, spill: Spill, target: ModelRunner, limits: "StepLimits | None"
    ) -> DraftModel:
        runner = share.runner(own, spill, limits, target)
        if isinstance(share, HeadShare):
            return DraftHead(share, runner, own)
        if self.translation is None:
            return DraftModel(share, runner)
        return DraftModel(share, runner, self.translation.fitted(target.vocab_size, runner.vocab_size))


class _NoRoom(ConfigurationError):
    pass


class Directories(NamedTuple):
    """Where the ring's models are."""

    model: Path
    draft: Path | None
    """None: there is no draft model."""


def load_draft(
    settings: ExecutorSettings,
    spec: RankSpec,
    where: Directories,
    device: torch.device,
    collectives: Collectives,
    target: Share,
    context: int,
) -> DraftShare:
    """Reads the draft model beside `target`, which serves sequences of `context` tokens. Where some rank has no room
    for both, all ranks do without. Raises `ModelLoadError` and `ConfigurationError`."""
    directory = where.draft
    if directory is None:
        return DraftShare()
    room = partial(_check_room, settings, target, context, device)
    own = settings.model_copy(
        update={
            "model": settings.draft_model,
            "dtype": _DTYPES[target.dtype],
            "context_length": 0,
            "kv_dtype_layers": "",
            "weights_memory": 0,
        }
    )
    share: Share | None = None
    translation: Translation | None = None
    reason = ""
    try:
        if is_head(settings, directory):
            share = load_head(settings, directory, where.model, device, collectives, target, room)
        else:
            translation = translation_of(where.model, directory)
            share = load_share(own, spec, directory, device, collectives, lambda done, total: None, room)
        room(share.facts.states, target.dtype, share.facts.context_length, None, 0)
    except _NoRoom as error:
        share, reason = None, error.message
    if not smallest((int(share is not None),), device, collectives)[0]:
        reason = reason or "Another rank has no room for it."
        log.warning("draft_model_left_out", draft_model=settings.draft_model, reason=reason)
        return DraftShare(None, reason)
    assert share is not None, "all ranks have it"
    longest = share.facts.context_length
    log.info(
        "draft_model_loaded",
        draft_model=settings.draft_model,
        context_length=longest,
        up_to=min(longest, context),
    )
    return DraftShare(share, translation=translation)


def _check_room(
    settings: ExecutorSettings,
    target: Share,
    context: int,
    device: torch.device,
    states: LayerStates,
    dtype: torch.dtype,
    own_context: int,
    widths: StepWidths | None,
    weights: int,
) -> None:
    """`Enough` of a draft model, beside `target`, whose weights are there and which serves `context` tokens."""
    _check_states(states)
    facts = target.facts
    try:
        check_room(settings, facts.states, target.dtype, context, device, weights, target.widths, states)
    except ConfigurationError as error:
        raise _NoRoom(error.message) from None


def _check_states(states: LayerStates) -> None:
    """Raises `ModelLoadError` where a draft model could not go back behind what it has proposed."""
    if any(state.slot for state in states):
        raise ModelLoadError(
            "The draft model has layers that keep a state of each sequence beside the KV cache, from which its own "
            "proposals cannot be taken back; choose another, or leave out --draft-model."
        )
