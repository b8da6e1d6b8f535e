"""What sentence-transformers' files and config.json say of vectors and classes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.model import pooling
from shared.errors import ModelLoadError


def write(directory: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(kinds)]


MEAN = {"pooling_mode_mean_tokens": True}
DENSE = {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}


def test_a_model_without_files_has_its_kinds_pooling(tmp_path: Path) -> None:
    assert pooling.read_vectors(tmp_path) == ("last", True, ())
    assert pooling.read_vectors(tmp_path, default="mean") == ("mean", True, ())


def test_vectors_are_as_long_as_the_files_say(tmp_path: Path) -> None:
    write(tmp_path, {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": MEAN})
    assert pooling.read_vectors(tmp_path) == ("mean", False, ())
    write(tmp_path, {"modules.json": modules("Transformer", "Pooling", "Normalize")})
    assert pooling.read_vectors(tmp_path).normalized


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    files = {"modules.json": modules("Transformer", "Pooling", "Dense"), "1_Pooling/config.json": MEAN}
    write(tmp_path, {**files, "2_Dense/config.json": DENSE})
    assert pooling.read_vectors(tmp_path) == pooling.NO_VECTORS
    (dense,) = pooling.read_vectors(tmp_path, dense=True).dense
    assert dense == (tmp_path / "2_Dense", 8, 4, True, "Identity")
    for wrong in (
        {"activation_function": "os.system"},
        {"activation_function": "torch.nn.modules.linear.Linear"},
        {"out_features": 0},
        {"in_features": 1 << 30},
    ):
        write(tmp_path, {"2_Dense/config.json": {**DENSE, **wrong}})
        assert pooling.read_vectors(tmp_path, dense=True) == pooling.NO_VECTORS


def test_prompts_that_would_have_to_be_left_out(tmp_path: Path) -> None:
    files = {"modules.json": modules("Transformer", "Pooling")}
    write(tmp_path, {**files, "1_Pooling/config.json": {**MEAN, "include_prompt": False}})
    assert pooling.read_vectors(tmp_path) == pooling.NO_VECTORS


def test_the_longest_text(tmp_path: Path) -> None:
    assert pooling.most_tokens(tmp_path) is None
    for length, found in ((256, 256), (None, None), (0, None)):
        write(tmp_path, {"sentence_bert_config.json": {"max_seq_length": length}})
        assert pooling.most_tokens(tmp_path) == found
    write(tmp_path, {"sentence_bert_config.json": "["})
    with pytest.raises(ModelLoadError, match=r"sentence_bert_config.json cannot be read"):
        pooling.most_tokens(tmp_path)


def test_prompts(tmp_path: Path) -> None:
    assert pooling.read_prompts(tmp_path) == ({}, "")
    prompts = {"query": "query: ", "document": ""}
    for default, found in (("query", "query"), (None, ""), ("other", "")):
        described = {"prompts": prompts, "default_prompt_name": default}
        write(tmp_path, {"config_sentence_transformers.json": described})
        assert pooling.read_prompts(tmp_path) == (prompts, found)
    write(tmp_path, {"config_sentence_transformers.json": {"prompts": [1]}})
    with pytest.raises(ModelLoadError, match="cannot be read"):
        pooling.read_prompts(tmp_path)
    write(tmp_path, {"config_sentence_transformers.json": {"prompts": {"query": "x" * (1 << 16)}}})
    with pytest.raises(ModelLoadError, match="65,541 characters"):
        pooling.read_prompts(tmp_path)


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({}, None),
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": False}, []),
        ({"matryoshka_dimensions": [512, 64, "x", 0]}, [64, 512]),
    ],
)
def test_matryoshka_lengths(config: dict[str, Any], lengths: list[int] | None) -> None:
    assert pooling.matryoshka_dimensions(config) == lengths


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 2}, "softmax"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ],
)
def test_how_logits_become_scores(fields: dict[str, Any], activation: str) -> None:
    assert pooling.activation_of(SimpleNamespace(**fields)) == activation


@pytest.mark.parametrize("given", ["os.system", "torch.nn.modules.activation.Tanh", "my.Sigmoid"])
def test_scores_of_another_kind_are_refused(given: str) -> None:
    with pytest.raises(ModelLoadError, match="which is not served"):
        pooling.activation_of(SimpleNamespace(sbert_ce_default_activation_function=given))


def test_labels_in_the_order_of_their_logits() -> None:
    assert pooling.labels_of(SimpleNamespace(num_labels=3, id2label={1: "b", 0: "a"})) == ["a", "b", "LABEL_2"]
    with pytest.raises(ModelLoadError, match="5,000 classes"):
        pooling.labels_of(SimpleNamespace(num_labels=5000, id2label={}))
    assert pooling.is_classifier({"architectures": ["BertForSequenceClassification"]})
    assert not pooling.is_classifier({"architectures": None})
