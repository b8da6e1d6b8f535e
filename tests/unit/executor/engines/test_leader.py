"""When nothing more is to be expected of an engine that computes, and what a model's files say of its vectors and
classes."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.executor.engines.base import EngineFacts
from services.executor.engines.leader import stands_still, with_pooling
from services.executor.engines.requests import spec_of
from services.executor.leader.group_leader import LOOP_BEAT
from shared import limits
from shared.errors import ModelLoadError


@pytest.mark.parametrize(
    ("quiet", "stopped", "looks", "still"),
    [
        (0.0, True, 0, False),
        (LOOP_BEAT / 2, True, 0, False),
        (LOOP_BEAT, True, 1, True),
        (LOOP_BEAT, False, 1, False),
        (60.0, False, 0, True),
    ],
)
def test_its_processes_are_looked_at_where_it_has_told_nothing(
    quiet: float, stopped: bool, looks: int, still: bool
) -> None:
    asked: list[float] = []

    def is_stopped() -> bool:
        asked.append(quiet)
        return stopped

    assert stands_still(quiet, 60.0, is_stopped) == still
    assert len(asked) == looks


LABELS = ["good", "bad"]


def facts(*tasks: str, **fields: Any) -> EngineFacts:
    return EngineFacts("an engine 1", 24, 30, places=2, tasks=tasks, **fields)


def spec(directory: Path, told: EngineFacts, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return with_pooling(spec_of(told, 4), told, directory)


def test_what_generates_is_left_as_it_is(tmp_path: Path) -> None:
    assert spec(tmp_path, facts("generate"), {"model_type": "llama"}) == spec_of(facts("generate"), 4)


@pytest.mark.parametrize(("modules", "pooling", "normalized"), [([], "last", True), (["Pooling"], "cls", False)])
def test_vectors_are_as_sentence_transformers_says(
    tmp_path: Path, modules: list[str], pooling: str, normalized: bool
) -> None:
    if modules:
        named = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
        named += [{"path": one, "type": f"sentence_transformers.models.{one}"} for one in modules]
        (tmp_path / "modules.json").write_text(json.dumps(named))
        (tmp_path / "Pooling").mkdir()
        (tmp_path / "Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    found = spec(tmp_path, facts("embed", embedding_size=8), {"model_type": "bert"})
    assert (found.tasks, found.pooling, found.normalized) == (["embed"], pooling, normalized)
    assert (found.embedding_size, found.whole_prompts, found.generates) == (8, True, False)


@pytest.mark.parametrize(("problem", "activation"), [(None, "softmax"), ("multi_label_classification", "sigmoid")])
def test_classes_have_their_names_and_their_activation(tmp_path: Path, problem: str | None, activation: str) -> None:
    config = {"model_type": "qwen3", "num_labels": 7, "problem_type": problem}
    found = spec(tmp_path, facts("classify", labels=LABELS), config)
    assert (found.tasks, found.labels, found.activation) == (["classify"], LABELS, activation)
    assert not found.whole_prompts


def test_more_classes_than_are_served_are_refused(tmp_path: Path) -> None:
    many = [str(at) for at in range(limits.MODEL_LABELS.value + 1)]
    with pytest.raises(ModelLoadError, match="classes, and no more than"):
        spec(tmp_path, facts("classify", labels=many), {"model_type": "qwen3"})
