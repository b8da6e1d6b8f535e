"""The backends: the first one of a platform computes there, and where there is none transformers' own modules do
(`base.py`). Taking a line out takes the feature out."""

import torch

from services.executor.native.library import choose_level
from services.executor.worker.backends.base import Backend
from services.executor.worker.backends.cpu_kernels import CpuKernels
from services.executor.worker.backends.gpu_decoder import GpuDecoding
from services.executor.worker.weights import Share, ShareRequest

BACKENDS: tuple[Backend, ...] = (GpuDecoding(), CpuKernels())


def backend_of(device: torch.device) -> Backend:
    return next((one for one in BACKENDS if one.platform == device.type), Backend())


def load_share(request: ShareRequest) -> Share:
    """Raises `ModelLoadError` and `ConfigurationError`: one sentence with the remedy."""
    choose_level(request.settings.cpu_level)
    return backend_of(request.device).load_share(request)
