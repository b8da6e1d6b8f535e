"""An adapter's files: what is refused and how that is told, and what makes two adapters one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.executor.model.adapters.configuration import AdapterConfig, read_config
from services.executor.model.adapters.files import inspect_adapter, inspect_for, read_adapter
from services.executor.model.adapters.holder import grouped_rows
from services.executor.model.adapters.targets import AdapterTarget, whole_targets
from services.executor.model.loading.loader import load_config
from shared.errors import ModelLoadError
from tests.unit.executor.model.peft_adapters import base_of, save_adapter
from tests.unit.executor.model.tiny import make_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterTarget]:
    return whole_targets(load_config(make_model(tmp_path_factory.mktemp("model"), "llama")))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of one module, of rank 4."""
    write(tmp_path, {f"{Q}.lora_A.weight": torch.ones(4, 72), f"{Q}.lora_B.weight": torch.ones(144, 4)})
    return tmp_path


def write(directory: Path, tensors: Tensors, **settings: Any) -> None:
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **settings}
    (directory / "adapter_config.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"peft_type": "IA3"}, "is of peft_type 'IA3', and only LORA is supported"),
        ({"use_dora": True}, "uses DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "has trained biases (bias 'all')"),
        ({"lora_bias": True}, "biases of its own"),
        ({"init_lora_weights": "pissa_niter_4"}, "was initialised by pissa_niter_4"),
        ({"alora_invocation_tokens": [1]}, "activation by tokens"),
        ({"r": 0}, "has r 0, and ranks from 1 to 256 are served"),
        ({"r": 257}, "has r 257, and ranks from 1 to 256 are served"),
        ({"r": True}, "has r True"),
        ({"lora_alpha": "8"}, "has lora_alpha '8', which is not a number"),
        ({"use_rslora": "yes"}, "neither true nor false"),
        ({"rank_pattern": {"q_proj": 300}}, "has rank_pattern of q_proj 300"),
        ({"rank_pattern": []}, ""),
        ({"rank_pattern": [1]}, "has a rank_pattern that is no object"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "has the pattern '(a+)+$' in alpha_pattern"),
        ({"target_modules": ["q"] * 5000}, "lists 5000 target_modules"),
    ],
)
def test_what_the_configuration_asks_for_is_served_or_refused_by_name(
    adapter: Path, settings: dict[str, Any], sentence: str
) -> None:
    write(adapter, load_file(adapter / "adapter_model.safetensors"), **settings)
    if not sentence:
        assert read_config(adapter).rank == 4
        return
    with pytest.raises(ModelLoadError) as error:
        read_config(adapter)
    assert sentence in str(error.value)
    assert "adapter_config.json" in str(error.value)


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_one(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (renamed("q_proj", "z_proj"), "is of a module that the model does not have"),
        (renamed("layers.0", "layers.9"), "is of a module that the model does not have"),
        (renamed("self_attn.q_proj", "mlp.gate"), "adapts what chooses experts"),
        (renamed("layers.0.self_attn.q_proj", "embed_tokens"), "adapts an embedding or the output layer"),
        (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "adapts an embedding or the output layer"),
        (renamed("lora_A.weight", "lora_embedding_A"), "adapts an embedding, which is not served"),
        (with_one(f"{Q}.lora_magnitude_vector", torch.ones(144)), "is DoRA's, which is not served"),
        (with_one(f"{Q}.bias", torch.ones(144)), "is no factor of a low-rank product"),
        (with_one(f"{Q}.lora_C.weight", torch.ones(144)), "is neither lora_A.weight nor lora_B.weight"),
        (with_one(f"{Q}.lora_A.default.weight", torch.ones(4, 72)), "is there twice for"),
        (with_one(f"{Q}.lora_B.weight", torch.ones(145, 4)), "has the shape [145, 4] where rank 4 and the model"),
        (with_one(f"{Q}.lora_A.weight", torch.ones(5, 72)), "has the shape [5, 72] where rank 4 and the model"),
        (with_one(f"{Q}.lora_A.weight", torch.full((4, 72), torch.nan)), "holds NaN or infinite values"),
        (with_one(f"{Q}.lora_A.weight", torch.ones(4, 72, dtype=torch.int8)), "is of I8 where F32, F16 or BF16"),
        (lambda tensors: {f"{Q}.lora_A.weight": torch.ones(4, 72)}, "is there without its lora_B"),
        (lambda tensors: {}, "holds no tensors"),
    ],
)
def test_tensors_that_are_none_of_the_models_are_refused_by_name(
    adapter: Path, targets: list[AdapterTarget], change: Callable[[Tensors], Tensors], sentence: str
) -> None:
    write(adapter, change(load_file(adapter / "adapter_model.safetensors")))
    with pytest.raises(ModelLoadError) as error:
        inspect_for(adapter, targets)
    assert sentence in str(error.value)
    assert str(adapter) in str(error.value)


def test_files_that_are_no_adapter_are_refused(
    adapter: Path, targets: list[AdapterTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, max_rank: int = 256) -> None:
        with pytest.raises(ModelLoadError, match=sentence):
            inspect_for(adapter, targets, max_rank)

    refused("has rank 4, and --max-adapter-rank allows 3", max_rank=3)
    monkeypatch.setattr("services.executor.model.adapters.files.MAX_BYTES", 1000)
    refused("and 1000 are read at most")
    monkeypatch.undo()
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:-8])
    refused("is not a safetensors file")
    weights.rename(adapter / "adapter_model.bin")
    refused("is pickled, which may hold code and is not read")
    (adapter / "adapter_model.bin").unlink()
    refused("has no adapter_model.safetensors, so the adapter is incomplete")
    config.write_text("[1]")
    refused("is not a JSON object")
    config.write_text("{")
    refused("cannot be read")
    config.write_text(" " * (1 << 20) + "{}")
    refused("is larger than 1 MiB")
    config.unlink()
    refused("has no adapter_config.json, so it is not an adapter")


def test_a_digest_is_of_what_is_computed(adapter: Path, targets: list[AdapterTarget]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    found = inspect_for(adapter, targets)
    assert (found.rank, found.bytes, found.modules) == (4, 4 * (4 * 72 + 144 * 4), 1)
    write(adapter, tensors, base_model_name_or_path="elsewhere", lora_dropout=0.1)
    assert inspect_for(adapter, targets) == found
    write(adapter, renamed("model.model.layers", "model.model.language_model.layers")(tensors))
    assert inspect_for(adapter, targets).digest == found.digest, "one module under two names"
    write(adapter, tensors, lora_alpha=9)
    scaled = inspect_for(adapter, targets).digest
    write(adapter, {**tensors, f"{Q}.lora_B.weight": torch.full((144, 4), 1.001)})
    assert len({found.digest, scaled, inspect_for(adapter, targets).digest}) == 3


def test_patterns_choose_ranks_and_scales(adapter: Path, targets: list[AdapterTarget]) -> None:
    tensors = {f"{Q}.lora_A.weight": torch.ones(2, 72), f"{Q}.lora_B.weight": torch.ones(144, 2)}
    patterns = {"rank_pattern": {r"layers\.0\.self_attn.*": 2}, "alpha_pattern": {"self_attn.q_proj": 5}}
    write(adapter, tensors, **patterns)
    name = Q.removeprefix("base_model.model.")
    assert read_adapter(adapter, targets, torch.float32)[name].b[0].tolist() == [2.5, 2.5]
    write(adapter, tensors, **patterns, use_rslora=True)
    assert float(read_adapter(adapter, targets, torch.float32)[name].b[0, 0]) == pytest.approx(5 / 2**0.5)


@settings(max_examples=40)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_pattern_is_answered(pattern: str, module: str) -> None:
    config = AdapterConfig(8, 16.0, False, {pattern: 4}, {}, "")
    assert config.rank_of(module) in (4, 8)


@given(st.lists(st.integers(-1, 5), max_size=40))
def test_each_row_is_in_the_group_of_its_slot(slots: list[int]) -> None:
    groups = grouped_rows(np.array(slots, np.int64))
    assert {row: slot for slot, rows in groups for row in rows.tolist()} == {
        row: slot for row, slot in enumerate(slots) if slot >= 0
    }
    assert all(rows.tolist() == sorted(rows.tolist()) for _, rows in groups)


@pytest.mark.parametrize("older_names", [False, True])
def test_adapters_of_single_experts_are_those_of_all(tmp_path: Path, older_names: bool) -> None:
    """As older versions of peft wrote them, one pair for each expert."""
    directory = make_model(tmp_path / "base", "mixtral")
    config = load_config(directory)
    experts = [target for target in whole_targets(config) if target.experts]
    save_adapter(base_of(directory), tmp_path / "fused", experts, 4)
    fused = read_adapter(tmp_path / "fused", whole_targets(config), torch.float32)
    tensors: Tensors = {}
    for name, pair in fused.items():
        module, leaf = name.rsplit(".", 1)
        module = module.replace(".mlp.", ".block_sparse_moe.") if older_names else module
        for expert in range(len(pair.a)):
            parts = {"w2": pair.b[expert]}
            if leaf == "gate_up_proj":
                parts = dict(zip(("w1", "w3"), pair.b[expert].chunk(2), strict=True))
            for part, b in parts.items():
                path = f"base_model.model.{module}.{expert}.{part}"
                tensors[f"{path}.lora_A.weight"] = pair.a[expert].clone()
                tensors[f"{path}.lora_B.weight"] = b / 1.5
    (tmp_path / "single").mkdir()
    write(tmp_path / "single", tensors, lora_alpha=6)
    single = read_adapter(tmp_path / "single", whole_targets(config), torch.float32)
    assert inspect_adapter(tmp_path / "single", config).modules == len(fused)
    for name, pair in fused.items():
        torch.testing.assert_close(single[name].b @ single[name].a, pair.b @ pair.a)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    write(tmp_path / "single", tensors)
    with pytest.raises(ModelLoadError, match="is there without its lora_B"):
        inspect_adapter(tmp_path / "single", config)


def test_a_look_at_the_base_leaves_the_type_that_other_threads_compute_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is one for the whole process, and steps go on while an adapter is checked."""
    config = load_config(make_model(tmp_path, "llama"))
    kinds: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", kinds.append)
    assert whole_targets(config)
    assert set(kinds) <= {torch.float32}
