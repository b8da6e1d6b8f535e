"""Backends and platforms: each can be taken out of its list, and what is left computes; the core names none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.executor.native.library import load_library
from services.executor.worker.backends import catalog as backends
from services.executor.worker.backends.cpu_kernels import CpuKernels
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.ring import mixed_script
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.without_line import TOKENS

EXECUTOR = Path(backends.__file__).parents[2]
BACKEND_LIST, PLATFORM_LIST = ("services.executor.worker.backends.catalog", "services.executor.platforms.catalog")


@pytest.mark.parametrize("left_out", backends.BACKENDS, ids=lambda one: type(one).__name__)
def test_without_one_backend_the_rest_computes(
    left_out: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", tuple(one for one in backends.BACKENDS if one is not left_out))
    directory = make_model(tmp_path, "llama", head_dim=32)
    runner = runner_of(directory, native=True)
    assert runner.is_native == (load_library() is not None and not isinstance(left_out, CpuKernels))
    expected = truth(directory, mixed_script()[0].sequences)
    assert errors(runner, expected).mean() < 0.05 * expected[0].std()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it computes on this host's GPU")
@pytest.mark.parametrize(
    ("catalog", "name", "package"),
    [
        (BACKEND_LIST, "GpuDecoding", "services.executor.gpu"),
        (BACKEND_LIST, "CpuKernels", "services.executor.cpu"),
        (PLATFORM_LIST, "Cuda", "services.executor.platforms.cuda"),
    ],
)
def test_without_its_line_its_code_is_not_needed(catalog: str, name: str, package: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    command = [sys.executable, "-m", "tests.unit.executor.worker.without_line", catalog, name, package]
    told = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    library = load_library()
    native = "PyTorch cpu" if library is None or name == "CpuKernels" else f"native {library.level}"
    assert told.stdout.splitlines()[-1] == f"{native}, {TOKENS}"


def test_the_core_asks_a_platform_and_names_none() -> None:
    """Collectives are NCCL's, which are for CUDA."""
    own = {"collectives", "cpu", "engines", "gpu", "platforms"}
    files = [path for path in EXECUTOR.rglob("*.py") if path.relative_to(EXECUTOR).parts[0] not in own]
    found = {str(path.relative_to(EXECUTOR)) for path in files if re.search(r'torch\.cuda|"cuda"', path.read_text())}
    assert found == {"core/settings.py", "worker/backends/gpu_decoder.py"}
