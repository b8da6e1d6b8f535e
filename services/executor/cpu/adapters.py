"""LoRA adapters of a packed model, as the native kernels read them (`native/adapters.h`).

Linears of a packed model are joined of several modules: queries, keys and values; gate and up, whose outputs take
turns. Each linear has a table that says which module's outputs every 16 of its own are, and each slot has for each
linear the factors of the adapter that it holds: A of all its modules as one matrix, B of each.

    q_proj   A [16, in]  B [q rows, 16]  ─┐         A [48, in]    t = A x    0..15 | 16..31 | 32..47
    k_proj   A [16, in]  B [kv rows, 16] ─┼─ qkv ─▶ B of q_proj, k_proj, v_proj, each of its own columns of t
    v_proj   A [16, in]  B [kv rows, 16] ─┘

What module a row is of comes from the packed model, so that a start without the modelling code serves adapters too.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.settings import AdapterDtype
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.cpu.packed_linear import OutputSource, PackedLinear, SourceRows
from services.executor.cpu.packed_model import PackedLatent
from services.executor.cpu.quantized import PANEL
from services.executor.model.adapters.files import LowRank
from services.executor.model.loading.arena import fresh
from services.executor.native.library import MODULES, RzAdapted, RzLatent, RzLinear
from services.executor.native.library import RzLowRank as Factors
from shared.errors import ModelLoadError

_LANES = 16  # outputs of a block, and what the columns between two factors are rounded up to
_GROUP = 128  # inputs of A that have one scale, as codes
_QUAD = 4
_OFFSET = 128  # of the codes of B
_ALIGNMENT = 64
_MOST_SLOTS = 1024  # as `ExecutorSettings.max_adapters`
_KEYS, _VALUES = ".keys", ".values"  # behind the name of a module that makes both of latents
_Ints = NDArray[np.int64]


class NativeAdapters:
    """The adapters in a native decoder's slots: a `RoundingHolder`. Steps and changes of slots come one after the
    other."""

    def __init__(self) -> None:
        self._coded = True
        self._linears: list[_Linear] = []
        # (heads, outputs of each that make keys) by the module that makes keys and values of latents
        self._latents: dict[str, tuple[int, int]] = {}
        self._held: dict[int, _Adapter] = {}
        self._slots = 0

    def attach(self, linear: PackedLinear, described: RzLinear, copies: int = 1) -> None:
        """Has `described`, of `linear`, take adapters. `copies`: the experts that it holds."""
        sources = [part.sources for part in linear.parts]
        if any(sources):
            self._linears.append(_Linear(linear, described, sources, copies))

    def attach_latent(self, latent: PackedLatent, described: RzLatent) -> None:
        """The same of what makes queries, keys and values of latents."""
        shape, heads = latent.shape, latent.values.outputs // latent.shape.value_dim
        if latent.query_b is not None:
            self.attach(latent.query_b, described.query_b)
        for linear, into, part, rows in (
            (latent.keys, described.keys, _KEYS, shape.rank),
            (latent.values, described.values, _VALUES, shape.value_dim),
        ):
            source = SourceRows(OutputSource(latent.module + part), rows, 0, rows, rows)
            self._linears.append(_Linear(linear, into, [[source]], heads))
        self._latents[latent.module] = (heads, shape.plain)

    def keep_as(self, kind: AdapterDtype) -> None:
        """What the factors of adapters that are loaded from now on are kept as; `auto`: int8."""
        self._coded = kind != "bf16"

    @property
    def modules(self) -> set[str]:
        """What adapters may change, by name."""
        return self._latents.keys() | {module for linear in self._linears for module in linear.modules}

    def bytes_of(self, slot: int) -> int:
        """Memory that the adapter in `slot` takes; 0: there is none."""
        held = self._held.get(slot)
        return 0 if held is None else held.memory.nbytes

    def load(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        """Puts an adapter into `slot`, in place of what is there. Raises `ModelLoadError` where it changes modules that
        the kernels have no adapters for; the slot then holds what it held."""
        if unknown := sorted(weights.keys() - self.modules):
            raise ModelLoadError(
                f"The adapter changes {unknown[0]}, which the native CPU kernels compute without adapters; train it "
                "without this module, or serve the model with --dtype fp32."
            )
        self._grow(slot + 1)
        adapter = _Adapter.of(self._linears, self._by_side(weights), self._coded)
        for linear, factors in zip(self._linears, adapter.factors, strict=True):
            linear.put(slot, factors)
        self._held[slot] = adapter

    def drop(self, slot: int) -> None:
        """Empties `slot`: rows that name it are computed as those of no adapter."""
        if self._held.pop(slot, None) is not None:
            for linear in self._linears:
                linear.put(slot, None)

    def arguments(self, plan: StepPlan) -> dict[str, int]:
        """What `rz_step` says of the adapters of `plan`; `plan` is to live as long."""
        named = as_int32(plan.adapters)
        if not len(named):
            return {}
        held = [slot for slot in np.unique(named).tolist() if slot in self._held]
        if not held:
            return {}
        if named.max() >= _MOST_SLOTS:
            raise IndexError("the step plan names slots of adapters that do not exist")
        self._grow(int(named.max()) + 1)
        return {
            "num_adapters": len(named),
            "adapter_slots": self._slots,
            "shrunk_columns": max(self._held[slot].columns for slot in held),
        }

    def _by_side(self, weights: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """`weights` with those of keys and values of latents apart: a module W of keys and values, with B A added, is
        used as W_keys^T q and as W_values x, so that A and B of keys change sides."""
        made = dict(weights)
        for module in self._latents.keys() & weights.keys():
            (heads, plain), pair = self._latents[module], made.pop(module)
            b = pair.b.view(heads, -1, pair.rank)
            made[module + _KEYS] = LowRank(b[:, :plain].mT, pair.a.mT.unsqueeze(0))
            made[module + _VALUES] = LowRank(pair.a.unsqueeze(0), b[:, plain:])
        return made

    def _grow(self, slots: int) -> None:
        if slots > self._slots:
            self._slots = max(slots, 2 * self._slots)
            for linear in self._linears:
                linear.grow(self._slots)


class _Linear:
    """One of the packed model's, with the tables that the kernels read."""

    def __init__(self, linear: PackedLinear, described: RzLinear, sources: list[list[SourceRows]], copies: int) -> None:
        """`sources`: of each of the linear's parts; of experts or heads those of one."""
        self.inputs, self.copies = linear.inputs, copies
        self.modules = list(dict.fromkeys(rows.source.module for part in sources for rows in part))
        self._sources = sources
        assert len(self.modules) <= MODULES, "a linear is joined of a few modules"
        self._parts = linear.parts
        self._adapted: list[RzAdapted] = []
        for _ in self._parts:
            self._adapted.append(RzAdapted())
            described.adapted = ctypes.addressof(self._adapted[-1])
            if described.next:
                described = described.next.contents
        self._slots: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * 0)()
        self._tables: list[NDArray[np.int32]] = []
        # int64 [blocks, 16] of each module: which of its outputs are in each of its blocks; -1: none
        self.rows: list[Tensor] = []

    def grow(self, slots: int) -> None:
        if not self._tables:
            self._lay_out()
        wider = (ctypes.c_void_p * slots)(*self._slots)
        for adapted in self._adapted:
            adapted.slots = ctypes.addressof(wider)
        self._slots = wider

    def put(self, slot: int, factors: "ctypes.Array[Factors] | None") -> None:
        self._slots[slot] = None if factors is None else ctypes.addressof(factors)

    def _lay_out(self) -> None:
        """Which block of which module each 16 outputs take."""
        blocks: list[list[_Ints]] = [[] for _ in self.modules]
        counts = [0] * len(self.modules)
        for part, sources, adapted in zip(self._parts, self._sources, self._adapted, strict=True):
            outputs = part.outputs // self.copies
            flat = np.full((2, -(-outputs // PANEL) * PANEL), -1)
            for rows in sources:
                places = rows.places().numpy()
                flat[0, places] = self.modules.index(rows.source.module)
                flat[1, places] = rows.source.first + rows.source.stride * np.arange(rows.rows)
            module_of, row_of = flat.reshape(2, -1, _LANES)
            entries = []
            for module in range(len(self.modules)):
                halves = np.flatnonzero((module_of == module).any(axis=1))
                own = np.where(module_of[halves] == module, row_of[halves], -1)
                numbers = counts[module] + np.arange(len(halves))
                entries.append(np.stack([halves, np.full(len(halves), module), numbers], axis=1))
                blocks[module].append(own)
                counts[module] += len(halves)
            joined = np.concatenate(entries)
            joined = joined[np.argsort(joined[:, 0], kind="stable")]
            first = np.searchsorted(joined[:, 0], np.arange(len(module_of) + 1)).astype(np.int32)
            entry = np.ascontiguousarray(joined[:, 1:], dtype=np.int32)
            adapted.first, adapted.blocks = first.ctypes.data, entry.ctypes.data
            self._tables += [first, entry]
        self.rows = [torch.from_numpy(np.concatenate(own)) for own in blocks]


@dataclass(frozen=True)
class _Laid:
    """The factors of one linear as the kernels read them, before they have a place."""

    coded: bool
    # bf16 [copies or 1, blocks, pairs, 16, 2], or codes with their scales: uint8 [copies or 1, blocks, bytes]
    shrink: Tensor
    expand: list[Tensor | None]  # the same of each module
    columns: int
    first: list[int]
    pairs: list[int]

    @classmethod
    def of(cls, linear: _Linear, weights: Mapping[str, LowRank], coded: bool) -> "_Laid | None":
        """None: the adapter changes none of its modules."""
        found = [weights.get(module) for module in linear.modules]
        if not any(found):
            return None
        ranks = [0 if pair is None else _padded_rank(pair.rank, coded) for pair in found]
        first, total = _placed_columns(ranks, coded)
        columns = -(-total // _LANES) * _LANES
        every = [pair for pair in found if pair is not None]
        copies = max(_stacked(pair.a).shape[0] for pair in every)
        joined = torch.zeros(copies, columns, linear.inputs + linear.inputs % 2, dtype=torch.bfloat16)
        for pair, at in zip(found, first, strict=True):
            if pair is not None:
                joined[:, at : at + pair.rank, : linear.inputs] = _stacked(pair.a)
        expand = [
            None if pair is None else (_coded_expand if coded else _blocks)(_picked(_stacked(pair.b), rows, rank))
            for pair, rows, rank in zip(found, linear.rows, ranks, strict=True)
        ]
        shrink = _coded_shrink(joined) if coded else _blocks(joined)
        return cls(coded, shrink, expand, columns, first, [rank // 2 for rank in ranks])

    @property
    def tensors(self) -> list[Tensor]:
        return [self.shrink, *(tensor for tensor in self.expand if tensor is not None)]

    def placed(self, memory: Tensor, copies: int) -> "ctypes.Array[Factors]":
        """Written to `memory`, uint8 of the tensors' `_padded` sizes: the structures for `copies` experts that point
        there."""
        addresses = list[list[int]]()
        offset = 0
        for tensor in self.tensors:
            size = tensor.nbytes
            memory[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            each = 0 if tensor.shape[0] == 1 else size // copies
            addresses.append([memory.data_ptr() + offset + copy * each for copy in range(copies)])
            offset += _padded(size)
        made = (Factors * copies)()
        for copy, factors in enumerate(made):
            own = iter([address[copy] for address in addresses])
            factors.shrink, factors.columns, factors.coded = next(own), self.columns, self.coded
            for module, expanded in enumerate(self.expand):
                factors.first[module], factors.pairs[module] = self.first[module], self.pairs[module]
                factors.expand[module] = None if expanded is None else next(own)
        return made


@dataclass(frozen=True)
class _Adapter:
    """What a slot holds: one piece of memory with all factors, and the structures that point into it."""

    memory: Tensor
    factors: "list[ctypes.Array[Factors] | None]"  # of each linear [copies]; None: nothing is added to it
    columns: int  # of any linear, at most

    @classmethod
    def of(cls, linears: list[_Linear], weights: Mapping[str, LowRank], coded: bool) -> "_Adapter":
        laid = [_Laid.of(linear, weights, coded) for linear in linears]
        sizes = [0 if one is None else sum(_padded(tensor.nbytes) for tensor in one.tensors) for one in laid]
        memory = fresh(max(1, sum(sizes)))
        factors = list["ctypes.Array[Factors] | None"]()
        offset = 0
        for linear, one, size in zip(linears, laid, sizes, strict=True):
            factors.append(None if one is None else one.placed(memory[offset : offset + size], linear.copies))
            offset += size
        return cls(memory, factors, max((one.columns for one in laid if one is not None), default=0))


def _stacked(factor: Tensor) -> Tensor:
    """[copies, rows, columns]: of one linear one copy."""
    return factor if factor.dim() == 3 else factor.unsqueeze(0)


def _padded_rank(rank: int, coded: bool) -> int:
    """To an even number. As codes to 4, 8, or whole blocks: what is rounded with one scale is then never cut."""
    if not coded:
        return rank + rank % 2
    return next((size for size in (_QUAD, 2 * _QUAD) if rank <= size), -(-rank // _LANES) * _LANES)


def _placed_columns(ranks: list[int], coded: bool) -> tuple[list[int], int]:
    """Where the columns of each module begin, and how many there are."""
    first, total = list[int](), 0
    for rank in ranks:
        step = min(rank, _LANES) if coded and rank else 1
        first.append(-(-total // step) * step)
        total = first[-1] + rank
    return first, total


def _picked(b: Tensor, rows: Tensor, columns: int) -> Tensor:
    """[copies, blocks * 16, columns] of B [copies, outputs, rank]; zeros for rows of -1."""
    copies, outputs, rank = b.shape
    padded = torch.zeros(copies, outputs + 1, columns, dtype=torch.bfloat16)
    padded[:, :outputs, :rank] = b
    return padded[:, rows.flatten()]


def _blocks(rows: Tensor) -> Tensor:
    """[copies, rows, columns] as the kernels have it: [copies, rows / 16, columns / 2, 16, 2]."""
    copies, count, columns = rows.shape
    return rows.view(copies, count // _LANES, _LANES, columns // 2, 2).transpose(2, 3)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, bf16 scales [..., 1]) of `values` [..., n], one scale for each n."""
    largest = values.abs().amax(-1, keepdim=True).float()
    scales = (largest / 127).bfloat16()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    return (values.float() * inverse).round_().clamp_(-127, 127).to(torch.int8), scales


def _coded_shrink(rows: Tensor) -> Tensor:
    """A [copies, columns, inputs] as blocks of codes: uint8 [copies, columns / 16, bytes], see `low_rank.h`."""
    parts = list[Tensor]()
    for group in torch.split(rows, _GROUP, -1):
        codes, scales = _rounded(group)
        parts += [_scales(scales), _blocks(codes).flatten(2).view(torch.uint8)]
    return torch.cat(parts, -1)


def _coded_expand(rows: Tensor) -> Tensor:
    """The same of B [copies, outputs, columns]: uint8 [copies, outputs / 16, bytes]."""
    codes, scales = _rounded(rows)
    copies, count, columns = codes.shape
    quads = codes.view(copies, count // _LANES, _LANES, columns // _QUAD, _QUAD).transpose(2, 3)
    offset = (quads.to(torch.int16) + _OFFSET).to(torch.uint8)
    return torch.cat([_scales(scales), offset.flatten(2)], -1)


def _scales(scales: Tensor) -> Tensor:
    """bf16 [copies, rows, 1] as uint8 [copies, rows / 16, 32]."""
    copies, count, _ = scales.shape
    return scales.reshape(copies, count // _LANES, _LANES).view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
