"""A rank's GPU: which it takes, the CPU cores near it, what makes it watchable, and copies and events of its stream.

Marks in its work tell the board what the device has done (`core/progress.py`). Triton compiles a kernel when it is
first launched with arguments of a new kind, which takes seconds: longer than a rank may stand still, so it is excused
meanwhile. `warm_up` meets most of them before the ring is ready, and cannot meet all.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.progress import NUMBERS
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RankBoard
from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)

_PCI = Path("/sys/bus/pci/devices")


def choose_device(settings: ExecutorSettings, rank: int) -> torch.device:
    """Each rank takes the GPU of its place on its host, among those that CUDA_VISIBLE_DEVICES leaves; CPU where there
    is none or it was asked for. Raises `ConfigurationError` when there are fewer GPUs than ranks."""
    use_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    among = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"--device cuda was asked for and torch sees no GPU{among}; use --device cpu, or a torch that is built "
            "for CUDA, with NVIDIA's driver."
        )
    needed, count = settings.ranks_here, torch.cuda.device_count()
    if needed > count:
        raise ConfigurationError(
            f"--tp {settings.tp} needs {needed} GPUs on each host and this one has {count}{among}; "
            "use a smaller --tp, or more hosts (--nnodes)."
        )
    device = torch.device("cuda", rank % needed)
    torch.cuda.set_device(device)
    return device


def bind_to_numa_node(device: torch.device, pci: Path = _PCI) -> None:
    """Keeps the calling thread, and those that it starts, on the cores next to `device`'s memory channel, where
    pinned buffers are nearest. Does nothing where the system does not say which those are, or none may be used."""
    of: Any = torch.cuda.get_device_properties(device)
    try:
        name = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
        near = parse_cores((pci / name / "local_cpulist").read_text(encoding="ascii"))
        cores = near & os.sched_getaffinity(0)
        if cores and cores != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cores)
            log.info("numa_affinity_set", device=str(device), cores=len(cores))
    except (AttributeError, OSError, ValueError):
        return


def parse_cores(listing: str) -> set[int]:
    """The numbers in "0-3,8": the kernel's way to write a set of cores. Raises `ValueError`."""
    cores: set[int] = set()
    for part in filter(None, listing.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def watch_device(board: RankBoard, device: torch.device) -> None:
    """From now on `board` says which GPU the rank computes on, and counts what that has done. To be called once,
    before the first step, by the rank whose board it is."""
    board.computes_on(uuid_of(torch.cuda.get_device_properties(device).uuid))
    board.follow_device(CudaMarks(device)).start()
    excuse_compiling(board.recorder.excuse)


def uuid_of(told: object) -> bytes:
    """The 16 bytes of what torch tells, written plainly or as NVIDIA's tools write it."""
    return UUID(str(told).removeprefix("GPU-").removeprefix("MIG-")).bytes


class CudaMarks:
    """`Marks` on one device: a mark copies its number, 8 bytes, from the device into pinned host memory.

    The copy is ordered behind the stream's kernels, as each of them is, and needs no kernel of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.split(torch.arange(NUMBERS, dtype=torch.int64, device=device), 1)
        self._pinned = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = self._pinned.numpy()  # an aligned word, written at once, as the board's are
        torch.cuda.synchronize(device)  # the numbers are there for whichever stream marks first

    def put(self, number: int) -> None:
        self._pinned.copy_(self._numbers[number], non_blocking=True)

    @property
    def last(self) -> int:
        return int(self._seen[0])

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


LONGEST = 120.0
"""Seconds that one kernel may take to compile."""


def excuse_compiling(excuse: Callable[[float], None], runtime: Any = None) -> None:
    """Has `excuse` (seconds for which the rank may stand still; 0: no longer) called around every compilation.
    `runtime`: `triton.knobs.runtime`; None: that of this process, and nothing where there is no Triton."""
    if runtime is None:
        try:
            from triton import knobs
        except ImportError:
            return
        runtime = knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begins(**about: Any) -> Any:
        excuse(LONGEST)
        return before(**about) if before is not None else None

    def is_over(**about: Any) -> Any:
        excuse(0.0)
        return after(**about) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begins, is_over


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` there, in memory of its own, once what is in the stream has run; waits for none of it.

    A copy out of memory that is not pinned waits for everything that the stream has to do, the steps before
    included. torch keeps the pinned copy until the device has read it.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


class DeviceEvent(Protocol):
    """`torch.cuda.Event`, as far as it is used."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class CompletedEvent:
    """The event of a device whose work is done when a call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


def new_event(device: torch.device) -> DeviceEvent:
    """One that has happened until it is recorded."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made: DeviceEvent = event
        return made
    return CompletedEvent()
