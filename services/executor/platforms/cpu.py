"""The host's CPUs, whose memory all ranks of a host share."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RankBoard
from services.executor.native.library import choose_level
from services.executor.platforms.base import Carrier, DeviceEvent, Fence, Platform, Target


class Cpu(Platform):
    name = "cpu"
    is_host = True
    collectives = ("shm", "gloo")
    multiplies_float_codes = True
    compresses_uneven_layers = True
    reads_groups = True

    def is_available(self) -> bool:
        return True

    def take_device(self, settings: ExecutorSettings, rank: int) -> torch.device:
        return torch.device("cpu")

    def start_rank(self, settings: ExecutorSettings, device: torch.device, board: RankBoard) -> None:
        choose_level(settings.cpu_level)  # whose kernels are proven

    def free_memory(self, device: torch.device) -> tuple[int, int]:
        """Within this process's control group's limit."""
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(size.split()[0]) << 10 for name, _, size in (line.partition(":") for line in lines)}
        room = control_group_room(Path("/sys/fs/cgroup"))
        return min([sizes["MemAvailable"], *room]), sizes["MemTotal"]

    def has_fast_bf16(self) -> bool:
        try:
            return multiplies_bf16(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return False

    def carriers(self, device: torch.device) -> Callable[[], Carrier]:
        return HostCarrier

    def event(self) -> DeviceEvent:
        return CompletedEvent()


def multiplies_bf16(cpuinfo: str) -> bool:
    """Whether the processor that `cpuinfo` describes, as /proc/cpuinfo does, has instructions that multiply bf16:
    AVX512-BF16 or AMX; Arm's BF16 extension. PyTorch converts value by value elsewhere."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.split())


def control_group_room(group: Path) -> list[int]:
    """[bytes below the control group's limit], or [] where there is none. Version 2 of control groups, then 1,
    whose limit is a number beyond any memory where there is none."""
    for limit_file, used_file in (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = limit_file.read_text(encoding="ascii").strip()
            used = int(used_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        return [] if limit == "max" else [max(0, int(limit) - used)]
    return []


class HostCarrier:
    """To host memory, at once."""

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, target: Target, staged: Tensor) -> Fence:
        target(staged)
        return lambda: None


class CompletedEvent:
    """Its work is done when a call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return
