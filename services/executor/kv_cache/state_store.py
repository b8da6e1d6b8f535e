"""One rank's recurrent state: a slot for each running sequence, and some for snapshots.

    slot    [ layer 0: convolution window | recurrent state || layer 1: ... ]     tensors from multiples of 64 bytes
    tensor  [num_slots, *shape], a view with the slot's bytes between one sequence's and the next one's

Which sequence has which slot is the leader's to decide, as with blocks; the plan says where each of its sequences is.
"""

import numpy as np
import torch
from torch import Tensor

from services.executor.kv_cache.store_shape import CACHE_LINE, StoreShape, state_bytes


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what attention masks must still be finite: 0 * NaN is NaN."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which take no memory and no time until they are touched.
    nbytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(nbytes + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype).view(size)


class StateStore:
    """The slots. Their tensors never move: kernels may hold pointers to them."""

    def __init__(self, shape: StoreShape, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._raw = zeros((num_slots, shape.slot_bytes), torch.uint8, device)
        self._layers: list[dict[str, Tensor]] = []
        offset = 0
        for layer in shape.slot:
            tensors = {}
            for tensor in layer:
                dtype = torch.float32 if tensor.fp32 else shape.dtype
                end = offset + tensor.size * dtype.itemsize
                tensors[tensor.name] = self._raw[:, offset:end].view(dtype).view(num_slots, *tensor.shape)
                offset += state_bytes(tensor, shape.dtype)
            self._layers.append(tensors)

    @property
    def nbytes(self) -> int:
        return self._raw.nbytes

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return self._raw.shape[1]

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Of the `layer`-th of the layers that keep recurrent state, by name: [num_slots, *shape] each."""
        return self._layers[layer]

    def content(self, slot: int) -> Tensor:
        """A view of all bytes of `slot`: uint8 [slot bytes]."""
        return self._raw[slot]
