"""What one rank's KV store holds of a block and of a slot: the sizes of all that follows from the model and settings.

    block   of each page layer [parts, heads, lines, width]     writable: the model's dtype; quantized: after its codec
    slot    of each layer with recurrent state its tensors      float32 or the model's dtype

Snapshots of slots are kept in full blocks, as many as their bytes take.
"""

from dataclasses import dataclass, replace

import torch

from services.executor.core.layer_state import Pages, StateTensor
from services.executor.kv_cache.block_memory import CACHE_LINE
from services.executor.kv_cache.code_groups import fits_groups
from services.executor.kv_cache.codecs import Codec
from shared.errors import ConfigurationError

FORMAT_VERSION = 1  # of the bytes of a block: a release that lays them out in another way raises it


@dataclass(frozen=True)
class StoreShape:
    """What decides the size of one rank's store."""

    block_size: int
    dtype: torch.dtype
    pages: tuple[Pages, ...]  # of each page layer
    # How each page layer compresses its quantized blocks, None: not; empty: none does.
    codecs: tuple[Codec | None, ...] = ()
    # What a sequence's slot holds, layer by layer; empty: the model keeps no recurrent state.
    slot: tuple[tuple[StateTensor, ...], ...] = ()
    # Page layers of which a request may choose what is read (`core/sparse_attention.py`).
    choosing: tuple[int, ...] = ()
    # Whether full blocks lie in a mapped file, all but their scales and summaries (`block_memory.py`).
    is_mapped: bool = False
    # Whether codes are in groups where they can be (`code_groups.py`).
    in_groups: bool = False

    def __post_init__(self) -> None:
        if len(self.codecs) not in (0, self.num_layers):
            raise ValueError(f"{len(self.codecs)} codecs were given for {self.num_layers} layers")
        for tokens in {pages.tokens for pages in self.pages}:
            if tokens % self.block_size and self.block_size % tokens:
                raise ConfigurationError(
                    f"The model keeps one line for every {tokens} tokens, and neither do they make whole KV blocks of "
                    f"{self.block_size} tokens nor do blocks make whole lines; set RYZANSTEIN_BLOCK_SIZE to {tokens}."
                )

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        codecs: tuple[Codec | None, ...] = (),
    ) -> "StoreShape":
        """Of a model whose layers all keep keys and values of `kv_heads` heads (this rank's), `head_dim` wide."""
        return cls(block_size, dtype, (Pages(2, kv_heads, head_dim),) * num_layers, codecs)

    def with_summaries(self) -> "StoreShape":
        """The same, and a further page layer for each of `choosing`, in their order, behind all others: the mean and
        the deviation of each block's keys."""
        own = [self.pages[page] for page in self.choosing]
        summaries = tuple(Pages(2, pages.heads, pages.width, self.block_size, summary=True) for pages in own)
        codecs = (*self.codecs, *(None for _ in summaries)) if self.codecs else ()
        return replace(self, pages=(*self.pages, *summaries), codecs=codecs)

    def summary_of(self, page: int) -> int | None:
        """The page layer with the summaries of page layer `page`; None: it has none."""
        summaries = [at for at, pages in enumerate(self.pages) if pages.summary]
        return summaries[self.choosing.index(page)] if summaries and page in self.choosing else None

    def part(self, first: int, count: int, *, slots: bool = False) -> "StoreShape":
        """The page layers [first, first + count); `slots`: with those of recurrent state."""
        own = slice(first, first + count)
        choosing = tuple(page - first for page in self.choosing if first <= page < first + count)
        return replace(
            self, pages=self.pages[own], codecs=self.codecs[own], slot=self.slot if slots else (), choosing=choosing
        )

    def followed_by(self, pages: tuple[Pages, ...], codec: Codec | None) -> "StoreShape":
        """The same, and behind it further page layers, of another model."""
        codecs = (*(self.codec(layer) for layer in range(self.num_layers)), *(codec for _ in pages))
        return replace(self, pages=(*self.pages, *pages), codecs=codecs)

    @property
    def num_layers(self) -> int:
        """Page layers."""
        return len(self.pages)

    @property
    def is_uniform(self) -> bool:
        """Whether all page layers but summaries are keys and values of one shape, of each token."""
        pages = {pages for pages in self.pages if not pages.summary}
        return len(pages) == 1 and all(one.parts == 2 and one.tokens == 1 for one in pages)

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank, of a store that is uniform."""
        return self._only.heads

    @property
    def head_dim(self) -> int:
        return self._only.width

    @property
    def _only(self) -> Pages:
        if not self.is_uniform:
            raise ValueError("the page layers differ")
        return self.pages[0]

    @property
    def compresses(self) -> bool:
        return any(codec is not None for codec in self.codecs)

    @property
    def moves_full_blocks(self) -> bool:
        """Whether full blocks are copied to ids of their own (quantized): compressed, or, as they are, to a mapped file
        or because snapshots of slots lie among them, whose bytes must never be read as keys and values of a block that
        is partly written."""
        return self.compresses or self.slot_bytes > 0 or self.is_mapped

    def codec(self, layer: int) -> Codec | None:
        return self.codecs[layer] if self.codecs else None

    def is_in_groups(self, layer: int) -> bool:
        """Whether the codes of a block's head are in the order of `code_groups.py`, not in that of its tokens."""
        return self.in_groups and fits_groups(self.pages[layer], self.codec(layer), self.block_size)

    @property
    def values_per_block(self) -> int:
        """Values of one block over all page layers."""
        return sum(pages.values_per_block(self.block_size) for pages in self.pages)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's slot; 0: there are none. Tensors begin at multiples of 64."""
        return sum(state_bytes(tensor, self.dtype) for layer in self.slot for tensor in layer)

    @property
    def format(self) -> str:
        """What a full block's bytes mean: stores of one format can read each other's."""
        codecs = ",".join(map(self._described_codec, range(len(self.codecs))))
        described = codecs if self.compresses else ""
        if self.is_uniform and not self.slot and not any(pages.summary for pages in self.pages):
            sizes = (self.num_layers, self.block_size, self.kv_heads, self.head_dim)
            return f"{FORMAT_VERSION}:{sizes}:{self.dtype}:{described}"
        pages = ",".join(_described(pages) for pages in self.pages)
        slot = ";".join(
            ",".join(f"{'x'.join(map(str, tensor.shape))}{'f' * tensor.fp32}" for tensor in layer)
            for layer in self.slot
        )
        return f"{FORMAT_VERSION}:{self.block_size}:{pages}:{self.dtype}:{described}:{slot}"

    @property
    def numerics(self) -> str:
        """`format` but for the order of codes: what the results of attention depend on."""
        return replace(self, in_groups=False).format

    def _described_codec(self, layer: int) -> str:
        codec = self.codec(layer)
        return "-" if codec is None else codec.name + " in groups" * self.is_in_groups(layer)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one writable block over all layers."""
        return self.values_per_block * self.dtype.itemsize

    @property
    def bytes_per_quantized_block(self) -> int:
        """Bytes of one quantized block over all layers, scales included."""
        return sum(self.quantized_bytes(page) for page in range(self.num_layers))

    @property
    def bytes_per_mapped_block(self) -> int:
        """Of them, those that lie in the file where full blocks are mapped."""
        return sum(self.mapped_bytes(page) for page in range(self.num_layers))

    @property
    def bytes_per_spilled_block(self) -> int:
        """Bytes of a full block over all layers in its last format, in which it is spilled."""
        return self.bytes_per_quantized_block if self.moves_full_blocks else self.bytes_per_block

    @property
    def blocks_per_snapshot(self) -> int:
        """Full blocks that the bytes of a slot take; other ranks may need more."""
        return -(-self.slot_bytes // self.bytes_per_spilled_block)

    def quantized_bytes(self, page: int) -> int:
        """Bytes of one quantized block in page layer `page`, scales included."""
        pages, codec = self.pages[page], self.codec(page)
        values = pages.values_per_block(self.block_size)
        if codec is None:
            return values * self.dtype.itemsize
        return values * codec.dtype.itemsize + pages.rows * torch.float32.itemsize

    def mapped_bytes(self, page: int) -> int:
        """Bytes of one full block in page layer `page` that lie in the file."""
        pages, codec = self.pages[page], self.codec(page)
        itemsize = (self.dtype if codec is None else codec.dtype).itemsize
        return pages.values_per_block(self.block_size) * itemsize if self.is_mapped and not pages.summary else 0


def _described(pages: Pages) -> str:
    """In a store's format."""
    shape = f"{pages.parts}x{pages.heads}x{pages.width}"
    return shape if pages.tokens == 1 and not pages.summary else f"{shape}/{pages.tokens}{'s' * pages.summary}"


def state_bytes(tensor: StateTensor, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in a slot, of a model in `dtype`."""
    itemsize = torch.float32.itemsize if tensor.fp32 else dtype.itemsize
    return -(-tensor.size * itemsize // CACHE_LINE) * CACHE_LINE
