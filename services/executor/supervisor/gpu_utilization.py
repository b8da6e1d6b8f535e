"""How busy the GPUs of a ring are, as their driver says: asked by the orchestrator, whatever the ranks do."""

import uuid as uuids
from typing import Any, NamedTuple


class GpuUse(NamedTuple):
    """None: the driver does not say (parts of a partitioned GPU have no utilization of their own)."""

    utilization: float | None
    """Share of the last moment in which something was computed, 0 to 1."""
    memory_used: int | None
    """Bytes, other processes' included."""
    memory_total: int | None


_UNKNOWN = GpuUse(None, None, None)


class GpuReader:
    """Asks NVIDIA's driver. Without the driver, or without nvidia-ml-py, nothing is known of any GPU."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._tried = False

    def read(self, uuid: bytes) -> GpuUse:
        """`uuid`: the 16 bytes that CUDA tells of a device."""
        nvml = self._library()
        if nvml is None:
            return _UNKNOWN
        handle = self._handle(nvml, str(uuids.UUID(bytes=uuid)))
        if handle is None:
            return _UNKNOWN
        memory = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = _asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return GpuUse(
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
        )

    def _library(self) -> Any:
        if not self._tried:
            self._tried = True
            try:
                import pynvml

                pynvml.nvmlInit()
            except Exception:  # no package, no driver, one that does not answer: there is nothing to show
                return None
            self._nvml = pynvml
        return self._nvml

    @staticmethod
    def _handle(nvml: Any, uuid: str) -> Any:
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            handle = _asked(nvml, lambda name=name: nvml.nvmlDeviceGetHandleByUUID(name))
            if handle is not None:
                return handle
        return None


def _asked(nvml: Any, ask: Any) -> Any:
    try:
        return ask()
    except nvml.NVMLError:
        return None
