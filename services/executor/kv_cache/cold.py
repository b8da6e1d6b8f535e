"""The cold blocks of the layers that share a codec, as codes and scales (or as they were, without a codec).

codes    [layers, num_cold, 2, kv_heads, block_size, head_dim]
scales   [layers, num_cold, 2, kv_heads] float32                  value = code * scale
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.executor.kv_cache.codecs import Codec
from services.executor.kv_cache.sizes import StoreShape

_CACHE_LINE = 64
"""Where tensors begin in host memory, so that kernels load whole lines."""


class ColdBlocks:
    """Cold blocks of some layers of a store. Its tensors never move."""

    def __init__(
        self,
        shape: StoreShape,
        layers: Sequence[int],
        codec: Codec | None,
        num_cold: int,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.codec = codec
        heads = (len(layers), num_cold, 2, shape.kv_heads)
        dtype = shape.dtype if codec is None else codec.dtype
        self.codes = zeros((*heads, shape.block_size, shape.head_dim), dtype, device)
        self.scales = None if codec is None else zeros(heads, torch.float32, device)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def put(self, values: Tensor, blocks: Tensor, first: int = 0) -> None:
        """Compresses `values` [layers, n, 2, kv_heads, block_size, head_dim], of the layers from `layers[first]` on,
        into `blocks` int64 [n] (from 0)."""
        own = slice(first, first + len(values))
        if self.codec is None or self.scales is None:
            self.codes[own].index_copy_(1, blocks, values)
            return
        codes, scales = self.codec.encode(values.flatten(-2))
        # index_copy_ knows no eight-bit floats; bytes are bytes.
        as_bytes = self.codes[own].view(torch.int8)
        as_bytes.index_copy_(1, blocks, codes.view(torch.int8).view(*codes.shape[:-1], *as_bytes.shape[-2:]))
        self.scales[own].index_copy_(1, blocks, scales)

    def read(self, position: int, rows: Tensor, out: Tensor) -> None:
        """Fills `out` [n, block_size * head_dim] from layer `layers[position]`.

        `rows` int64 [n]: (block * 2 + key or value) * kv_heads + head.
        """
        codes = self.codes[position].view(-1, out.shape[1])
        if self.codec is None or self.scales is None:
            torch.index_select(codes, 0, rows, out=out)
            return
        scales = self.scales[position].view(-1).index_select(0, rows)
        out.copy_(self.codec.decode(codes.index_select(0, rows), scales))

    def wholes(self) -> list[Tensor]:
        """What blocks consist of, in the order in which they are saved."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    def parts(self, block: int) -> list[Tensor]:
        """Views of what `block` (from 0) consists of, in the same order."""
        return [whole[:, block] for whole in self.wholes()]


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what attention masks must still be finite: 0 * NaN is NaN."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which take no memory and no time until they are touched.
    nbytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(nbytes + _CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype).view(size)
