"""One rank's share of the KV cache: what its layers keep of every token, under the ring's block ids.

    ids        [0, num_writable)          writable: as the model computes them, can be written to
               the num_quantized behind   quantized: full, by their layer's codec, as they are where it has none; and
                                          snapshots of slots
    writable   of page layers that are alike [layers, num_writable, parts, heads, lines, width]
                                                      └─ block             └─ of one head: block_size, of each token one
    quantized  codes  of those that share a codec too [layers, num_quantized, parts, heads, lines, width]
               scales [layers, num_quantized, parts, heads] float32        value = code * scale
               the codes of a head are in the order of tokens, or in groups (code_groups.py)
    slot       block id * block_size + offset in the block

A page layer is what one layer of the model keeps for every token (`core/layer_state.py`): mostly keys and values, two
parts. A block of a page layer is one contiguous run of bytes; so are the tokens of one head in it, which is what
attention reads. The tensors never move: kernels may hold pointers to them.
Who owns which block is decided by the leader's allocator alone; the store only reads and writes.
Source: Kwon et al., "PagedAttention", https://arxiv.org/abs/2309.06180.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from services.executor.core.layer_state import Pages
from services.executor.kv_cache.block_memory import MappedFiles, zeros
from services.executor.kv_cache.code_groups import from_groups, to_groups
from services.executor.kv_cache.codecs import Codec
from services.executor.kv_cache.store_shape import StoreShape, state_bytes


class QuantizedBlocks:
    """Quantized blocks of some page layers of a store, alike in shape. Its tensors never move."""

    def __init__(
        self,
        layers: Sequence[int],
        pages: Pages,
        shape: StoreShape,
        codec: Codec | None,
        num_quantized: int,
        device: torch.device,
        files: MappedFiles | None = None,
    ) -> None:
        """`files`: where the codes of keys and values lie; None: in memory."""
        self.layers = tuple(layers)
        self.codec = codec
        rows = (len(layers), num_quantized, pages.parts, pages.heads)
        dtype = shape.dtype if codec is None else codec.dtype
        size = (*rows, pages.lines(shape.block_size), pages.width)
        self.is_mapped = files is not None and not pages.summary and 0 not in size
        mapped = files if self.is_mapped else None
        self.codes = zeros(size, dtype, device) if mapped is None else mapped.zeros(size, dtype)
        self.scales = None if codec is None else zeros(rows, torch.float32, device)
        self.in_groups = shape.is_in_groups(self.layers[0])
        self._heads, self._block_size = pages.heads, shape.block_size

    def part(self, first: int, count: int) -> "QuantizedBlocks | None":
        """Those of the store's page layers [first, first + count), counted from `first`, in the same memory; None:
        there are none here."""
        own = _places(self.layers, first, count)
        if own is None:
            return None
        part = copy(self)
        part.layers = tuple(layer - first for layer in self.layers[own])
        part.codes = self.codes[own]
        part.scales = None if self.scales is None else self.scales[own]
        return part

    @property
    def nbytes(self) -> int:
        """In memory."""
        codes = 0 if self.is_mapped else self.codes.nbytes
        return codes + (0 if self.scales is None else self.scales.nbytes)

    def put(self, values: Tensor, blocks: Tensor, first: int = 0) -> None:
        """Compresses `values` [layers, n, parts, heads, lines, width], of the layers from `layers[first]` on,
        into `blocks` int64 [n] (from 0)."""
        own = slice(first, first + len(values))
        if self.codec is None or self.scales is None:
            self.codes[own].index_copy_(1, blocks, values)
            return
        codes, scales = self.codec.encode(values.flatten(-2))
        if self.in_groups:
            codes = to_groups(codes, self._block_size)
        # index_copy_ knows no eight-bit floats; bytes are bytes.
        as_bytes = self.codes[own].view(torch.int8)
        as_bytes.index_copy_(1, blocks, codes.view(torch.int8).view(*codes.shape[:-1], *as_bytes.shape[-2:]))
        self.scales[own].index_copy_(1, blocks, scales)

    def read(self, position: int, rows: Tensor, out: Tensor) -> None:
        """Fills `out` [n, lines * width] from layer `layers[position]`.

        `rows` int64 [n]: (block * parts + part) * heads + head.
        """
        codes = self.codes[position].view(-1, out.shape[1])
        if self.codec is None or self.scales is None:
            torch.index_select(codes, 0, rows, out=out)
            return
        scales, chosen = self.scales[position].view(-1).index_select(0, rows), codes.index_select(0, rows)
        if self.in_groups:
            chosen = from_groups(chosen, rows.div(self._heads, rounding_mode="floor") % 2, self._block_size)
        out.copy_(self.codec.decode(chosen, scales))

    def wholes(self) -> list[Tensor]:
        """What blocks consist of, in the order in which they are saved."""
        return [self.codes] if self.scales is None else [self.codes, self.scales]


# Working memory of a compression, about: more blocks are compressed one part after the other.
_COMPRESS_BYTES = 16 << 20


class _Layers(NamedTuple):
    """Page layers that are alike."""

    layers: tuple[int, ...]
    pages: Pages
    writable: Tensor
    rows: Tensor  # int64 [parts, 1, heads, 1]: the row of each head and part in a block

    @classmethod
    def make(
        cls, layers: Sequence[int], pages: Pages, shape: StoreShape, num_writable: int, device: torch.device
    ) -> "_Layers":
        size = (len(layers), num_writable, pages.parts, pages.heads, pages.lines(shape.block_size), pages.width)
        rows = torch.arange(pages.rows, dtype=torch.int64, device=device).view(pages.parts, 1, pages.heads, 1)
        return cls(tuple(layers), pages, zeros(size, shape.dtype, device), rows)

    def part(self, first: int, count: int) -> "_Layers | None":
        """As `QuantizedBlocks.part`."""
        own = _places(self.layers, first, count)
        if own is None:
            return None
        return self._replace(layers=tuple(layer - first for layer in self.layers[own]), writable=self.writable[own])


def _places(layers: Sequence[int], first: int, count: int) -> slice | None:
    """Where those of [first, first + count) are in `layers`, which ascend; None: nowhere."""
    places = [at for at, layer in enumerate(layers) if first <= layer < first + count]
    return slice(places[0], places[-1] + 1) if places else None


class KvStore:
    """What the layers of one rank keep. Not thread-safe: one step at a time."""

    def __init__(
        self,
        shape: StoreShape,
        num_writable: int,
        device: torch.device,
        num_quantized: int = 0,
        num_slots: int = 0,
        held: "tuple[list[_Layers], list[QuantizedBlocks]] | None" = None,
        files: MappedFiles | None = None,
    ):
        """`held`: another store's tensors, for `part`. `files`: where full blocks lie, on a CPU; None: in memory.
        Raises `ConfigurationError` where there is no room for them."""
        self.shape = shape
        self._files = files
        self.num_writable = num_writable
        self.num_quantized = num_quantized
        self.device = device
        self._groups, self._quantized = held or self._made()
        # Of each page layer those that are like it, and which of them it is.
        self._writable = {layer: (group, at) for group in self._groups for at, layer in enumerate(group.layers)}
        self._places = {
            layer: (quantized, at) for quantized in self._quantized for at, layer in enumerate(quantized.layers)
        }
        # The sequences' recurrent state; None where the model keeps none.
        self.states = StateStore(shape, num_slots, device) if shape.slot and held is None else None
        # Full blocks that a snapshot of a slot takes; more where another rank's takes more.
        self.blocks_per_snapshot = shape.blocks_per_snapshot if shape.slot else 0
        self._scratch = torch.empty(0, dtype=shape.dtype, device=device)
        self.dtype = shape.dtype  # of what is written and gathered
        # Compresses pairs int32 [C, 2] in place of PyTorch, to the same codes; None: PyTorch does.
        self.compressor: Callable[[NDArray[np.int32]], None] | None = None

    def _made(self) -> tuple[list[_Layers], list[QuantizedBlocks]]:
        groups, quantized, shape = [], [], self.shape
        for pages in dict.fromkeys(shape.pages):
            layers = [layer for layer, other in enumerate(shape.pages) if other == pages]
            groups.append(_Layers.make(layers, pages, shape, self.num_writable, self.device))
            codecs = {layer: shape.codec(layer) for layer in layers}
            for codec in dict.fromkeys(codecs.values()):
                alike = [layer for layer in layers if codecs[layer] is codec]
                quantized.append(
                    QuantizedBlocks(alike, pages, shape, codec, self.num_quantized, self.device, self._files)
                )
        return groups, quantized

    def part(self, first: int, count: int, *, slots: bool = False, dtype: torch.dtype | None = None) -> "KvStore":
        """The page layers [first, first + count) as a store in the same memory, for one of the models that share
        blocks. `slots`: with those of recurrent state; `dtype`: of what that model computes; None: as is kept."""
        groups = [own for group in self._groups if (own := group.part(first, count)) is not None]
        quantized = [part for blocks in self._quantized if (part := blocks.part(first, count)) is not None]
        shape = self.shape.part(first, count, slots=slots)
        store = KvStore(shape, self.num_writable, self.device, self.num_quantized, held=(groups, quantized))
        store.dtype = dtype or self.dtype
        if slots:
            store.states, store.blocks_per_snapshot = self.states, self.blocks_per_snapshot
        return store

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def num_blocks(self) -> int:
        return self.num_writable + self.num_quantized

    @property
    def nbytes(self) -> int:
        """Bytes of address space without what is mapped; on a CPU, memory is taken only as blocks are first
        written."""
        writable = sum(group.writable.nbytes for group in self._groups)
        slots = 0 if self.states is None else self.states.nbytes
        return writable + sum(quantized.nbytes for quantized in self._quantized) + slots

    # --- what kernels read -----------------------------------------------------------------------

    def writable(self, layer: int) -> Tensor:
        """Model dtype [num_writable, parts, heads, lines, width], contiguous, at one address for ever."""
        group, at = self._writable[layer]
        return group.writable[at]

    def writable_layers(self) -> Tensor:
        """`writable` of all layers of a uniform store but summaries: [layers, num_writable, 2, kv_heads, block_size,
        head_dim]."""
        (group,) = (group for group in self._groups if not group.pages.summary)
        return group.writable

    def quantized_layers(self) -> list[QuantizedBlocks]:
        """The quantized blocks, of the layers that share a codec each."""
        return self._quantized

    def codec(self, layer: int) -> Codec | None:
        """How `layer` compresses its quantized blocks; None: it keeps them as they are."""
        return self.shape.codec(layer)

    def codes(self, layer: int) -> Tensor:
        """The codec's dtype (without one: model dtype) [num_quantized, parts, heads, lines, width], as `writable`."""
        quantized, position = self._places[layer]
        return quantized.codes[position]

    def scales(self, layer: int) -> Tensor | None:
        """float32 [num_quantized, parts, heads], as `writable`: value = code * scale. None without a codec."""
        quantized, position = self._places[layer]
        return None if quantized.scales is None else quantized.scales[position]

    def is_mapped(self, layer: int) -> bool:
        """Whether `codes` are in a file, and come to memory as they are read."""
        return self._places[layer][0].is_mapped

    # --- steps -----------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, *parts: Tensor) -> None:
        """Stores `parts` of `layer` (keys and values, or its one line), [T, heads, width] each or narrower, at `slots`
        int64 [T] of writable blocks: of a line that is made of several tokens, that of the last.

        Raises IndexError (on a GPU: fails an assertion there) for a slot of a block that is not writable.
        """
        size = self.shape.block_size
        group, at = self._writable[layer]
        width = group.pages.width
        lines = [part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1])) for part in parts]
        blocks = slots.div(size, rounding_mode="floor")
        within = slots - blocks * size
        if group.pages.tokens > 1:
            within = (within * group.pages.lines(size)).div(size, rounding_mode="floor")
        rows = lines[0] if len(lines) == 1 else torch.cat(lines, dim=1)
        group.writable[at].flatten(1, 2)[blocks, :, within] = rows.to(self.shape.dtype)

    def compress_layer(self, layer: int, writable: Tensor, quantized: Tensor) -> None:
        """Copies the blocks `writable` to the blocks `quantized`, int64 [C] each, in one layer, after its codec.

        Raises IndexError (on a GPU: fails an assertion there) for an id that is none.
        """
        compressed, position = self._places[layer]
        compressed.put(
            self.writable(layer).index_select(0, writable).unsqueeze(0), quantized - self.num_writable, position
        )

    def gather(self, layer: int, blocks: Tensor, sequences: int) -> Tensor:
        """Keys and values (or the one line) of `blocks`, writable or quantized: an int64 [sequences * B] of block
        tables padded to B blocks.

        Returns a view [parts, sequences, heads, B * lines, width], `self.dtype`, of a buffer that the next call
        overwrites. Raises IndexError (on a GPU: fails an assertion there) for an id that
        is none.
        """
        _, pages, _, part_rows = self._writable[layer][0]
        tables = blocks.view(1, sequences, 1, -1)
        rows = (tables * pages.rows + part_rows).flatten()
        out = self._buffer(rows.shape[0], pages.lines(self.shape.block_size) * pages.width)
        self._read(layer, rows, out)
        return out.view(pages.parts, sequences, pages.heads, -1, pages.width).to(self.dtype)

    def compress(self, pairs: ArrayLike) -> None:
        """As `compress_layer`, in all layers. The writable ones stay as they are.

        `pairs`: integers [C, 2], (writable id, quantized id) each. Raises ValueError for ids that are not.
        """
        blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        self.check_pairs(blocks)
        if self.compressor is not None:
            self.compressor(blocks.astype(np.int32))
            return
        per_block = self.shape.values_per_block * torch.float32.itemsize
        for start in range(0, len(blocks), count := max(1, _COMPRESS_BYTES // per_block)):
            writable, quantized = torch.from_numpy(blocks[start : start + count].T.copy()).to(self.device)
            for layers in self._quantized:
                layers.put(self._writable_of(layers.layers, writable), quantized - self.num_writable)

    # --- spilling --------------------------------------------------------------------------------

    def block_bytes(self, block: int) -> int:
        """Length of what `save` returns. Raises ValueError when there is no such block."""
        return sum(part.nbytes for part in self._parts(block))

    def save(self, block: int) -> bytes:
        """`block` in all layers, codes and scales as they are. Raises ValueError when there is no such block.

        The bytes mean something only to a store of the same shape, for a block that is writable or quantized alike.
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
        """Blocks in their last format, `blocks` int64 [n] on the store's device (quantized ones where there are any),
        as `save` has them: uint8 [n, bytes of each]. Does not wait for the device."""
        rows = [whole.index_select(1, blocks - self.first_whole).transpose(0, 1).flatten(1) for whole in self._wholes()]
        return torch.cat(rows, dim=1)

    def unpack(self, blocks: Tensor, packed: Tensor) -> None:
        """Puts `packed`, which `pack` has made, into `blocks`. Does not wait for the device."""
        start = 0
        for whole in self._wholes():
            layers, _, *rest = whole.shape
            end = start + layers * math.prod(rest)
            part = packed[:, start:end].reshape(-1, layers, *rest).transpose(0, 1)
            whole.index_copy_(1, blocks - self.first_whole, part)
            start = end

    def parts_of_pages(self) -> list[list[tuple[int, NDArray[np.uint8]]]]:
        """Of each page layer its parts of the blocks that have their last format, in host memory: where a part begins
        among the bytes of a block, as `save` has them, and uint8 [blocks, bytes], from `first_whole` on."""
        found: list[list[tuple[int, NDArray[np.uint8]]]] = [[] for _ in range(self.shape.num_layers)]
        start = 0
        for layers, whole in self._layers_of_wholes():
            for layer, blocks in zip(layers, whole.flatten(2).numpy(), strict=True):
                found[layer].append((start, blocks))
                start += blocks.shape[1]
        return found

    # --- slots -----------------------------------------------------------------------------------

    def save_states(self, snapshots: NDArray[np.int32]) -> None:
        """Puts the bytes of slots into full blocks: int32 [n, 1 + m], a slot and its m block ids each."""
        assert self.states is not None, "the model keeps no recurrent state"
        for slot, *blocks in snapshots.tolist():
            ids = torch.tensor(blocks, device=self.device)
            content = self.states.content(slot)
            width = self.shape.bytes_per_spilled_block
            room = content.new_zeros(len(blocks) * width)
            room[: content.shape[0]] = content
            self.unpack(ids, room.view(len(blocks), width))

    def load_states(self, snapshots: NDArray[np.int32]) -> None:
        """What `save_states` has put into blocks, back into slots."""
        assert self.states is not None, "the model keeps no recurrent state"
        for slot, *blocks in snapshots.tolist():
            content = self.states.content(slot)
            kept = self.pack(torch.tensor(blocks, device=self.device)).flatten()
            content.copy_(kept[: content.shape[0]])

    # --- parts -----------------------------------------------------------------------------------

    @property
    def first_whole(self) -> int:
        """The first id of the blocks that have their last format."""
        return self.num_writable if self.num_quantized else 0

    def _wholes(self) -> list[Tensor]:
        """All bytes of these blocks, in the order in which a block is saved: each [layers, blocks, parts, ...]."""
        return [whole for _, whole in self._layers_of_wholes()]

    def _layers_of_wholes(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The same, with the page layers of each."""
        if not self.num_quantized:
            return [(group.layers, _raw(group.writable)) for group in self._groups]
        return [(quantized.layers, _raw(whole)) for quantized in self._quantized for whole in quantized.wholes()]

    def _read(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Fills `out` [n, lines * width] with `rows` int64 [n]: (block * parts + part) * heads + head."""
        writable = self.writable(layer).view(-1, out.shape[1])
        at_writable = (rows < writable.shape[0]).nonzero().squeeze(1) if self.num_quantized else rows
        if at_writable.shape[0] == rows.shape[0]:
            torch.index_select(writable, 0, rows, out=out)
            return
        # Most of a long context is quantized: what is not is written over some row that was decoded in its place.
        quantized, position = self._places[layer]
        quantized.read(position, (rows - writable.shape[0]).clamp_min_(0), out)
        out.index_copy_(0, at_writable, writable.index_select(0, rows.index_select(0, at_writable)))

    def _writable_of(self, layers: tuple[int, ...], blocks: Tensor) -> Tensor:
        """A copy of writable `blocks` int64 [n] of `layers`, which are alike: [layers, n, parts, heads, lines,
        width]."""
        writable = self._writable[layers[0]][0].writable
        first = torch.tensor([self._writable[layer][1] for layer in layers], device=self.device).unsqueeze(1)
        chosen = writable.flatten(0, 1).index_select(0, (first * self.num_writable + blocks).flatten())
        return chosen.view(len(layers), -1, *writable.shape[2:])

    def _parts(self, block: int) -> list[Tensor]:
        """Views of all that `block` consists of."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"there is no KV block {block}: there are {self.num_blocks}")
        if block < self.num_writable:
            return [group.writable[:, block] for group in self._groups]
        return [whole[:, block - self.num_writable] for quantized in self._quantized for whole in quantized.wholes()]

    def check_pairs(self, pairs: NDArray[np.integer[Any]]) -> None:
        """Raises ValueError unless `pairs` [C, 2] are each of a writable and a quantized block, no quantized one
        twice."""
        writable, quantized = pairs[:, 0], pairs[:, 1]
        if ((writable < 0) | (writable >= self.num_writable)).any():
            raise ValueError(f"of the blocks {writable.tolist()} not all are writable: there are {self.num_writable}")
        if ((quantized < self.num_writable) | (quantized >= self.num_blocks)).any():
            raise ValueError(
                f"of the blocks {quantized.tolist()} not all are quantized: those are {self.num_writable} to "
                f"{self.num_blocks - 1}"
            )
        if len(np.unique(quantized)) != len(quantized):
            raise ValueError(f"of the quantized blocks {quantized.tolist()} some are written twice")

    def _buffer(self, rows: int, width: int) -> Tensor:
        # Kept between calls: fresh pages from the system for each gather cost more than the gather.
        if self._scratch.numel() < rows * width:
            self._scratch = torch.empty(rows * width, dtype=self.shape.dtype, device=self.device)
        return self._scratch[: rows * width].view(rows, width)


class StateStore:
    """One rank's recurrent state: a slot for each running sequence, and some for snapshots.

        slot    [ layer 0: convolution window | recurrent state || layer 1: ... ]     tensors from multiples of 64 bytes
        tensor  [num_slots, *shape], a view with the slot's bytes between one sequence's and the next one's

    Which sequence has which slot is the leader's to decide, as with blocks; the plan says where each of its sequences
    is. The tensors never move: kernels may hold pointers to them.
    """

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


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
