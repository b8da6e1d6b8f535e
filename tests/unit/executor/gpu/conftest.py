"""Kernels are decorated when they are imported: the interpreter is chosen before that, unless there is a GPU."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter import make_cheap
from tests.unit.executor.gpu.kernels.rounding import round_as_gpus_do

make_cheap()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rows that only fill up a graph's batch are computed from whatever lies in memory, which NumPy remarks on."""
    unread = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(unread)


@pytest.fixture(autouse=True)
def bf16_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus_do(monkeypatch)
