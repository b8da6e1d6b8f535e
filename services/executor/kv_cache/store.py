"""One rank's share of the KV cache: its heads' keys and values, under the ring's block ids.

    ids     [0, num_hot)                     hot: as the model computes them, can be written to
            [num_hot, num_hot + num_cold)    cold: full, compressed after their layer's codec
    hot     per layer [num_hot, 2, kv_heads, block_size, head_dim]      2: key, value
                       └─ block    └─ head    └─ tokens of one head
    cold    codes  [layers, num_cold, 2, kv_heads, block_size, head_dim]    of the layers that share a codec
            scales [layers, num_cold, 2, kv_heads] float32                  value = code * scale
    slot    block id * block_size + offset in the block

A block of a layer is one contiguous run of bytes; so are the tokens of one head in it, which is what
attention reads. The tensors of the layers never move: kernels may hold pointers to them.
Who owns which block is decided by the leader's allocator alone; the store only reads and writes.
Source: Kwon et al., "PagedAttention", https://arxiv.org/abs/2309.06180.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from services.executor.kv_cache.capacity import StoreShape
from services.executor.kv_cache.codecs import Codec

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


_COMPRESS_BYTES = 16 << 20
"""Working memory of a compression, about: more blocks are compressed one part after the other."""


class KvStore:
    """Keys and values of one rank's heads, all layers. Not thread-safe: one step at a time."""

    def __init__(self, shape: StoreShape, num_hot: int, device: torch.device, num_cold: int = 0):
        self.shape = shape
        self.num_hot = num_hot
        self.num_cold = num_cold
        self.device = device
        self._hot = zeros(
            (shape.num_layers, num_hot, 2, shape.kv_heads, shape.block_size, shape.head_dim),
            shape.dtype,
            device,
        )
        layers = range(shape.num_layers)
        codecs = {layer: shape.codec(layer) for layer in layers}
        self._cold = [
            ColdBlocks(shape, [layer for layer in layers if codecs[layer] is codec], codec, num_cold, device)
            for codec in dict.fromkeys(codecs.values())
        ]
        self._places = {layer: (cold, at) for cold in self._cold for at, layer in enumerate(cold.layers)}
        heads = torch.arange(2 * shape.kv_heads, dtype=torch.int64, device=device)
        self._heads = heads.view(2, 1, shape.kv_heads, 1)
        self._scratch = torch.empty(0, dtype=shape.dtype, device=device)
        self.compressor: Callable[[NDArray[np.int32]], None] | None = None
        """Compresses pairs int32 [C, 2] in place of PyTorch, to the same codes; None: PyTorch does."""

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def num_blocks(self) -> int:
        return self.num_hot + self.num_cold

    @property
    def nbytes(self) -> int:
        """Bytes of address space; on a CPU, memory is taken only as blocks are first written."""
        return self._hot.nbytes + sum(cold.nbytes for cold in self._cold)

    # --- what kernels read -----------------------------------------------------------------------

    def hot(self, layer: int) -> Tensor:
        """Model dtype [num_hot, 2, kv_heads, block_size, head_dim], contiguous, at one address for ever."""
        return self._hot[layer]

    def hot_layers(self) -> Tensor:
        """`hot` of all layers: [num_layers, num_hot, 2, kv_heads, block_size, head_dim]."""
        return self._hot

    def cold_layers(self) -> list[ColdBlocks]:
        """The cold blocks, of the layers that share a codec each."""
        return self._cold

    def codec(self, layer: int) -> Codec | None:
        """How `layer` compresses its cold blocks; None: it keeps them as they are."""
        return self.shape.codec(layer)

    def codes(self, layer: int) -> Tensor:
        """The codec's dtype (without one: model dtype) [num_cold, 2, kv_heads, block_size, head_dim], as `hot`."""
        cold, position = self._places[layer]
        return cold.codes[position]

    def scales(self, layer: int) -> Tensor | None:
        """float32 [num_cold, 2, kv_heads], as `hot`: value = code * scale. None without a codec."""
        cold, position = self._places[layer]
        return None if cold.scales is None else cold.scales[position]

    # --- steps -----------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] of `layer` at `slots` int64 [T] of hot blocks.

        Raises IndexError (on a GPU: fails an assertion there) for a slot of a block that is not hot.
        """
        size = self.shape.block_size
        blocks = slots.div(size, rounding_mode="floor")
        self._hot[layer].flatten(1, 2)[blocks, :, slots - blocks * size] = torch.cat((key, value), dim=1)

    def compress_layer(self, layer: int, hot: Tensor, cold: Tensor) -> None:
        """Copies the blocks `hot` to the blocks `cold`, int64 [C] each, in one layer, after its codec.

        Raises IndexError (on a GPU: fails an assertion there) for an id that is none.
        """
        compressed, position = self._places[layer]
        compressed.put(self._hot[layer].index_select(0, hot).unsqueeze(0), cold - self.num_hot, position)

    def gather(self, layer: int, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks`, hot or cold: an int64 [sequences * B] of block tables padded to B blocks.

        Returns contiguous views [sequences, kv_heads, B * block_size, head_dim], model dtype, into a buffer
        that the next call overwrites. Raises IndexError (on a GPU: fails an assertion there) for an id that
        is none.
        """
        shape = self.shape
        tables = blocks.view(1, sequences, 1, -1)
        rows = (tables * (2 * shape.kv_heads) + self._heads).flatten()
        out = self._buffer(rows.shape[0], shape.block_size * shape.head_dim)
        self._read(layer, rows, out)
        both = out.view(2, sequences, shape.kv_heads, -1, shape.head_dim)
        return both[0], both[1]

    def compress(self, pairs: ArrayLike) -> None:
        """As `compress_layer`, in all layers. The hot ones stay as they are.

        `pairs`: integers [C, 2], (hot id, cold id) each. Raises ValueError for ids that are not.
        """
        blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        self.check_pairs(blocks)
        if self.compressor is not None:
            self.compressor(blocks.astype(np.int32))
            return
        per_block = self.shape.num_layers * self.shape.values_per_block * torch.float32.itemsize
        for start in range(0, len(blocks), count := max(1, _COMPRESS_BYTES // per_block)):
            hot, cold = torch.from_numpy(blocks[start : start + count].T.copy()).to(self.device)
            for layers in self._cold:
                layers.put(self._hot_of(layers.layers, hot), cold - self.num_hot)

    # --- spilling --------------------------------------------------------------------------------

    def block_bytes(self, block: int) -> int:
        """Length of what `save` returns. Raises ValueError when there is no such block."""
        return sum(part.nbytes for part in self._parts(block))

    def save(self, block: int) -> bytes:
        """`block` in all layers, codes and scales as they are. Raises ValueError when there is no such block.

        The bytes mean something only to a store of the same shape, for a block that is hot or cold alike.
        """
        return b"".join(_raw(part.contiguous()).cpu().numpy().tobytes() for part in self._parts(block))

    def load(self, block: int, content: bytes | bytearray) -> None:
        """Puts what `save` has returned into `block`. Raises ValueError when it does not fit, and changes nothing."""
        expected = self.block_bytes(block)
        if len(content) != expected:
            raise ValueError(f"KV block {block} has {expected} bytes and was given {len(content)}")
        start = 0
        for part in self._parts(block):
            own = np.frombuffer(content, dtype=np.uint8, count=part.nbytes, offset=start).copy()
            part.copy_(torch.from_numpy(own).view(part.dtype).view(part.shape))
            start += part.nbytes

    def pack(self, blocks: Tensor) -> Tensor:
        """Blocks in their last format, `blocks` int64 [n] on the store's device (cold ones where there are any), as
        `save` has them: uint8 [n, bytes of each]. Does not wait for the device."""
        rows = [
            whole.index_select(1, blocks - self._first_whole).transpose(0, 1).flatten(1)
            for whole in self._wholes()
        ]
        return torch.cat(rows, dim=1)

    def unpack(self, blocks: Tensor, packed: Tensor) -> None:
        """Puts `packed`, which `pack` has made, into `blocks`. Does not wait for the device."""
        start = 0
        for whole in self._wholes():
            layers, _, *rest = whole.shape
            end = start + layers * math.prod(rest)
            part = packed[:, start:end].reshape(-1, layers, *rest).transpose(0, 1)
            whole.index_copy_(1, blocks - self._first_whole, part)
            start = end

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _first_whole(self) -> int:
        """The first id of the blocks that have their last format."""
        return self.num_hot if self.num_cold else 0

    def _wholes(self) -> list[Tensor]:
        """All bytes of these blocks, in the order in which a block is saved: each [layers, blocks, 2, ...]."""
        if not self.num_cold:
            return [_raw(self._hot)]
        return [_raw(whole) for cold in self._cold for whole in cold.wholes()]

    def _read(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Fills `out` [n, block_size * head_dim] with `rows` int64 [n]: (block * 2 + key/value) * kv_heads + head."""
        hot = self._hot[layer].view(-1, out.shape[1])
        at_hot = (rows < hot.shape[0]).nonzero().squeeze(1) if self.num_cold else rows
        if at_hot.shape[0] == rows.shape[0]:
            torch.index_select(hot, 0, rows, out=out)
            return
        # Most of a long context is cold: what is not is written over some row that was decoded in its place.
        cold, position = self._places[layer]
        cold.read(position, (rows - hot.shape[0]).clamp_min_(0), out)
        out.index_copy_(0, at_hot, hot.index_select(0, rows.index_select(0, at_hot)))

    def _hot_of(self, layers: tuple[int, ...], blocks: Tensor) -> Tensor:
        """A copy of hot `blocks` int64 [n] of `layers`: [layers, n, 2, kv_heads, block_size, head_dim]."""
        first = torch.tensor(layers, device=self.device).unsqueeze(1) * self.num_hot
        chosen = self._hot.flatten(0, 1).index_select(0, (first + blocks).flatten())
        return chosen.view(len(layers), -1, *self._hot.shape[2:])

    def _parts(self, block: int) -> list[Tensor]:
        """Views of all that `block` consists of."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"there is no KV block {block}: there are {self.num_blocks}")
        if block < self.num_hot:
            return [self._hot[:, block]]
        return [part for cold in self._cold for part in cold.parts(block - self.num_hot)]

    def check_pairs(self, pairs: NDArray[np.integer[Any]]) -> None:
        """Raises ValueError unless `pairs` [C, 2] are each of a hot and a cold block, no cold one twice."""
        hot, cold = pairs[:, 0], pairs[:, 1]
        if ((hot < 0) | (hot >= self.num_hot)).any():
            raise ValueError(f"of the blocks {hot.tolist()} not all are hot: there are {self.num_hot}")
        if ((cold < self.num_hot) | (cold >= self.num_blocks)).any():
            raise ValueError(
                f"of the blocks {cold.tolist()} not all are cold: those are {self.num_hot} to {self.num_blocks - 1}"
            )
        if len(np.unique(cold)) != len(cold):
            raise ValueError(f"of the cold blocks {cold.tolist()} some are written twice")

    def _buffer(self, rows: int, width: int) -> Tensor:
        # Kept between calls: fresh pages from the system for each gather cost more than the gather.
        if self._scratch.numel() < rows * width:
            self._scratch = torch.empty(rows * width, dtype=self.shape.dtype, device=self.device)
        return self._scratch[: rows * width].view(rows, width)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
