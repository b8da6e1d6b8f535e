"""What makes a rank on a GPU watchable: everything that the board needs to know of its device."""

from uuid import UUID

import torch

from services.executor.board import RankBoard
from services.executor.gpu.compiling import excuse_compiling
from services.executor.gpu.marks import CudaMarks


def watch_device(board: RankBoard, device: torch.device) -> None:
    """From now on `board` says which GPU the rank computes on, and counts what that has done. To be called once,
    before the first step, by the rank whose board it is."""
    board.gpu.write(uuid_of(torch.cuda.get_device_properties(device).uuid))
    board.follow_device(CudaMarks(device)).start()
    excuse_compiling(board.recorder.excuse)


def uuid_of(told: object) -> bytes:
    """The 16 bytes of what torch tells, written plainly or as NVIDIA's tools write it."""
    return UUID(str(told).removeprefix("GPU-").removeprefix("MIG-")).bytes
