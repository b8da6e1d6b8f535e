"""The real model, and stacks that several tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.target import LocalSettings
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model, pulled and converted where that has not happened on this machine."""
    return ensure_model(DEFAULT_MODEL, LocalSettings().store, lambda stage, done, total: None)[1]


@pytest.fixture(scope="package")
def two_groups(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Stack]:
    """Two groups of one rank, fp32."""
    directory = tmp_path_factory.mktemp("two-groups")
    with Stack(directory, "--replicas", "2", "--dtype", "fp32") as stack:
        yield stack


@pytest.fixture(scope="package")
def one_ring_of_two(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Stack]:
    """One group of two ranks, fp32."""
    with Stack(tmp_path_factory.mktemp("ring-of-two"), "--tp", "2", "--dtype", "fp32") as stack:
        yield stack
