"""CUDA GPUs: which one a rank takes, the CPU cores near it, what makes it watchable, its memory, copies and events.

Marks in its work tell the board what the device has done (`core/progress.py`). Triton compiles a kernel when it is
first launched with arguments of a new kind, which takes seconds: longer than a rank may stand still, so it is excused
meanwhile. `warm_up` meets most of them before the ring is ready, and cannot meet all.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
import torch
from torch import Tensor

from services.executor.core.progress import NUMBERS
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RankBoard
from services.executor.platforms.base import Carrier, DeviceEvent, Fence, Platform, Target
from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)

_PCI = Path("/sys/bus/pci/devices")


class Cuda(Platform):
    name = "cuda"
    is_host = False
    collectives = ("nccl", "gloo")
    multiplies_float_codes = False
    reads_groups = False
    compresses_uneven_layers = False  # Triton's kernels read page layers of one shape

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def take_device(self, settings: ExecutorSettings, rank: int) -> torch.device:
        """That of the rank's place on its host, among those that CUDA_VISIBLE_DEVICES leaves. Raises
        `ConfigurationError` when there are fewer GPUs than ranks."""
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

    def start_rank(self, settings: ExecutorSettings, device: torch.device, board: RankBoard) -> None:
        watch_device(board, device)
        if settings.pin_threads:
            bind_to_numa_node(device)

    def free_memory(self, device: torch.device) -> tuple[int, int]:
        self.give_back(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)

    def give_back(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # else copies under way keep their buffers
        torch.cuda.empty_cache()

    def has_fast_bf16(self) -> bool:
        return True

    def carriers(self, device: torch.device) -> Callable[[], Carrier]:
        index = torch.cuda.current_device() if device.index is None else device.index
        return partial(CudaCarrier, torch.device("cuda", index))

    def free_buffers(self) -> None:
        """torch keeps pinned memory for later, which nobody will ask for in such pieces."""
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # noqa: SLF001  # no public name

    def event(self) -> DeviceEvent:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made: DeviceEvent = event
        return made


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


LONGEST = 120.0  # seconds that one kernel may take to compile


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


class CudaCarrier:
    """To a GPU, by a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What the memory of the targets was used for before comes first.
        self._stream.wait_stream(torch.cuda.default_stream(device))

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Target, staged: Tensor) -> Fence:
        with torch.cuda.stream(self._stream):
            target(staged)
            # Blocking: a thread that waits leaves its core to those that copy.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return arrived.synchronize
