"""Backends: each can be taken out of the list, and what is left computes."""

from pathlib import Path

import pytest

from services.executor.native.library import load_library
from services.executor.worker import backend
from services.executor.worker.backends.catalog import BACKENDS
from services.executor.worker.backends.cpu_kernels import CpuKernels
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.ring import mixed_script
from tests.unit.executor.model.tiny import make_model


@pytest.mark.parametrize("left_out", BACKENDS, ids=lambda one: type(one).__name__)
def test_without_one_backend_the_rest_computes(
    left_out: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "BACKENDS", tuple(one for one in BACKENDS if one is not left_out))
    directory = make_model(tmp_path, "llama", head_dim=32)
    runner = runner_of(directory, native=True)
    assert runner.is_native == (load_library() is not None and not isinstance(left_out, CpuKernels))
    expected = truth(directory, mixed_script()[0].sequences)
    assert errors(runner, expected).mean() < 0.05 * expected[0].std()
