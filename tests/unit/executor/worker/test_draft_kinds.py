"""What a rank drafts with: each kind can be taken out of the list."""

import json
from pathlib import Path

import pytest

from services.executor.core.settings import MTP, ExecutorSettings
from services.executor.worker.drafting import loading
from services.executor.worker.drafting.catalog import DRAFT_KINDS
from services.executor.worker.drafting.heads import Heads
from services.executor.worker.drafting.whole_models import WholeModels
from shared.errors import ModelLoadError

KINDS = {"model": ("LlamaForCausalLM", WholeModels), "head": ("LlamaForCausalLMEagle3", Heads)}


def no_model(name: str, *_: object) -> Path:
    raise ModelLoadError(f"{name} is no model")


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("left_out", [None, *DRAFT_KINDS], ids=lambda kind: type(kind).__name__)
def test_without_one_kind_the_other_serves(
    what: str, left_out: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, own = KINDS[what]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    kinds = tuple(kind for kind in DRAFT_KINDS if kind is not left_out)
    monkeypatch.setattr(loading, "DRAFT_KINDS", kinds)
    settings = ExecutorSettings(draft_model=str(tmp_path))
    if what == "model" and isinstance(left_out, WholeModels):
        with pytest.raises(ModelLoadError, match=r"The directory .*leave it out"):
            loading.kind_of(settings, tmp_path)
        return
    expected = own if any(isinstance(kind, own) for kind in kinds) else WholeModels
    assert isinstance(loading.kind_of(settings, tmp_path), expected)


def test_the_model_itself_has_heads_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ExecutorSettings(draft_model=MTP)
    assert loading.draft_directory(settings, tmp_path) == tmp_path
    monkeypatch.setattr(loading, "DRAFT_KINDS", (WholeModels(),))
    monkeypatch.setattr(loading, "resolve_model", no_model)
    with pytest.raises(ModelLoadError, match="mtp is no model"):
        loading.draft_directory(settings, tmp_path)
