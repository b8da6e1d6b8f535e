"""What a GPU's errors mean, by the texts and codes that torch gives them."""

import pytest

from services.executor.core.gpu_errors import explain, is_gpu_error
from services.executor.rank import failed
from shared.errors import InternalError, RingLost


class AcceleratorError(RuntimeError):
    """As torch's, which is a RuntimeError with the code beside the text."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.error_code = code


class OutOfMemoryError(RuntimeError):
    pass


HINTS = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (AcceleratorError(f"CUDA error: device-side assert triggered{HINTS}", 710), "CUDA_LAUNCH_BLOCKING=1"),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "nvidia-smi -q -d ECC"),
        (AcceleratorError("CUDA error: something", 214), "nvidia-smi -q -d ECC"),
        (AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable", 46), "nvidia-smi"),
        (AcceleratorError("CUDA error: system not yet initialized", 802), "nvidia-fabricmanager"),
        (AcceleratorError("CUDA error: unknown error", 999), "Xid messages"),
    ],
    ids=str,
)
def test_a_lost_gpu_is_one_sentence_with_a_remedy(error: RuntimeError, remedy: str) -> None:
    assert is_gpu_error(error)
    fault = explain(error, "Rank 1 of group g")
    assert isinstance(fault, RingLost)
    assert str(fault).startswith("Fatal CUDA error on rank 1 of group g (CUDA error: ")
    assert "the ring is restarted" in str(fault)
    assert remedy in str(fault)
    assert "\n" not in str(fault)


def test_memory_that_has_run_out_names_the_settings() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB."
    error = OutOfMemoryError(f"{text} If reserved but unallocated memory is large try setting X.\nmore")
    assert not is_gpu_error(error), "the GPU works on"
    fault = explain(error, "Rank 0 of group g")
    assert isinstance(fault, InternalError)
    assert f"({text.rstrip('.')}); lower RYZANSTEIN_GPU_MEMORY_UTILIZATION" in str(fault)
    assert "RYZANSTEIN_WEIGHT_DTYPE" in str(fault), "the weights alone may be too large"


def test_triton_is_told_of_what_another_kernel_has_done() -> None:
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert is_gpu_error(error)
    fault = explain(error, "Rank 0 of group g")
    assert isinstance(fault, RingLost)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(fault)


@pytest.mark.parametrize(
    "text",
    [
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
    ],
)
def test_libraries_that_find_no_memory_are_told_apart_from_a_lost_gpu(text: str) -> None:
    assert not is_gpu_error(RuntimeError(text))
    fault = explain(RuntimeError(text), "Rank 0 of group g")
    assert isinstance(fault, InternalError)
    assert "let nothing else use the GPU" in str(fault)


def test_other_errors_are_not_the_gpus() -> None:
    assert not is_gpu_error(RuntimeError("Connection closed by peer"))
    assert explain(ValueError("CUDA is fine"), "Rank 0") is None
    fault = failed(ValueError("no"), "Rank 0 of group g")
    assert (fault.code, fault.message) == ("internal_error", "Rank 0 of group g failed: ValueError: no.")
    assert failed(AcceleratorError("CUDA error: x", 700), "Rank 0").code == "ring_lost"
