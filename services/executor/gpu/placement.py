"""Which GPU a rank takes, and the CPU cores near it."""

import os
from pathlib import Path
from typing import Any

import structlog
import torch

from services.executor.settings import ExecutorSettings
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


def stay_near(device: torch.device, pci: Path = _PCI) -> None:
    """Keeps the calling thread, and those that it starts, on the cores next to `device`'s memory channel, where
    pinned buffers are nearest. Does nothing where the system does not say which those are, or none may be used."""
    of: Any = torch.cuda.get_device_properties(device)
    try:
        name = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
        near = parse_cores((pci / name / "local_cpulist").read_text(encoding="ascii"))
        cores = near & os.sched_getaffinity(0)
        if cores and cores != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cores)
            log.info("staying_near_gpu", device=str(device), cores=len(cores))
    except (AttributeError, OSError, ValueError):
        return


def parse_cores(listing: str) -> set[int]:
    """The numbers in "0-3,8": the kernel's way to write a set of cores. Raises `ValueError`."""
    cores: set[int] = set()
    for part in filter(None, listing.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
