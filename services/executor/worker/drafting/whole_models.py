"""Draft models: smaller models of their own, with the same vocabulary or another (`translation.py`)."""

from pathlib import Path
from typing import NamedTuple

import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepLimits
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.worker.backends.catalog import load_share
from services.executor.worker.drafting.kind import DraftRequest
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.drafting.translation import Translation
from services.executor.worker.drafting.vocabulary import translation_of
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, ShareRequest

log = structlog.get_logger(__name__)

_WEIGHTS = {".safetensors", ".bin", ".gguf"}


class LoadedDraftModel(NamedTuple):
    share: Share
    translation: Translation | None  # None: it has the vocabulary of the model that is served

    def computing(self, own: KvStore, spill: Spill, limits: StepLimits | None, target: ModelRunner) -> DraftModel:
        runner = self.share.runner(own, spill, limits, target)
        if self.translation is None:
            return DraftModel(self.share, runner)
        return DraftModel(self.share, runner, self.translation.fitted(target.vocab_size, runner.vocab_size))


class WholeModels:
    def within(self, settings: ExecutorSettings, model: Path) -> Path | None:
        return None

    def recognizes(self, settings: ExecutorSettings, directory: Path) -> bool:
        return True

    def check(self, settings: ExecutorSettings, model: Path, directory: Path) -> None:
        translation = translation_of(model, directory)
        if translation is not None:
            log.info("draft_model_by_text", draft_model=settings.draft_model, shared=round(translation.share, 3))
        sizes = [_weight_bytes(where) for where in (model, directory)]
        if sizes[1] >= sizes[0]:
            log.warning(
                "draft_model_not_smaller", draft_model=settings.draft_model, bytes=sizes[1], model_bytes=sizes[0]
            )

    def load(self, request: DraftRequest) -> LoadedDraftModel:
        translation = translation_of(request.model, request.directory)
        where = (request.settings, request.spec, request.directory, request.device, request.collectives)
        share = load_share(ShareRequest(*where, lambda done, total: None, request.has_room))
        return LoadedDraftModel(share, translation)


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)
