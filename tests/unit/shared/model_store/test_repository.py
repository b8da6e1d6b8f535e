"""Names that a repository lists, whatever they are."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ModelLoadError
from shared.model_store.repository import (
    RemoteFile,
    check_revision,
    checked,
    choose_files,
    directory_name,
    library_names,
)

PARTS = st.sampled_from(["..", ".", "", "a", "model.safetensors", "b.json", "\0", "\\", ".hidden", "ä" * 200])
PATHS = st.lists(PARTS, min_size=1, max_size=10).map("/".join) | st.text(max_size=40)


@given(st.lists(PATHS, max_size=5))
def test_whatever_is_fetched_lies_within_the_directory(paths: list[str]) -> None:
    files = [RemoteFile(path, 1) for path in paths]
    for choose in (checked, choose_files):
        try:
            chosen = choose(files, "org/name")
        except ModelLoadError:
            continue
        for file in chosen:
            place = os.path.normpath(f"/cache/model/{file.path}")
            assert Path(place).is_relative_to("/cache/model")
            assert place == f"/cache/model/{file.path}"
            assert not any(part.startswith(".") or len(os.fsencode(part)) > 255 for part in Path(file.path).parts)


@given(st.text(max_size=30))
def test_a_revision_that_is_taken_names_one_directory(revision: str) -> None:
    try:
        check_revision(revision)
    except ModelLoadError:
        return
    name = directory_name("org/name", revision)
    assert Path(name).name == name
    assert library_names("org/name:Q8_0", revision)[1] == directory_name("org/name", revision)


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (["model.safetensors", "consolidated.safetensors"], {"model.safetensors"}),
        (
            ["model-1.safetensors", "consolidated.safetensors", "model.safetensors.index.json", "pytorch_model.bin"],
            {"model-1.safetensors", "model.safetensors.index.json"},
        ),
        (["pytorch_model.bin", "training_args.bin", "vae/model.safetensors"], {"pytorch_model.bin"}),
        (["pytorch_model-1.bin", "optimizer.bin"], {"pytorch_model-1.bin"}),
        (["a.txt", "1_Pooling/config.json", "one/two/three.json", "m.gguf"], {"a.txt", "1_Pooling/config.json"}),
    ],
)
def test_weights_are_fetched_once(listed: list[str], wanted: set[str]) -> None:
    assert {file.path for file in choose_files([RemoteFile(path, 1) for path in listed], "m")} == wanted
