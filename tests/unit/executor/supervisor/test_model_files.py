"""What a host tells of a model's files before it reads any weight, and which GPUs it may use."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.core.settings import ExecutorSettings, packed_directory, packed_name, packed_share
from services.executor.supervisor.host import model_files
from services.executor.supervisor.host.model_files import ResidentFiles, StoredModel, size_of
from services.executor.supervisor.host.model_host import settings_of
from services.executor.supervisor.metrics import GpuReader
from shared.config import load_settings
from shared.errors import ConfigurationError, ModelLoadError
from shared.messages import ModelSettings, ModelSpec, SparseAttention
from shared.model_store import catalog

CONFIG = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 100,
}


def model(directory: Path, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "model.safetensors").write_bytes(bytes(1000))
    return directory


def settings(tmp_path: Path, **more: Any) -> ExecutorSettings:
    return load_settings(ExecutorSettings, model_cache=tmp_path / "cache", **more)


@pytest.mark.parametrize(
    ("more", "weights"),
    [({}, 1000), ({"dtype": "fp32"}, 2000), ({"weight_dtype": "int8"}, 500), ({"dtype": "bf16"}, 1000)],
)
def test_weights_take_what_they_are_computed_in(tmp_path: Path, more: dict[str, str], weights: int) -> None:
    assert size_of(settings(tmp_path, **more), model(tmp_path / "m")).weights == weights


@pytest.mark.parametrize(
    ("said", "asked", "unpacked"), [({}, "auto", False), ({}, "bf16", True), ({"weight_dtype": "bf16"}, "auto", True)]
)
def test_codes_take_what_the_file_takes_unless_they_are_unpacked(
    tmp_path: Path, said: dict[str, str], asked: str, unpacked: bool
) -> None:
    directory = model(tmp_path / "m", **said)
    (directory / "model.safetensors").rename(directory / "model.gguf")
    weights = size_of(settings(tmp_path, weight_dtype=asked), directory).weights
    assert weights == (1000 * 16 * 2 // 9 if unpacked else 1000)


def test_weights_take_no_more_than_they_may(tmp_path: Path) -> None:
    directory = model(tmp_path / "m")
    assert size_of(settings(tmp_path, weights_memory=300), directory).weights == 300
    assert size_of(settings(tmp_path, weights_memory=300, tp=2), directory).weights == 600
    assert size_of(settings(tmp_path, weights_memory=3000), directory).weights == 1000
    asked = settings(tmp_path, weights_memory=300, model=str(directory))
    with pytest.raises(ConfigurationError, match="do not sleep there"):
        StoredModel(asked).resident()


def test_a_sequence_takes_its_keys_and_values_at_full_length(tmp_path: Path) -> None:
    asked, directory = settings(tmp_path), tmp_path / "m"
    per_token = 2 * 2 * 8 * 2 * 2
    assert size_of(asked, model(directory)).sequence == per_token * 100
    assert size_of(settings(tmp_path, context_length=10), directory).sequence == per_token * 10
    assert size_of(asked, model(directory, text_config={"num_hidden_layers": 1})).sequence == per_token * 50
    latent = model(directory, kv_lora_rank=5, qk_rope_head_dim=3)
    assert size_of(asked, latent).sequence == 8 * 2 * 2 * 100
    assert size_of(asked, model(directory, max_position_embeddings=None)).sequence == 0


def test_packed_weights_of_every_rank_go_first(tmp_path: Path) -> None:
    asked, directory = settings(tmp_path, tp=2), model(tmp_path / "m")
    for rank in range(2):
        path = packed_directory(asked) / packed_name(directory, packed_share(asked, rank, 2))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(300))
        assert size_of(asked, directory).weights == (1000 if rank == 0 else 600)


def test_what_is_no_configuration_is_said(tmp_path: Path) -> None:
    directory = model(tmp_path / "m")
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not JSON"):
        size_of(settings(tmp_path), directory)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        size_of(settings(tmp_path), tmp_path)


def test_files_stay_mapped_where_the_kernel_cannot_read_them_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_POPULATE_READ", -1)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "full").write_bytes(bytes(10_000))
    files = ResidentFiles([tmp_path / "empty", tmp_path / "full"])
    assert files.size == 10_000
    files.close()
    with pytest.raises(OSError, match="missing"):
        ResidentFiles([tmp_path / "full", tmp_path / "missing"])


def test_a_hub_name_of_the_registry_is_no_directory_beside_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    model(tmp_path / "org" / "m")
    host = settings(tmp_path)
    named = ModelSpec("m", "org/m", settings=ModelSettings(draft_model="org/m"))
    found = settings_of(host, named)
    assert not StoredModel(found).is_ready
    assert not catalog.is_ready(found.draft_model, host.store)
    whole = settings_of(host, ModelSpec("m", str(tmp_path / "org" / "m")))
    assert StoredModel(whole).directory() == tmp_path / "org" / "m"


def test_settings_of_a_model_are_those_of_its_host_but_for_its_own(tmp_path: Path) -> None:
    host = settings(tmp_path, max_waiting=7, handover_port=4000)
    found = settings_of(host, ModelSpec("m", "org/m", settings=ModelSettings(tp=2, context_length=64)))
    told = (found.tp, found.context_length, found.max_waiting, found.served_model_name, found.model)
    assert told == (2, 64, 7, "m", "hf://org/m")
    assert found.handover_port == 0
    for choice, keeps in ((None, False), (True, True), (SparseAttention("window"), False)):
        assert settings_of(host, ModelSpec("m", "org/m", sparse_attention=choice)).sparse_attention is keeps
    choosing = host.model_copy(update={"sparse_attention": True})
    for choice, keeps in ((None, True), (False, False), (SparseAttention("window"), True)):
        assert settings_of(choosing, ModelSpec("m", "org/m", sparse_attention=choice)).sparse_attention is keeps
    with pytest.raises(ConfigurationError, match="speculation"):
        settings_of(host, ModelSpec("m", "org/m", settings=ModelSettings(speculation="much")))


class _NVMLError(Exception):
    pass


def _handle(index: int) -> int:
    if index > 1:
        raise _NVMLError
    return index


DRIVER = SimpleNamespace(
    NVMLError=_NVMLError,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=_handle,
    nvmlDeviceGetHandleByUUID={"GPU-1": 1}.__getitem__,
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=10 + handle),
)


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, [("0", 10), ("1", 11)]), ("1, GPU-1", [("1", 11), ("GPU-1", 11)]), ("0,7,1", [("0", 10)])],
)
def test_gpus_are_those_that_cuda_shows(visible: str | None, found: list[tuple[str, int]]) -> None:
    reader = GpuReader()
    reader._nvml, reader._tried = DRIVER, True
    assert reader.visible(visible) == found


def test_a_draft_model_is_of_one_model_and_counts_with_it(tmp_path: Path) -> None:
    draft = model(tmp_path / "draft", num_hidden_layers=1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (draft / file).write_text("{}")
    host = settings(tmp_path, model="own", draft_model="of-own")
    spec = ModelSpec("m", str(model(tmp_path / "m")))
    alone = settings_of(host, spec)
    assert alone.draft_model == ""
    with_draft = settings_of(host, ModelSpec("m", spec.source, settings=ModelSettings(draft_model=str(draft))))
    assert with_draft.draft_model == str(draft)
    sizes = [size_of(alone, tmp_path / "m"), size_of(alone, draft)]
    both = StoredModel(with_draft)
    assert StoredModel(alone).size() == sizes[0]
    assert both.size() == (sizes[0].weights + sizes[1].weights, sizes[0].sequence + sizes[1].sequence)
    fetched_later = settings_of(host, ModelSpec("m", spec.source, settings=ModelSettings(draft_model="org/not-here")))
    assert StoredModel(fetched_later).size() == sizes[0]
