"""The backends: the first one of a platform computes there, and where there is none transformers' own modules do
(`base.py`). Taking a line out takes the feature out."""

from services.executor.worker.backends.base import Backend
from services.executor.worker.backends.cpu_kernels import CpuKernels
from services.executor.worker.backends.gpu_decoder import GpuDecoding

BACKENDS: tuple[Backend, ...] = (GpuDecoding(), CpuKernels())
