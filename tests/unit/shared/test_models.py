"""Names of models, and of the files that they are in."""

from pathlib import Path

import pytest

from shared.errors import ModelLoadError
from shared.models import choose_gguf, file_of, here, hub_name, pulled_name

FILES = (
    "README.md",
    "mmproj-model-F16.gguf",
    "model.imatrix.gguf",
    "model-Q4_K_M.gguf",
    "model-UD-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.IQ4_XS.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
    "Q8_0/model-Q8_0-00001-of-00003.gguf",
    "Q8_0/model-Q8_0-00003-of-00003.gguf",
)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("q4_k_m", ["model-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["model-UD-Q4_K_M.gguf"]),
        ("iq4_xs", ["model.IQ4_XS.gguf"]),
        ("model-Q4_K_S.gguf", ["model-Q4_K_S.gguf"]),
        ("BF16", ["BF16/model-BF16-00001-of-00002.gguf", "BF16/model-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_quantization_is_the_end_of_a_files_name(wanted: str, chosen: list[str]) -> None:
    assert choose_gguf(FILES, "org/model", wanted) == chosen


@pytest.mark.parametrize(
    ("files", "wanted", "sentence"),
    [
        (FILES, "Q5_K_M", r"no model as Q5_K_M; there are: BF16/model-BF16, .*model-Q4_K_M, .*model\.IQ4_XS\. Name"),
        (("a/m-Q8_0.gguf", "b/m-Q8_0.gguf"), "Q8_0", r"several models as Q8_0; there are: a/m-Q8_0, b/m-Q8_0"),
        (FILES, "F16", "no model as F16"),
        (FILES, "Q8_0", r"lacks Q8_0/model-Q8_0-00002-of-00003\.gguf"),
        (("a-3b-Q8_0.gguf", "a-7b-Q8_0.gguf"), "Q8_0", r"several models as Q8_0; there are: a-3b-Q8_0, a-7b-Q8_0"),
        (("config.json",), "Q8_0", "there are: no GGUF files"),
    ],
)
def test_what_is_there_is_said(files: tuple[str, ...], wanted: str, sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        choose_gguf(files, "org/model", wanted)


def test_hub_names_have_a_repository_and_a_quantization() -> None:
    assert hub_name("hf://org/name:Q4_K_M") == hub_name("org/name:Q4_K_M") == ("org/name", "Q4_K_M")
    assert hub_name("hf://org/name") == ("org/name", "")
    assert pulled_name("hf://org/name:Q4_K_M") == "org--name:Q4_K_M"


def test_a_directory_with_a_bare_file_is_that_file(tmp_path: Path) -> None:
    for name in ("mmproj-m.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert file_of(str(tmp_path)) == str(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"holds 2 models \(m-00001-of-00002\.gguf, n\.gguf\); name one of"):
        file_of(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert file_of(str(tmp_path)) == str(tmp_path)


def test_a_link_is_meant_by_its_own_name(tmp_path: Path) -> None:
    """What it leads to may end otherwise, as in the hub's own cache."""
    (tmp_path / "blob").touch()
    (tmp_path / "m.gguf").symlink_to("blob")
    assert here(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")
