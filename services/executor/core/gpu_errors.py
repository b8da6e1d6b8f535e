"""What an error of a GPU means, and what to do about it, in one sentence. Pure, and without torch.

After most of them the process can use its GPU no more, not even to clean up: the rank ends, the supervisor ends
the others, and the ring starts anew in new processes. Codes: cudaError_t, in CUDA's runtime API reference.
"""

import re
from typing import NamedTuple

from shared.errors import InternalError, RingLost, RyzansteinError
from shared.messages import RING_CAUSES

# What a ring dies of; `supervisor/failure_detection.py` tells them apart.
EXTERNAL, OUT_OF_MEMORY, CRASHED, HUNG = RING_CAUSES


class Fault(NamedTuple):
    code: int  # of `cudaError_t`
    pattern: str  # in the text of those that come without a code
    remedy: str


_RESTART = "the ring is restarted and the request continues"
_KERNEL = (
    f"{_RESTART}; if it comes again, report it with what CUDA_LAUNCH_BLOCKING=1 logs, and serve with "
    "RYZANSTEIN_DEVICE=cpu or on other GPUs meanwhile"
)
_FAULTS = (
    Fault(700, r"illegal memory access", _KERNEL),
    Fault(710, r"device-side assert", _KERNEL),
    Fault(716, r"misaligned address", _KERNEL),
    Fault(719, r"unspecified launch failure", _KERNEL),
    Fault(
        214,
        r"\bECC\b",
        f"{_RESTART}; if it comes again, look at `nvidia-smi -q -d ECC,ROW_REMAPPER`, then reset or replace the GPU",
    ),
    Fault(220, r"NVLink", f"{_RESTART}; if it comes again, look at `nvidia-smi nvlink --errorcounters`"),
    Fault(
        46, r"busy or unavailable", f"{_RESTART}; look at `nvidia-smi` for who holds the GPU, or for its compute mode"
    ),
    Fault(
        802, r"system not yet initialized", f"{_RESTART}; start the fabric manager (nvidia-fabricmanager) of this host"
    ),
)
_OTHER = f"{_RESTART}; if it comes again, look for Xid messages of the driver in `dmesg`"
_PREFIXES = ("CUDA error", "Triton Error [CUDA]")
# Of libraries that take memory without torch: kernels as they are loaded, cuBLAS as it begins.
_NO_MEMORY = re.compile(r"(CUDA error|CUDA driver error|Triton Error \[CUDA\]): (out of memory|CUBLAS\w+ALLOC_FAILED)")
_OUT_OF_MEMORY = (
    "lower RYZANSTEIN_GPU_MEMORY_UTILIZATION, RYZANSTEIN_KV_MEMORY or RYZANSTEIN_MAX_BATCH_TOKENS, let nothing else "
    "use the GPU, keep the weights in eight bits (RYZANSTEIN_WEIGHT_DTYPE=fp8 or int8), or spread the model over more "
    "GPUs with --tp"
)


def is_gpu_error(error: BaseException) -> bool:
    """Whether `error` is CUDA's, as torch and Triton raise it: whichever asks the device next is told. Running out of
    memory is not, nor what the driver refuses ("CUDA driver error"): the GPU works on."""
    if _is_out_of_memory(error):
        return False
    return _named(error, "AcceleratorError") or str(error).startswith(_PREFIXES)


def explain(error: BaseException, who: str) -> RyzansteinError | None:
    """`error` of the rank `who` ("Rank 1 of group g") as the sentence to end with; None where it is not a GPU's."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if _is_out_of_memory(error):
        # Without torch's own advice, and where it is written.
        reason = reason.partition(" If reserved but")[0].rstrip(".")
        return InternalError(f"{who} has run out of GPU memory ({reason}); {_OUT_OF_MEMORY}.")
    if not is_gpu_error(error):
        return None
    return RingLost(f"Fatal CUDA error on {who[0].lower()}{who[1:]} ({reason}); {_remedy(error)}.")


def cause(error: BaseException) -> str:
    """What a ring dies of whose rank ends with `error`: faults of kernels may be of the request that is computed,
    those of the device or its link are not."""
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return OUT_OF_MEMORY
    if is_gpu_error(error):
        return CRASHED if _remedy(error) in (_KERNEL, _OTHER) else EXTERNAL
    return CRASHED


def _remedy(error: BaseException) -> str:
    code, text = getattr(error, "error_code", None), str(error)
    for fault in _FAULTS:
        if code == fault.code or re.search(fault.pattern, text):
            return fault.remedy
    return _OTHER


def _is_out_of_memory(error: BaseException) -> bool:
    if _named(error, "OutOfMemoryError") or getattr(error, "error_code", None) == 2:
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.match(str(error)) is not None


def _named(error: BaseException, name: str) -> bool:
    return any(one.__name__ == name for one in type(error).__mro__)
