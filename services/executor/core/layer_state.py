"""What each layer of a model keeps of a sequence, as data.

    kind       in KV blocks, for every token                      in the sequence's slot
    full       a key and a value per KV head                      -
    sliding    the same; tokens beyond the window are not read    -
    others     pages of other shapes, or none                     tensors of one size

The others are declared in `model/states/`. Blocks grow with a sequence, a slot does not. Which sequence has which is
the leader's to decide, alike for every kind (`kv_cache/allocator.py`); how many bytes they take follows from here
(`kv_cache/capacity.py`).
"""

import math
from collections import Counter

import msgspec


class Pages(msgspec.Struct, frozen=True):
    """Lines of one layer in KV blocks, of one rank: a block of them is [parts, heads, lines, width]."""

    # 2: keys and values, where their widths differ both as wide as the wider one, the other padded with zeros;
    # 1: one line for both, or an indexer's key.
    parts: int
    heads: int
    width: int
    # Of which one line is made. It stands in the block of the last of them, so that blocks of the same text are the
    # same whatever follows.
    tokens: int = 1
    # Whether its line is the mean and the deviation of a block's keys (`sparse_attention.py`): never compressed.
    summary: bool = False

    def lines(self, block_size: int) -> int:
        """In one block: of tokens that fill several blocks one in each, which only the last of them uses."""
        return max(1, block_size // self.tokens)

    def values_per_block(self, block_size: int) -> int:
        return self.parts * self.heads * self.width * self.lines(block_size)

    @property
    def rows(self) -> int:
        """Rows of a block that share a scale each where it is compressed."""
        return self.parts * self.heads


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a sequence's slot, of one rank."""

    name: str
    shape: tuple[int, ...]
    fp32: bool = True  # whether it is float32 whatever the model's dtype is

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class LayerState(msgspec.Struct, frozen=True):
    """What one layer keeps."""

    kind: str = "full"
    pages: tuple[Pages, ...] = ()
    slot: tuple[StateTensor, ...] = ()
    reads: int | None = None  # the layer whose pages it reads, where it has none of its own


LayerStates = tuple[LayerState, ...]  # of all layers of a model, in their order


def attention(heads: int, width: int, kind: str = "full") -> LayerState:
    """Keys and values of `heads` KV heads, `width` values each."""
    return LayerState(kind, (Pages(2, heads, width),))


def described(states: LayerStates) -> str:
    """For people: how many layers keep what, such as `6 recurrent (slot of 2400 values), 2 full (2x3x64)`, with parts,
    heads and width of their pages."""
    counts = Counter((state.kind, _described(state)) for state in states)
    return ", ".join(f"{count} {kind}{keeps}" for (kind, keeps), count in counts.items())


def _described(state: LayerState) -> str:
    keeps = [f"{pages.parts}x{pages.heads}x{pages.width}" for pages in state.pages]
    if state.slot:
        keeps.append(f"slot of {sum(tensor.size for tensor in state.slot)} values")
    return f" ({' and '.join(keeps)})" if keeps else ""


def page_layers(states: LayerStates) -> tuple[Pages, ...]:
    """The pages of all layers, end to end: the store's page layers."""
    return tuple(pages for state in states for pages in state.pages)


def page_of(states: LayerStates, layer: int) -> int:
    """The first page layer that `layer` reads: its own, or that of the layer that it shares with."""
    state = states[layer]
    if state.reads is not None:
        return page_of(states, state.reads)
    return sum(len(before.pages) for before in states[:layer])


def slot_of(states: LayerStates, layer: int) -> int:
    """Which of the layers with a slot `layer` is."""
    return sum(bool(before.slot) for before in states[:layer])


def choosing_pages(states: LayerStates) -> tuple[int, ...]:
    """The page layers of attention that sees all tokens before it, of which a request may choose to read some."""
    return tuple(
        page_of(states, layer)
        for layer, state in enumerate(states)
        if state.kind == "full" and [pages.parts for pages in state.pages] == [2]
    )


def layer_of_pages(states: LayerStates) -> tuple[int, ...]:
    """Of each page layer the layer that it belongs to."""
    return tuple(layer for layer, state in enumerate(states) for _ in state.pages)
