"""Kernels are decorated when they are imported: the interpreter is chosen before that, unless there is a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.interpreter import make_cheap
from tests.unit.executor.gpu.kernels.rounding import round_as_gpus_do

make_cheap()


@pytest.fixture(autouse=True)
def bf16_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus_do(monkeypatch)
