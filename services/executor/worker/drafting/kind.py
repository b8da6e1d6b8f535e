"""What a rank drafts with: a model of its own, or a head of the model that is served (`catalog.py`).

directory_of ──▶ check, on rank 0 ──▶ load, on every rank ──▶ model: beside the model, in its own page layers
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.store import KvStore
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import MemoryCheck, Share


class Directories(NamedTuple):
    """Where the ring's models are."""

    model: Path
    draft: Path | None  # None: there is no draft model


class DraftRequest(NamedTuple):
    settings: ExecutorSettings  # as the draft model's own would be
    asked: ExecutorSettings  # the ring's
    spec: RankSpec
    model: Path  # directory of the model that is served
    directory: Path  # of the draft model
    device: torch.device
    collectives: Collectives
    target: Share  # of the model that is served
    has_room: MemoryCheck


class LoadedDraft(NamedTuple):
    """One rank's weights."""

    share: Share
    # The model of the share's runner, of its own page layers, and of the runner that it computes beside.
    model: Callable[[ModelRunner, KvStore, ModelRunner], DraftModel]


class DraftKind(Protocol):
    def within(self, settings: ExecutorSettings, model: Path) -> Path | None:
        """Where it is, if --draft-model asks for what the directory `model` itself has; else None."""
        ...

    def recognizes(self, settings: ExecutorSettings, directory: Path) -> bool:
        """Whether what is in `directory` is of this kind."""
        ...

    def check(self, settings: ExecutorSettings, model: Path, directory: Path) -> None:
        """Raises `ModelLoadError` where what is in `directory` does not go with the model in `model`."""
        ...

    def load(self, request: DraftRequest) -> LoadedDraft:
        """Reads it. Raises `ModelLoadError`, and what `has_room` raises."""
        ...
