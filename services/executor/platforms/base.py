"""The interface of platforms: all that the executor asks of a device beside computing with tensors on it.

What computes there is a backend's (`worker/backends/`). A platform is one object of one file; `catalog.py` lists them.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RankBoard

Fence = Callable[[], None]  # waits until a device has done what it was given
# Enqueues on the current stream what brings a piece, in host memory, to its place.
Target = Callable[[Tensor], None]


class Carrier(Protocol):
    """One lane's way to a device. Made and used by one thread."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] in host memory that the device can copy from by itself."""

    def send(self, target: Target, staged: Tensor) -> Fence:
        """Has the device run `target(staged)`, in order with what was sent before; `staged` must stay as it is until
        the fence."""


class DeviceEvent(Protocol):
    """`torch.Event`, as far as it is used."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class Platform(Protocol):
    name: str  # torch's type of its devices, and what `--device` calls it
    # Whether its memory is the host's, which ranks share, and its work is done when a call returns.
    is_host: bool
    # What ranks on it may communicate by, as `--collectives` calls them; the first one unless another is asked for.
    collectives: tuple[str, ...]
    # Whether kernels take weights of groups whose codes are floats (`QuantizedRows.floats`).
    multiplies_float_codes: bool
    # Whether compressed KV blocks are read fast, too, where page layers differ in shape.
    compresses_uneven_layers: bool
    # Whether its kernels read codes in groups (`kv_cache/code_groups.py`).
    reads_groups: bool

    def is_available(self) -> bool:
        """Whether this host has such devices, and torch can use them."""
        ...

    def take_device(self, settings: ExecutorSettings, rank: int) -> torch.device:
        """The device of `rank`, which becomes this thread's. Raises `ConfigurationError`."""
        ...

    def start_rank(self, settings: ExecutorSettings, device: torch.device, board: RankBoard) -> None:
        """To be called once, before the rank whose `board` it is loads anything. Raises `ConfigurationError`."""
        ...

    def free_memory(self, device: torch.device) -> tuple[int, int]:
        """(bytes free for this process, bytes in all). What PyTorch holds for later and does not use counts as free."""
        ...

    def give_back(self, device: torch.device) -> None:
        """Gives the memory that PyTorch keeps for later back to the driver: for libraries that ask it themselves, and
        get nothing of that (NCCL, Triton's kernels as they are loaded). The host has no such memory: nothing."""
        return

    def has_fast_bf16(self) -> bool:
        """Whether PyTorch computes bf16 fast."""
        ...

    def carriers(self, device: torch.device) -> Callable[[], Carrier]:
        """What each thread that copies to `device` makes its way with; called by the thread whose device it is."""
        ...

    def free_buffers(self) -> None:
        """Lets go of the memory of carriers' buffers, where torch keeps it: else nothing."""
        return

    def event(self) -> DeviceEvent:
        """One of this thread's device, that has happened until it is recorded."""
        ...


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` there, in memory of its own, once what is in the stream has run; waits for none of it.

    A copy out of memory that is not pinned waits for everything that the stream has to do, the steps before
    included. torch keeps the pinned copy until the device has read it.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)
