"""Draft models: smaller models of their own, with the same vocabulary or another (`translation.py`)."""

from pathlib import Path

import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.kv_cache.store import KvStore
from services.executor.worker.backends.catalog import load_share
from services.executor.worker.drafting.kind import DraftRequest, LoadedDraft
from services.executor.worker.drafting.model import DraftModel
from services.executor.worker.drafting.vocabulary import translation_of
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import ShareRequest

log = structlog.get_logger(__name__)

_WEIGHTS = {".safetensors", ".bin", ".gguf"}


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

    def load(self, request: DraftRequest) -> LoadedDraft:
        translation = translation_of(request.model, request.directory)
        where = (request.settings, request.spec, request.directory, request.device, request.collectives)
        share = load_share(ShareRequest(*where, lambda done, total: None, request.has_room))

        def model(runner: ModelRunner, own: KvStore, target: ModelRunner) -> DraftModel:
            fitted = None if translation is None else translation.fitted(target.vocab_size, runner.vocab_size)
            return DraftModel(share, runner, fitted)

        return LoadedDraft(share, model)


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)
