"""Whether LoRA adapters beside a product are right.

A product is the joined queries, keys and values of a layer; its rows take turns among the adapters.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.on_gpu.bench import ROUNDED, Bench, Row, checked
from services.executor.model.adapters.files import LowRank

ROWS = (1, 16, 64, 2048)
RANKS = (16, 64)
ADAPTERS = 8
NAMES = ("q_proj", "k_proj", "v_proj")


class Shape(NamedTuple):
    inputs: int
    outputs: tuple[int, int, int]


LLAMA = Shape(4096, (4096, 1024, 1024))  # a layer of Llama 3 8B
TINY = Shape(64, (64, 32, 32))


def errors(bench: Bench) -> Iterator[Row]:
    """Rows of `adapters/...`."""
    for rank in (5,) if bench.tiny else RANKS:
        held = _Held(TINY if bench.tiny else LLAMA, rank, bench.device)
        for count in (1, 9) if bench.tiny else ROWS:
            yield held.error(count)


class _Held:
    """One product's adapters, all of one rank."""

    def __init__(self, shape: Shape, rank: int, device: torch.device) -> None:
        from services.executor.gpu.adapters import AdaptedProduct

        self._shape, self._rank, self._device = shape, rank, device
        self._product = AdaptedProduct(NAMES, shape.outputs, device)
        self._product.reserve(ADAPTERS, rank)
        self._factors = [self._adapter() for _ in range(ADAPTERS)]
        for slot, factors in enumerate(self._factors):
            self._product.load(slot, factors)

    def _adapter(self) -> dict[str, LowRank]:
        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=self._device) * sizes[1] ** -0.5

        outputs = zip(NAMES, self._shape.outputs, strict=True)
        return {
            name: LowRank(random(self._rank, self._shape.inputs), random(width, self._rank)) for name, width in outputs
        }

    def _slots(self, count: int) -> Tensor:
        """Every ninth row has none."""
        return (torch.arange(count, dtype=torch.int32, device=self._device) + 1) % (ADAPTERS + 1) - 1

    def _made(self, x: Tensor, out: Tensor, slots: Tensor) -> Tensor:
        from services.executor.gpu.kernels.low_rank import rows_by_slot

        return self._product.add(x, out, rows_by_slot(slots, ADAPTERS))

    def error(self, count: int) -> Row:
        x = torch.randn(count, self._shape.inputs, dtype=torch.bfloat16, device=self._device)
        slots = self._slots(count)
        found = self._made(x, x.new_zeros(count, sum(self._shape.outputs)), slots).float()
        expected = torch.zeros_like(found)
        for slot, factors in enumerate(self._factors):
            rows = slots == slot
            parts = [x[rows].float() @ pair.a.float().T @ pair.b.float().T for pair in factors.values()]
            expected[rows] = torch.cat(parts, dim=1)
        what = f"adapters of rank {self._rank} by {count} rows, against PyTorch in float32"
        return checked(f"adapters/{self._rank}/{count}", what, found, expected, ROUNDED)
