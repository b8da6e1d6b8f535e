"""One rank's share of the KV cache: its heads' keys and values, under the ring's block ids.

    layer   [num_blocks, 2, kv_heads, block_size, head_dim]      2: key, value
            └─ block ─┘    └─ head ─┘ └─ tokens of one head ─┘
    slot    block id * block_size + offset in the block

A block is one contiguous run of bytes; so are the tokens of one head in it, which is what attention reads.
The tensors of the layers never move: kernels may hold pointers to them.
Who owns which block is decided by the leader's allocator alone; the store only reads and writes.
Source: Kwon et al., "PagedAttention", https://arxiv.org/abs/2309.06180.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import ConfigurationError

DEFAULT_CPU_SHARE = 0.25
"""Share of the host's free memory that one rank's cache takes unless a budget is set."""
DEFAULT_GPU_UTILISATION = 0.9
"""Share of a GPU's memory that may be in use once the cache stands."""
DEFAULT_SEQUENCES = 64
"""Full-length sequences beyond which a CPU cache does not grow unless a budget is set."""


@dataclass(frozen=True)
class StoreShape:
    """What decides the size of one rank's store."""

    num_layers: int
    block_size: int
    kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        values = self.num_layers * self.block_size * 2 * self.kv_heads * self.head_dim
        return values * self.dtype.itemsize


def plan_num_blocks(
    bytes_per_block: int, block_size: int, context_length: int, budget_bytes: int, cap: int | None = None
) -> int:
    """Blocks that fit in `budget_bytes`, at most enough for `cap` sequences of `context_length` tokens.

    Pure. The ring uses the smallest answer of its ranks. Raises `ConfigurationError` when not even one
    sequence of full length fits.
    """
    per_sequence = -(-context_length // block_size)
    blocks = budget_bytes // bytes_per_block
    if blocks < per_sequence:
        raise ConfigurationError(
            f"The KV cache budget of {budget_bytes} bytes holds {blocks * block_size} tokens, fewer than the "
            f"context length of {context_length}; raise the budget to {per_sequence * bytes_per_block} bytes "
            "or lower the context length."
        )
    return blocks if cap is None else min(blocks, cap * per_sequence)


def default_budget(device: torch.device) -> int:
    """Bytes that one rank's cache may take on `device` when no budget is set. Call it once weights are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - DEFAULT_GPU_UTILISATION) * total))
    return int(free_host_memory() * DEFAULT_CPU_SHARE)


def free_host_memory() -> int:
    """Bytes of memory that this process may still take, within its control group's limit."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = next(int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    return min([available * 1024, *_control_group_room()])


def _control_group_room() -> list[int]:
    """[bytes below the control group's limit], or [] where there is none."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(0, int(limit) - used)]


class KvStore:
    """Keys and values of one rank's heads, all layers. Not thread-safe: one step at a time."""

    def __init__(self, shape: StoreShape, num_blocks: int, device: torch.device):
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self._layers = [_zeros(shape, num_blocks, device) for _ in range(shape.num_layers)]
        heads = torch.arange(2 * shape.kv_heads, dtype=torch.int64, device=device)
        self._heads = heads.view(2, 1, shape.kv_heads, 1)
        self._scratch = torch.empty(0, dtype=shape.dtype, device=device)

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of address space; on a CPU, memory is taken only as blocks are first written."""
        return self.num_blocks * self.shape.bytes_per_block

    def hot(self, layer: int) -> Tensor:
        """The blocks of `layer` [num_blocks, 2, kv_heads, block_size, head_dim]; contiguous, at one address."""
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] of `layer` at `slots` int64 [T]."""
        size = self.shape.block_size
        blocks = slots.div(size, rounding_mode="floor")
        self._layers[layer].flatten(1, 2)[blocks, :, slots - blocks * size] = torch.cat((key, value), dim=1)

    def gather(self, layer: int, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks`, an int64 [sequences * B] of block tables padded to B blocks.

        Returns contiguous views [sequences, kv_heads, B * block_size, head_dim] into a buffer that the next
        call overwrites.
        """
        shape = self.shape
        tables = blocks.view(1, sequences, 1, -1)
        rows = (tables * (2 * shape.kv_heads) + self._heads).flatten()
        out = self._buffer(rows.shape[0], shape.block_size * shape.head_dim)
        torch.index_select(self._layers[layer].view(-1, out.shape[1]), 0, rows, out=out)
        both = out.view(2, sequences, shape.kv_heads, -1, shape.head_dim)
        return both[0], both[1]

    def _buffer(self, rows: int, width: int) -> Tensor:
        # Kept between calls: fresh pages from the system for each gather cost more than the gather.
        if self._scratch.numel() < rows * width:
            self._scratch = torch.empty(rows * width, dtype=self.shape.dtype, device=self.device)
        return self._scratch[: rows * width].view(rows, width)


def _zeros(shape: StoreShape, num_blocks: int, device: torch.device) -> Tensor:
    """A zeroed layer. Zeroed, because what attention masks must still be finite: 0 * NaN is NaN."""
    size = (num_blocks, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    if device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=device)
    # numpy asks the system for zeroed pages, which take no memory and no time until they are touched.
    nbytes = int(np.prod(size)) * shape.dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(shape.dtype).view(size)
