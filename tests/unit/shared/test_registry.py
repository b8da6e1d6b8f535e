"""The rules of the registry, one by one and of all models together."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.core.settings import MOST_EVER, ExecutorSettings
from shared.data_types import DType, KvDType, WeightDType
from shared.messages.registry import MAX_ALIASES, MAX_MODELS, ModelSettings, ModelSpec
from shared.registry import MAX_DRAFTS, SETTINGS, WEIGHT_DTYPES, check, check_all, nearest, read_spec, wrong_name
from tests.contract.strategies import messages

GOOD = ModelSpec("chat", "org/name", least=1, most=2, aliases=["gpt"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": ""}, "at least one character"),
        ({"name": "x" * 201}, "at most 200"),
        ({"name": "a\nb"}, "printable"),
        ({"name": " a"}, "no spaces at its ends"),
        ({"source": " "}, "The source of 'chat'"),
        ({"source": "x" * 5000}, "The source of 'chat'"),
        ({"revision": "a b"}, "no branch, tag or commit"),
        ({"revision": "main", "source": "/models/chat"}, "goes with a hub name"),
        ({"revision": "main", "source": "org/chat.gguf"}, "goes with a hub name"),
        ({"least": -1}, "least replicas"),
        ({"most": 0, "least": 0}, "most replicas"),
        ({"least": 3}, "3 replicas at least and 2 at most"),
        ({"idle": -1.0}, "idle time"),
        ({"idle": float("nan")}, "idle time"),
        ({"pinned": True, "action": "unload"}, "pinned and to be unloaded"),
        ({"aliases": ["a", "a"]}, "named twice"),
        ({"aliases": ["chat"]}, "its own name"),
        ({"aliases": ["\t"]}, "cannot have the alias"),
        ({"aliases": [str(number) for number in range(MAX_ALIASES + 1)]}, "33 aliases, and may have 32"),
        ({"settings": ModelSettings(tp=65)}, "tp cannot be 65: it must be 1 to 64"),
        ({"settings": ModelSettings(max_sequences=0)}, "max_sequences cannot be 0: it must be 1 or more"),
        ({"settings": ModelSettings(weight_dtype="q4k")}, "q4_k may be meant"),
        ({"settings": ModelSettings(speculation="64")}, "a number from 0 to 63"),
        ({"settings": ModelSettings(kv_dtype_layers="0=fp64")}, "LAYER=bf16"),
        ({"settings": ModelSettings(tool_parser="hermess")}, "hermes may be meant"),
        ({"settings": ModelSettings(max_adapter_rank=257)}, "1 to 256"),
    ],
)
def test_each_rule_is_told_in_one_sentence(change: dict[str, Any], told: str) -> None:
    found = check(msgspec.structs.replace(GOOD, **change))
    assert any(told in problem and problem.endswith(".") for problem in found), found


def test_what_is_good_is_said_to_be_good() -> None:
    good = ModelSettings(
        tp=64, kv_dtype_layers="0=bf16, -1=int8", speculation="63", weight_dtype="q4_k", tool_parser="hermes"
    )
    for source in ("org/name", "hf://org/name:Q4_K_M", "org/repo:file.gguf"):
        spec = msgspec.structs.replace(GOOD, source=source, revision="refs/pr/1", settings=good)
        assert check(spec, [GOOD, ModelSpec("other", "x")], ["adapter"]) == []


def test_the_rules_are_those_of_the_executor() -> None:
    """A value that the registry takes must not end an executor, nor one that it refuses be good there."""
    assert get_args(WeightDType) == WEIGHT_DTYPES
    assert MAX_DRAFTS == MOST_EVER
    kinds = {field.name: get_args(field.type)[0] for field in msgspec.structs.fields(ModelSettings)}
    assert get_args(kinds["dtype"]) == get_args(DType)
    assert get_args(kinds["kv_dtype"]) == get_args(KvDType)
    assert set(SETTINGS) <= set(ExecutorSettings.model_fields)


def test_names_clash_over_the_whole_registry() -> None:
    others = [ModelSpec("a", "a", aliases=["x"]), ModelSpec("b", "b")]
    (told,) = check(ModelSpec("x", "x"), others)
    assert "taken by an alias of the model a" in told
    (told,) = check(ModelSpec("c", "c", aliases=["b"]), others)
    assert "'b' of 'c' is taken by the model b" in told
    (told,) = check(ModelSpec("c", "c", aliases=["lora"]), others, ["lora"])
    assert "the adapter lora" in told
    assert check(ModelSpec("a", "elsewhere"), others) == []  # replaced
    assert [problem for problem in check_all([*others, ModelSpec("b", "b")]) if "twice" in problem]
    full = [ModelSpec(str(number), "x") for number in range(MAX_MODELS)]
    assert any("1024 models at most" in problem for problem in check(GOOD, full))


def test_fields_of_an_object_are_read_and_all_that_is_wrong_is_told() -> None:
    spec, found = read_spec({"name": "a", "least": 2, "idle": "10m", "settings": {"tp": 2}})
    assert not found
    assert spec == ModelSpec("a", "a", least=2, most=2, idle=600.0, settings=ModelSettings(tp=2))
    changed, found = read_spec({"settings": {"tp": None, "kv_memory": 1}, "pinned": True}, base=spec)
    assert not found
    assert (changed.settings, changed.pinned, changed.least) == (ModelSettings(kv_memory=1), True, 2)
    spec, found = read_spec({"pined": 1, "source": 3, "settings": {"tp": "2", "t": 1}, "aliases": "x"})
    assert spec is None
    fields = [problem.field for problem in found]
    assert fields == ["pined", "source", "settings.tp", "settings.t", "aliases", ""]
    _, (problem,) = read_spec({"name": "a", "settings": []})
    assert problem.text == "`settings` is a mapping of names and values, not a list."


def test_the_nearest_names_are_found_whatever_their_case() -> None:
    assert nearest("smollm", ["Qwen2.5-7B", "SmolLM2"]) == ["SmolLM2"]
    assert wrong_name("ü/ö:Q4 K") == ""


@given(messages(ModelSpec), st.lists(messages(ModelSpec), max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_entry_is_too_odd_to_be_judged(spec: ModelSpec, others: list[ModelSpec]) -> None:
    assert all(problem.endswith(".") for problem in check(spec, others))
