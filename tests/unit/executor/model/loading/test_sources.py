import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Interleave, Split, Transpose, WeightConverter, WeightRenaming

from services.executor.core.sharding import ShardRange
from services.executor.model.loading import sources
from services.executor.model.loading.reading import Read, read_all
from services.executor.model.loading.sources import CheckpointSources, find_sources
from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ModelLoadError
from tests.unit.executor.model.loading.test_loader import edit_weights
from tests.unit.executor.model.tiny import BASE

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 11},
    "qwen2_moe": {"num_experts": 12, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1},
}
DENSE = (
    *("llama", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt2", "gptj", "falcon"),
    *("cohere", "cohere2", "starcoder2", "granite", "glm", "glm4", "stablelm", "olmo2", "smollm3", "mistral"),
    *("qwen2", "qwen3", "ernie4_5", "nemotron", "bloom", "opt"),
)


def make(directory: Path, model_type: str, **changes: Any) -> Any:
    """A small random model, saved in its own format."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {**BASE, **heads, **MIXTURES.get(model_type, {}), **changes}
    torch.manual_seed(1)
    if model_type == "falcon":
        del settings["head_dim"]
    config = CONFIG_MAPPING[model_type](**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(str(directory))
    return model


def empty(model: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        bare = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    bare.tie_weights()
    return bare


def read(found: CheckpointSources, files: WeightFiles, name: str, *cut: tuple[int, list[ShardRange]]) -> Tensor:
    content = found.parameters[name]
    for dim, spans in cut:
        content = content.selected(dim, spans)
    return read_all([Read(content, torch.float32)], files, torch.device("cpu"), lambda done, total: None)[0]


@pytest.mark.parametrize("model_type", [*MIXTURES, *DENSE])
def test_every_parameter_is_that_of_transformers(tmp_path: Path, model_type: str) -> None:
    model = make(tmp_path, model_type)
    expected = model.state_dict(keep_vars=True)
    saved: dict[int, str] = {}
    with WeightFiles(tmp_path) as files:
        found = find_sources(empty(model), files.shapes)
        assert not found.unused
        for name, tensor in expected.items():
            if name in found.parameters:
                saved[id(tensor)] = name
                assert torch.equal(read(found, files, name), tensor), name
        # What the file lacks is tied to what it has.
        assert all(id(tensor) in saved for tensor in expected.values())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_slices_of_stacked_experts(tmp_path: Path, model_type: str) -> None:
    model = make(tmp_path, model_type)
    state = model.state_dict()
    with WeightFiles(tmp_path) as files:
        found = find_sources(empty(model), files.shapes)
        for name in (name for name in state if "experts" in name and state[name].dim() == 3):
            whole = state[name]
            for dim in range(3):
                half, size = whole.shape[dim] // 2, whole.shape[dim]
                spans = [ShardRange(1, half), ShardRange(half + 1, size), ShardRange(half, half)]
                expected = torch.cat([whole.narrow(dim, span.start, span.size) for span in spans], dim)
                assert torch.equal(read(found, files, name, (dim, spans)), expected)
            both = read(found, files, name, (2, [ShardRange(3, 9)]), (0, [ShardRange(2, 4)]))
            assert torch.equal(both, whole[2:4, :, 3:9])


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("mixtral")
    return directory, make(directory, "mixtral")


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("model.layers.1.block_sparse_moe.experts.3.w3.weight", "no tensor model.layers.1.*experts.3.w3.weight"),
        ("model.layers.1.block_sparse_moe.experts.10.w2.weight", "no tensor .*experts.10.w2.weight"),
    ],
)
def test_a_missing_expert_is_named(mixtral: tuple[Path, Any], tmp_path: Path, lacking: str, reason: str) -> None:
    directory = Path(shutil.copytree(mixtral[0], tmp_path / "copy"))
    edit_weights(directory, lambda tensors: tensors.pop(lacking))
    with WeightFiles(directory) as files, pytest.raises(ModelLoadError, match=reason):
        find_sources(empty(mixtral[1]), files.shapes)


def test_missing_projections_and_uneven_experts(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def without_gates(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".w1." in name]:
            del tensors[name]

    def uneven(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
        tensors[name] = tensors[name][:-1].clone()

    for edit, reason in ((without_gates, "no tensor experts.0.w1.weight for model"), (uneven, "do not make up")):
        directory = Path(shutil.copytree(mixtral[0], tmp_path / edit.__name__))
        edit_weights(directory, edit)
        with WeightFiles(directory) as files, pytest.raises(ModelLoadError, match=reason) as raised:
            find_sources(empty(mixtral[1]), files.shapes)
        assert "\n" not in str(raised.value)


def converted(
    monkeypatch: pytest.MonkeyPatch, llama: Any, shapes: dict[str, tuple[int, ...]], *made: Any
) -> CheckpointSources:
    monkeypatch.setattr(sources, "get_model_conversion_mapping", lambda model: list(made))
    return find_sources(llama, shapes)


def test_split_and_transposed_projections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path, "llama", num_hidden_layers=1)
    state = model.state_dict()
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    kept = {
        f"{attention}.qkv.weight": torch.cat([state[f"{attention}.{x}_proj.weight"] for x in "qkv"]),
        f"{mlp}.both.weight": torch.cat([state[f"{mlp}.gate_proj.weight"], state[f"{mlp}.up_proj.weight"]]),
        f"{mlp}.out": state[f"{mlp}.down_proj.weight"].T.contiguous(),
    }
    save_file(kept, tmp_path / "model.safetensors")
    mapping = (
        WeightRenaming(r"mlp\.out", "mlp.down"),
        WeightConverter("self_attn.qkv", [f"self_attn.{x}_proj" for x in "qkv"], [Split(0)]),
        WeightConverter("mlp.both", ["mlp.gate_proj", "mlp.up_proj"], [Chunk(0)]),
        WeightConverter("mlp.down", "mlp.down_proj.weight", [Transpose(0, 1)]),
    )
    with WeightFiles(tmp_path) as files:
        found = converted(monkeypatch, model, dict(files.shapes), *mapping)
        assert len(found.parameters) == 6
        for name in found.parameters:
            assert torch.equal(read(found, files, name), state[name]), name
        rows = read(found, files, f"{mlp}.down_proj.weight", (1, [ShardRange(5, 9)]))
        assert torch.equal(rows, state[f"{mlp}.down_proj.weight"][:, 5:9])
        odd = {**files.shapes, f"{attention}.qkv.weight": (7, 72), f"{mlp}.both.weight": (191, 72)}
        with pytest.raises(ModelLoadError, match="do not make up"):
            converted(monkeypatch, model, odd, *mapping)


def test_an_order_that_is_not_boxes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path, "llama", num_hidden_layers=1)
    mapping = WeightConverter("mlp.mixed", "mlp.up_proj", [Interleave(0)])
    with pytest.raises(ModelLoadError, match=r"mlp.mixed.weight in an order that is not read \(Interleave\)"):
        converted(monkeypatch, model, {"model.layers.0.mlp.mixed.weight": (96, 72)}, mapping)
