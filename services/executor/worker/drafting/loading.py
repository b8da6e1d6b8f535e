"""Brings one rank's share of a draft model into memory, beside the model that is served.

Whatever keeps it from computing is told, and the ring serves without.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates, page_layers
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepLimits
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room, smallest
from services.executor.kv_cache.offload import BlockCopier, Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.catalogue import is_encoder
from services.executor.model.loading.checkpoints import resolve_model
from services.executor.model.pooling import is_classifier
from services.executor.model.tokenizer_files import read_json
from services.executor.worker.drafting.catalog import DRAFT_KINDS
from services.executor.worker.drafting.kind import Directories, DraftKind, DraftRequest, LoadedDraft
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store.locks import hold_model
from shared.models import HUB

log = structlog.get_logger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class DraftShare(NamedTuple):
    """One rank's weights of a draft model, or why there are none."""

    loaded: LoadedDraft | None = None
    reason: str = ""  # one sentence; empty: no draft model was asked for

    @property
    def share(self) -> Share | None:
        return None if self.loaded is None else self.loaded.share

    @property
    def states(self) -> LayerStates:
        return () if self.share is None else self.share.facts.states

    @property
    def imports(self) -> list[str]:
        """See `Share.imports`."""
        return [] if self.share is None else self.share.imports

    def beside(
        self, target: ModelRunner, store: KvStore, spill: Spill, collectives: Collectives, limits: StepLimits | None
    ) -> DraftModel | None:
        """Has it compute beside `target`, in the last page layers of `store`, whose blocks are copied whole from then
        on; `limits`: of a GPU's steps. To be called once; None: there is no draft model."""
        if self.loaded is None:
            return None
        count = len(page_layers(self.states))
        own = store.part(store.shape.num_layers - count, count, dtype=self.loaded.share.dtype)
        runner = self.loaded.share.runner(own, spill, limits, target)
        draft = self.loaded.model(runner, own, target)
        runner.warm_up()
        target.add_draft(draft, BlockCopier(store, spill, collectives))
        return draft


class _NoRoom(ConfigurationError):
    pass


def kind_of(settings: ExecutorSettings, directory: Path) -> DraftKind:
    """Raises `ModelLoadError`."""
    for kind in DRAFT_KINDS:
        if kind.recognizes(settings, directory):
            return kind
    raise ModelLoadError(
        f"The directory {directory} holds no supported draft model; choose another --draft-model, or leave it out."
    )


def draft_directory(settings: ExecutorSettings, target: Path) -> Path | None:
    """Of the draft model for the model in `target`; None: none is asked for, or no drafts at all. Raises
    `ModelLoadError` where they do not fit together, or it is not to be had."""
    if not settings.draft_model or not settings.max_drafts:
        return None
    for kind in DRAFT_KINDS:
        if (directory := kind.within(settings, target)) is not None:
            return directory
    directory = resolve_model(settings.draft_model, settings.store, lambda *step: None)
    hold_model(directory, settings.model_cache)  # as long as this process lives
    for which, where in (("model", target), ("draft model", directory)):
        described = read_json(where / "config.json")
        if is_encoder(described) or is_classifier(described):
            raise ModelLoadError(f"The {which} in {where} does not generate token by token; leave out --draft-model.")
    kind_of(settings, directory).check(settings, target, directory)
    return directory


def draft_name(settings: ExecutorSettings) -> str:
    """What people call it: the last part of a path, or the hub name; empty: none is asked for, or no drafts at all."""
    name = settings.draft_model if settings.max_drafts else ""
    return Path(name).name.removesuffix(".gguf") if name.startswith(("/", "~", ".")) else name.removeprefix(HUB)


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
    loaded: LoadedDraft | None = None
    reason = ""
    kind = kind_of(settings, directory)
    try:
        loaded = kind.load(DraftRequest(own, settings, spec, where.model, directory, device, collectives, target, room))
        facts = loaded.share.facts
        room(facts.states, target.dtype, facts.context_length, None, 0)
    except _NoRoom as error:
        loaded, reason = None, error.message
    if not smallest((int(loaded is not None),), device, collectives)[0]:
        reason = reason or "Another rank has no room for it."
        log.warning("draft_model_left_out", draft_model=settings.draft_model, reason=reason)
        return DraftShare(None, reason)
    assert loaded is not None, "all ranks have it"
    longest = loaded.share.facts.context_length
    log.info(
        "draft_model_loaded", draft_model=settings.draft_model, context_length=longest, up_to=min(longest, context)
    )
    return DraftShare(loaded)


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
    """`MemoryCheck` of a draft model, beside `target`, whose weights are there and which serves `context` tokens."""
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
