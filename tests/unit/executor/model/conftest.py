"""A small Llama, and a copy of it that a test may spoil."""

import shutil
from pathlib import Path

import pytest

from tests.unit.executor.model.tiny import make_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))
