"""LoRA adapters of a GPU's decoder: which products they change, and where their factors lie on the device.

Each product has tables of as many slots as there may be adapters: addresses of factors, and their ranks. Kernels read
them, so a slot gets another adapter between two steps by a copy into the tables, in the stream that steps run in, and
CUDA graphs that hold the kernels need not be made anew. Steps without adapters launch none of it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.executor.gpu.kernels import low_rank
from services.executor.gpu.kernels.low_rank import LowRankRows
from services.executor.model.adapters.files import LowRank

_LEAST_RANK = 16  # what ranks are multiples of here


class AdaptedProduct:
    """The factors of one product: of linears with their outputs end to end, or of all experts of a layer."""

    def __init__(self, names: Sequence[str], outputs: Sequence[int], device: torch.device) -> None:
        """`names`: what an adapter calls the linears; `outputs`: of each on this rank."""
        self.names, self._device = list(names), device
        # Gate and up projections of experts, which peft may hold apart, are of two ranks together.
        self._joined = 2 if names[0].endswith("experts.gate_up_proj") else 1
        self._widest = max(outputs)
        self._starts = torch.tensor([0, *accumulate(outputs)], dtype=torch.int32).to(device)
        self._held: dict[int, list[LowRank | None]] = {}
        self.reserve(0, _LEAST_RANK)

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes room for `slots` adapters of up to `max_rank`; none is there then."""
        self._most = -(-max(max_rank * self._joined, _LEAST_RANK) // 16) * 16
        self._table = torch.zeros((len(self.names), slots, 2), dtype=torch.int64, device=self._device)
        self._ranks = torch.zeros((len(self.names), slots), dtype=torch.int32, device=self._device)
        self._held.clear()

    def load(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        """Puts the adapter's factors of this product into `slot`, in place of what is there."""
        held = [None if (pair := weights.get(name)) is None else self._padded(pair) for name in self.names]
        addresses = [[0, 0] if pair is None else [pair.a.data_ptr(), pair.b.data_ptr()] for pair in held]
        ranks = [0 if pair is None else pair.rank for pair in held]
        self._table[:, slot] = torch.tensor(addresses, dtype=torch.int64).to(self._device)
        self._ranks[:, slot] = torch.tensor(ranks, dtype=torch.int32).to(self._device)
        self._held[slot] = held  # what was there goes once the stream is past what reads it: memory is the stream's

    def _padded(self, pair: LowRank) -> LowRank:
        """On the device, with the rank filled up to a multiple of 16: kernels read whole vectors."""
        more = -pair.rank % _LEAST_RANK
        a, b = pair.a.to(self._device), pair.b.to(self._device)
        return LowRank(pad(a, (0, 0, 0, more)).contiguous(), pad(b, (0, more)).contiguous())

    def add(self, x: Tensor, out: Tensor, rows: LowRankRows | None) -> Tensor:
        """`out` [rows, outputs], what the product has made of `x`, with what adapters add; None: none does."""
        if rows is not None:
            tables = (self._table, self._ranks, self._starts)
            low_rank.add_low_rank(out, x, *tables, self._widest, self._most, rows)
        return out


class DecoderAdapters:
    """All of a decoder's; a `ReservingHolder`."""

    def __init__(self) -> None:
        self.products: list[AdaptedProduct] = []
        self.slots = 0  # 0: there are no adapters

    def product(self, names: Sequence[str], outputs: Sequence[int], device: torch.device) -> AdaptedProduct:
        made = AdaptedProduct(names, outputs, device)
        self.products.append(made)
        return made

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes room in all tables, before graphs are made of steps with adapters."""
        self.slots = slots
        for product in self.products:
            product.reserve(slots, max_rank)

    @property
    def modules(self) -> set[str]:
        """What adapters may change, by name."""
        return {name for product in self.products for name in product.names}

    def load(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        for product in self.products:
            product.load(slot, weights)

    def drop(self, slot: int) -> None:
        self.load(slot, {})
