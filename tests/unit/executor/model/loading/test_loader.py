import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.loading.loader import load_config, load_model, pack_linears
from shared.errors import ModelLoadError
from tests.unit.executor.model.ring import CPU, ThreadMember, ThreadRing


def load(directory: Path, world_size: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    layout = ShardLayout.from_config(load_config(directory), world_size, rank)
    collectives = SingleRank() if world_size == 1 else ThreadMember(ThreadRing(world_size), rank)
    return load_model(directory, dtype, layout, collectives, CPU, lambda done, total: None)


def refused(directory: Path, reason: str, world_size: int = 1) -> None:
    with pytest.raises(ModelLoadError, match=reason) as raised:
        load(directory, world_size)
    message = str(raised.value)
    assert message.endswith(".")
    assert "\n" not in message


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, edit: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_rotary_frequencies_survive_the_meta_device(llama: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(str(llama)).model.rotary_emb.inv_freq
    served = load(llama, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    assert served.dtype == torch.float32
    assert torch.equal(served, expected)
    assert torch.allclose(served, 10000.0 ** (-torch.arange(0, 16, 2) / 16))


class RandomDraws(TorchDispatchMode):
    """Counts operators that draw random values, of tensors without memory too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_no_random_values_are_drawn_for_weights_that_are_read(llama: Path) -> None:
    with RandomDraws() as drawn:
        torch.nn.Linear(2, 2, device="meta")
        assert drawn.count == 2, "PyTorch's own way to make a layer draws its weight and its bias"
        load(llama)
        assert drawn.count == 2


def test_progress_counts_the_bytes_of_this_rank(llama: Path) -> None:
    reports: list[tuple[int, int]] = []
    layout = ShardLayout.from_config(load_config(llama), 2, 1)
    model = load_model(
        llama,
        torch.float32,
        layout,
        ThreadMember(ThreadRing(2), 1),
        CPU,
        lambda done, total: reports.append((done, total)),
    )
    held = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert reports[0] == (0, held)
    assert reports[-1] == (held, held)
    assert reports == sorted(reports)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tied_head_shares_memory_with_the_embedding(llama: Path) -> None:
    model = load(llama, 2, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tuple(model.lm_head.weight.shape) == (66, 72)


def test_weights_in_several_files(tmp_path: Path, llama: Path) -> None:
    AutoModelForCausalLM.from_pretrained(str(llama)).save_pretrained(str(tmp_path), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, pieces = load(llama).state_dict(), load(tmp_path).state_dict()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.unlink()
    refused(tmp_path, f"{last.name} is missing")


def test_index_that_names_what_is_not_there(tmp_path: Path, llama: Path) -> None:
    AutoModelForCausalLM.from_pretrained(str(llama)).save_pretrained(str(tmp_path), max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    refused(tmp_path, "names model.ghost")
    index.write_text('{"weight_map": {"a": "../../elsewhere.safetensors"}}')
    refused(tmp_path, "damaged")
    index.write_text("{")
    refused(tmp_path, "damaged")


def test_weights_saved_without_the_prefix_and_with_old_buffers(copy: Path, llama: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_weights(copy, edit)
    whole, renamed = load(llama).state_dict(), load(copy).state_dict()
    assert all(torch.equal(whole[name], renamed[name]) for name in whole)


def test_directories_that_are_no_model(tmp_path: Path, copy: Path) -> None:
    refused(tmp_path / "none", "does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no config.json")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "empty", "holds an adapter .* serve its base and load the adapter")
    (copy / "model.safetensors").rename(copy / "flax_model.msgpack")
    refused(copy, "only flax_model.msgpack, where model.safetensors")
    (copy / "flax_model.msgpack").unlink()
    refused(copy, "no weights")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_configurations_that_cannot_be_read(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    refused(copy, "config.json in .* is not one that can be served")


def test_damaged_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 64):
        weights.write_bytes(damaged)
        refused(copy, "damaged or was not fetched to its end")


def test_weights_of_another_model(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(copy, "no tensor model.layers.1.mlp.up_proj.weight")


def test_weights_of_another_shape(copy: Path) -> None:
    edit_config(copy, intermediate_size=112)
    refused(copy, r"has the shape \[96, 72\] where config.json calls for \[112, 72\]", world_size=2)


def test_weights_the_model_has_no_place_for(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(2)}))
    refused(copy, "a tensor model.layers.0.extra that the architecture does not use")


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_pytorch_weights(tmp_path: Path, llama: Path, max_shard_size: str) -> None:
    tensors = load_file(llama / "model.safetensors")
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    if max_shard_size == "5GB":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        index = {name: f"part-{number % 3}.bin" for number, name in enumerate(tensors)}
        for file in set(index.values()):
            torch.save({name: tensors[name] for name in index if index[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for rank in range(2):
        expected, got = load(llama, 2, rank).state_dict(), load(tmp_path, 2, rank).state_dict()
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_packing_frees_the_plain_weights_as_it_goes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def packed(weight: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(weight))
        return torch.zeros(1)

    monkeypatch.setattr("services.executor.model.loading.loader.can_pack", lambda device, dtype: True)
    monkeypatch.setattr("services.executor.model.loading.loader.packed_weight", packed)
    pack_linears(load(llama))
    assert len(alive) > 10
    assert max(alive) <= 1


@pytest.mark.parametrize("model_type", ["of_its_own", "llama"])
def test_code_of_a_repository_is_not_run(llama: Path, tmp_path: Path, model_type: str) -> None:
    """Whether transformers knows the architecture itself or not."""
    ran = tmp_path / "ran"
    classes = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit_config(llama, model_type=model_type, auto_map=classes)
    (llama / "custom.py").write_text(f"open({str(ran)!r}, 'w')\n")
    if model_type == "llama":
        load(llama)
    else:
        refused(llama, "is not one that can be served")
    assert not ran.exists()
