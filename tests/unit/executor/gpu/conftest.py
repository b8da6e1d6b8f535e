"""Kernels are decorated when they are imported: the interpreter is chosen before that, unless there is a GPU."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter import prepare
from tests.pretend_gpu.streams import Host

prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rows that only fill up a graph's batch are computed from whatever lies in memory, which NumPy remarks on."""
    unread = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(unread)


@pytest.fixture
def gpu() -> Iterator[Host]:
    """A simulated one."""
    from tests.pretend_gpu.device import pretend_gpu

    with pretend_gpu() as host:
        yield host


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A GPU, if only a simulated one, on which kernels run with the constants that they are compiled with."""
    from tests.pretend_gpu.device import pretend_gpu

    with nullcontext() if torch.cuda.is_available() else pretend_gpu():
        yield torch.device("cuda", 0)
