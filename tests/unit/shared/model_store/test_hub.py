"""Repositories of a hub on this machine: what is fetched of them, what is refused, and what is said."""

import json
from pathlib import Path

import msgspec
import pytest

from services.executor.model.loading import checkpoints
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store import catalog
from shared.model_store import hub as hub_module
from shared.model_store.catalog import ensure_adapter, ensure_model, is_ready, list_models, read_manifest
from shared.model_store.locks import LOCKS
from shared.model_store.programs import ServableVerdict
from shared.model_store.settings import Store
from shared.models import link_gguf, linked_gguf
from tests.unit.shared.model_store.hub_server import HubServer, Repository, commit_of

Hub = type[HubServer]
GGUF = {
    "README.md": b"# A model",
    "model-Q8_0.gguf": b"GGUF eight bits",
    "Q4_K_M/model-Q4_K_M-00001-of-00002.gguf": b"GGUF four bits, one",
    "Q4_K_M/model-Q4_K_M-00002-of-00002.gguf": b"GGUF four bits, two",
}
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "1_Pooling/config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"and again",
    "original/consolidated.safetensors": b"and again",
    "onnx/model.onnx": b"of another kind",
    ".gitattributes": b"",
    "README.md": b"# A model",
}
WANTED = {"config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"}


def ignore(stage: str, done: int, total: int) -> None:
    pass


def convert(gguf: Path, directory: Path, progress: object, **_: object) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    link_gguf(directory, gguf)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's programs, which take seconds to start."""
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    monkeypatch.setattr(hub_module, "verdict_on", lambda directory: ServableVerdict("llama"))


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_what_a_model_is_served_from_is_fetched_once_and_nothing_else(hub: Hub, store: Store) -> None:
    hub.repositories["org/name"] = Repository(MODEL)
    steps: list[tuple[str, int, int]] = []
    name, directory = ensure_model("hf://org/name", store, lambda *step: steps.append(step))
    assert (name, directory) == ("org/name", store.cache / "org--name")
    assert files_in(directory) == WANTED | {".download.json"}
    assert all((directory / path).read_bytes() == MODEL[path] for path in WANTED)
    total = sum(len(MODEL[path]) for path in WANTED)
    assert steps[0] == ("downloading", 0, 0)
    assert steps[-1] == ("downloading", total, total)
    assert sorted(hub.fetched) == sorted(Path(path).name for path in WANTED), "the configuration once too"
    ensure_model("org/name", store, ignore)
    assert len(hub.fetched) == len(WANTED)
    assert {path.name for path in store.cache.iterdir()} == {"org--name", LOCKS}


def test_revisions_lie_beside_each_other_and_their_commits_are_recorded(hub: Hub, store: Store) -> None:
    old = {**MODEL, "model.safetensors": b"other weights"}
    hub.repositories["org/name"] = Repository(MODEL, branches={"refs/pr/1": old})
    _, new = ensure_model("org/name", store, ignore)
    _, other = ensure_model("org/name", store, ignore, revision="refs/pr/1")
    _, exact = ensure_model("org/name", store, ignore, revision=commit_of(old))
    assert is_ready("org/name", store, "refs/pr/1")
    assert (new / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert (other / "model.safetensors").read_bytes() == (exact / "model.safetensors").read_bytes() == b"other weights"
    manifest = read_manifest(other)
    assert (manifest.revision, manifest.commit) == ("refs/pr/1", commit_of(old))
    listed = {(model.revision, model.commit) for model in list_models(store.cache)}
    assert listed == {("", commit_of(MODEL)), ("refs/pr/1", commit_of(old)), (commit_of(old), commit_of(old))}
    with pytest.raises(ModelLoadError, match="org/name has no revision 'v2'; name a branch"):
        ensure_model("org/name", store, ignore, revision="v2")
    with pytest.raises(ModelLoadError, match="is not a branch"):
        ensure_model("org/name", store, ignore, revision="../v2")


def test_pickled_weights_are_fetched_where_there_are_no_others(hub: Hub, store: Store) -> None:
    files = {path: data for path, data in MODEL.items() if not path.endswith(".safetensors")}
    hub.repositories["org/name"] = Repository(files)
    _, directory = ensure_model("org/name", store, ignore)
    assert "pytorch_model.bin" in files_in(directory)


@pytest.mark.parametrize("name", ["org/name:Q8_0", "hf://org/name:q8_0", "org/name:model-Q8_0.gguf"])
def test_the_file_of_a_quantization_is_fetched_alone(hub: Hub, store: Store, name: str) -> None:
    hub.repositories["org/name"] = Repository(GGUF)
    assert not is_ready(name, store)
    served, directory = ensure_model(name, store, ignore)
    assert served == name.removeprefix("hf://")
    assert hub.fetched == ["model-Q8_0.gguf"]
    assert (directory / "model.gguf").read_bytes() == GGUF["model-Q8_0.gguf"]
    assert not (directory / "model.gguf").is_symlink()
    assert {path.name for path in store.cache.iterdir()} == {directory.name, LOCKS}, "nothing else is left"
    assert is_ready(name, store)
    assert (found := read_manifest(directory)) is not None
    assert found.commit == commit_of(GGUF)


def test_all_parts_are_fetched(hub: Hub, store: Store) -> None:
    hub.repositories["org/name"] = Repository(GGUF)
    _, directory = ensure_model("org/name:Q4_K_M", store, ignore)
    parts = sorted(name for name in GGUF if "Q4_K_M" in name)
    assert [link.read_bytes() for link in linked_gguf(directory)] == [GGUF[name] for name in parts]
    assert sorted(hub.fetched) == [Path(name).name for name in parts]


def test_what_was_fetched_is_kept_where_it_cannot_be_converted(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelLoadError("no")

    hub.repositories["org/name"] = Repository(GGUF)
    monkeypatch.setattr(catalog, "convert_gguf", fail)
    with pytest.raises(ModelLoadError):
        ensure_model("org/name:Q8_0", store, ignore)
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    ensure_model("org/name:Q8_0", store, ignore)
    assert hub.fetched == ["model-Q8_0.gguf"]


def test_what_the_repository_has_is_said(hub: Hub, store: Store) -> None:
    hub.repositories["org/name"] = Repository(GGUF)
    with pytest.raises(ModelLoadError, match=r"no model as Q5_0; there are: Q4_K_M/model-Q4_K_M, model-Q8_0\."):
        ensure_model("org/name:Q5_0", store, ignore)
    with pytest.raises(ModelLoadError, match=r"no config\.json; .* as org/name:Q4_K_M\."):
        ensure_model("org/name", store, ignore)
    assert hub.fetched == []


@pytest.mark.parametrize("name", ["org/name:", "a b:Q8_0", "org/name:../Q8_0", "a/b/c:Q8_0"])
def test_other_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigurationError, match="ORGANISATION/NAME:QUANTIZATION"):
        ensure_model(name, store, ignore)


def test_executors_fetch_as_the_command_line_does(hub: Hub, store: Store) -> None:
    hub.repositories["org/name"] = Repository(GGUF)
    directory = checkpoints.resolve_model("hf://org/name:Q4_K_M", store, ignore)
    assert len(linked_gguf(directory)) == len(hub.fetched) == 2
    assert ensure_model("org/name:Q4_K_M", store, ignore)[1] == directory
    with pytest.raises(ModelLoadError, match="no model as Q9"):
        checkpoints.resolve_model("org/name:Q9", store, ignore)


def test_of_a_model_that_is_not_served_only_the_configuration_is_fetched(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/name"] = Repository(MODEL)
    refused = ServableVerdict("other", "It cannot be served.")
    monkeypatch.setattr(hub_module, "verdict_on", lambda directory: refused)
    with pytest.raises(ModelLoadError, match=r"It cannot be served\. Of org/name only config.json was downloaded"):
        ensure_model("org/name", store, ignore)
    assert hub_module.look_at("org/name", store.cache / "looked", store) == refused
    assert hub.fetched == ["config.json", "config.json"]


def test_an_adapter_is_two_files(hub: Hub, store: Store, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"low rank"}
    hub.repositories["org/adapter"] = Repository({**MODEL, **adapter})
    hub.repositories["org/none"] = Repository(MODEL)
    directory = ensure_adapter("org/adapter", store, ignore)
    assert files_in(directory) == {*adapter, ".download.json"}
    assert ensure_adapter("org/adapter", store, ignore) == ensure_adapter(str(directory), store, ignore) == directory
    assert len(hub.fetched) == 2
    assert list_models(store.cache) == []
    with pytest.raises(ModelLoadError, match=r"org/none holds no adapter_config\.json and no adapter_model"):
        ensure_adapter("org/none", store, ignore)
    with pytest.raises(ModelLoadError, match="name a directory of a LoRA adapter"):
        ensure_adapter(str(tmp_path), store, ignore)


def test_the_directory_of_models_comes_before_the_hub(hub: Hub, store: Store, tmp_path: Path) -> None:
    library = tmp_path / "library"
    for place in ("org/name", "org--other@v1"):
        (library / place).mkdir(parents=True)
        (library / place / "config.json").write_text("{}")
    (library / "org" / "packed").mkdir()
    (library / "org" / "packed" / "m-Q8_0.gguf").write_bytes(b"GGUF")
    store = msgspec.structs.replace(store, library=library)
    assert ensure_model("org/name", store, ignore) == ("org/name", library / "org" / "name")
    assert ensure_model("org/other", store, ignore, revision="v1")[1] == library / "org--other@v1"
    _, packed = ensure_model("org/packed:Q8_0", store, ignore)
    assert linked_gguf(packed)[0].resolve() == library / "org" / "packed" / "m-Q8_0.gguf"
    assert hub.fetched == []
    with pytest.raises(ConfigurationError, match=rf"not in the cache .* or the directory {library}.* knows no such"):
        ensure_model("org/other", store, ignore)


def test_a_mirror_is_asked_in_place_of_the_hub(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/name"] = Repository(MODEL)
    mirror = hub_module.constants.ENDPOINT
    template = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub_module.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub_module.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    ensure_model("org/name", msgspec.structs.replace(store, endpoint=mirror), ignore)
    assert len(hub.fetched) == len(WANTED)


def test_what_to_do_is_said_and_no_secret(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repositories["org/gated"] = Repository(MODEL, gated=True, token="hf_right")
    with pytest.raises(
        ModelLoadError, match=r"is gated: accept its conditions at http://.*/org/gated, .*\(none is set\)"
    ):
        ensure_model("org/gated", store, ignore)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelLoadError, match=r"\(the one that is set has no access\)") as raised:
        ensure_model("org/gated", store, ignore)
    hub.faults.statuses[""] = [(418, {"X-Error-Message": "hf_wrong is no teapot"})]
    with pytest.raises(ConfigurationError, match=r"\*\*\* is no teapot|418") as second:
        ensure_model("org/gated", store, ignore)
    with pytest.raises(ConfigurationError, match=r"knows no such repository.*whether the HF_TOKEN that is set has"):
        ensure_model("org/none", store, ignore)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    ensure_model("org/gated", store, ignore)
    assert "Bearer hf_right" in hub.tokens
    assert "hf_" not in f"{raised.value}{second.value}{caplog.text}"
    for path in store.cache.rglob("*"):
        assert path.is_dir() or b"hf_" not in path.read_bytes()


def test_an_address_is_told_without_its_password(hub: Hub, store: Store) -> None:
    endpoint = hub_module.constants.ENDPOINT.replace("http://", "http://user:secret@")
    with pytest.raises(ConfigurationError, match="knows no such") as raised:
        ensure_model("org/none", msgspec.structs.replace(store, endpoint=endpoint), ignore)
    assert "secret" not in str(raised.value)


def test_offline_the_hub_is_not_asked(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/name"] = Repository(MODEL)
    monkeypatch.setattr(hub_module.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"is not in the cache .*HF_HUB_OFFLINE is set"):
        ensure_model("org/name", store, ignore)
    assert hub.tokens == set()


def listing(**changed: object) -> list[dict[str, object]]:
    return [{"rfilename": "config.json", "size": 2}, {"rfilename": "a.json", "size": 1, **changed}]


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (listing(rfilename="../up.json"), r"'\.\./up\.json', which is no name within a directory"),
        (listing(rfilename="/up.json"), "no name within a directory"),
        (listing(rfilename="a" * 300 + ".json"), "no name within a directory"),
        (listing(rfilename="a\nb.json"), "no name within a directory"),
        (listing(rfilename="config.json/a.json"), "'config.json', which is no name within"),
        (listing(rfilename="CONFIG.json"), "two files of one name"),
        (listing(size=1 << 40), "lists a.json with 1099511627776 bytes, of which at most 536870912"),
        (listing(size=-1), "lists a.json with -1 bytes"),
        ([{"rfilename": "config.json", "size": 1 << 30}], "config.json with 1073741824 bytes"),
        ([{"rfilename": f"{number}.bin", "size": 1} for number in range(10_001)], "lists 10001 files; at most"),
        ([*listing(), *({"rfilename": f"{n}.json", "size": 1} for n in range(2_000))], "is made of 2002 files"),
        ([{"rfilename": "config.json"}], "does not tell commit and sizes"),
    ],
)
def test_hostile_listings_are_refused_before_a_byte_is_fetched(
    hub: Hub, store: Store, listed: list[dict[str, object]], said: str
) -> None:
    hub.repositories["org/name"] = Repository(MODEL, listed=listed)
    with pytest.raises(ModelLoadError, match=said):
        ensure_model("org/name", store, ignore)
    assert hub.fetched == []
    assert [path.name for path in store.cache.iterdir()] == [LOCKS]


def test_an_answer_that_is_none_of_a_hub_is_said(hub: Hub, store: Store) -> None:
    hub.repositories["org/name"] = Repository(MODEL, listed=[{"no": "name"}])
    with pytest.raises(ConfigurationError, match="could not be fetched from"):
        ensure_model("org/name", store, ignore)
    assert json.dumps(hub.fetched) == "[]"
