"""Adapters beside the weights of transformers' own modules, which PyTorch computes.

A linear's product gets what the adapters of its rows add, whatever form its weight has. Rows are sorted by their
slots once a step; each linear then takes two small products for each adapter that the step names:

    rows      slot 2 | none | slot 0 | slot 2          slot 0: row 2          made[2]    += (x[2]    A0^T) B0^T
                                                       slot 2: rows 0, 3      made[0, 3] += (x[0, 3] A2^T) B2^T

A row-parallel linear adds before its ranks' sum. Nothing of this is in a model's way before it gets an adapter.
Sources: Chen et al., "Punica", https://arxiv.org/abs/2310.18547; Sheng et al., "S-LoRA", https://arxiv.org/abs/2311.03285.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional

from services.executor.core.step_plan import StepPlan
from services.executor.model.adapters.files import LowRank, read_adapter
from services.executor.model.adapters.holder import AdapterHolder, Int64Array, grouped_rows, slots_of_rows
from services.executor.model.adapters.targets import AdapterTarget
from services.executor.model.parallel.experts import expert_by_expert, expert_leaves
from services.executor.model.parallel.layers import LatentWeight, LinearShard
from services.executor.model.step_context import StepContext

log = structlog.get_logger(__name__)

Groups = list[tuple[int, Tensor]]  # (slot, int64 rows of what a module is given) of each adapter


class StepRows:
    """The rows of a step by their adapters, or those of the part of it that a module is called with."""

    def __init__(self, slots: Int64Array, device: torch.device) -> None:
        """`slots` int64 [T], -1 for none."""
        self._slots, self._device = slots, device
        self._groups: dict[tuple[int, int], Groups] = {}
        self._of_rows: dict[tuple[int, int], Tensor] = {}
        self._part = (0, len(slots))

    def narrow(self, start: int, stop: int) -> None:
        """From now on modules are called with the rows [start, stop)."""
        self._part = (start, stop)

    @property
    def count(self) -> int:
        return self._part[1] - self._part[0]

    @property
    def groups(self) -> Groups:
        if self._part not in self._groups:
            found = grouped_rows(self._slots[slice(*self._part)])
            self._groups[self._part] = [(slot, torch.from_numpy(rows).to(self._device)) for slot, rows in found]
        return self._groups[self._part]

    @property
    def slots(self) -> Tensor:
        """int64 [rows]"""
        if self._part not in self._of_rows:
            self._of_rows[self._part] = torch.from_numpy(self._slots[slice(*self._part)]).to(self._device)
        return self._of_rows[self._part]


class ModuleAdapters:
    """The adapters of a model that PyTorch runs; an `AdapterHolder`."""

    def __init__(self, model: nn.Module, targets: Sequence[AdapterTarget], device: torch.device) -> None:
        """`targets`: those of `model`, this rank's share. Factors lie on `device`."""
        self._model, self._device = model, device
        self._targets = {target.name: target for target in targets}
        self._deltas: dict[str, _Delta] = {}
        self._rows: StepRows | None = None

    def load(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        self.drop(slot)
        for name, pair in weights.items():
            if name not in self._deltas:
                self._attach(name)
            self._deltas[name].pairs[slot] = LowRank(pair.a.to(self._device), pair.b.to(self._device))

    def drop(self, slot: int) -> None:
        for delta in self._deltas.values():
            delta.pairs.pop(slot, None)

    @contextmanager
    def computing(self, plan: StepPlan, step: StepContext) -> Iterator[None]:
        """While the model computes `plan`."""
        slots = slots_of_rows(plan)
        if slots is None:
            yield
            return
        self._rows = StepRows(slots, self._device)
        step.narrow = self._rows.narrow
        try:
            yield
        finally:
            self._rows = None

    def _attach(self, name: str) -> None:
        target = self._targets[name]
        if target.experts:
            path = name.rpartition(".")[0]
            experts = self._model.get_submodule(path)
            deltas = {leaf: _Delta(self._current) for leaf in expert_leaves(experts)}
            self._deltas.update({f"{path}.{leaf}": delta for leaf, delta in deltas.items()})
            _attach_experts(experts, deltas, self._current)
            return
        module, delta = self._model.get_submodule(name), _Delta(self._current)
        self._deltas[name] = delta
        if isinstance(module, LinearShard):
            module.add_to_products(delta.add)
        elif isinstance(module, LatentWeight):
            module.low_rank = delta.of_rows
        else:
            module.register_forward_hook(lambda _, given, made: delta.add(given[0], made))

    def _current(self) -> StepRows | None:
        return self._rows


class AdapterLoader:
    """Reads what steps load, for whatever computes them."""

    def __init__(
        self, holder: AdapterHolder, targets: Sequence[AdapterTarget], dtype: torch.dtype, max_rank: int
    ) -> None:
        self._holder, self._targets = holder, targets
        self._dtype, self._max_rank = dtype, max_rank

    def load(self, loads: Sequence[tuple[int, str]]) -> None:
        """Reads (slot, directory) each. Raises `ModelLoadError`."""
        for slot, directory in loads:
            began = time.perf_counter()
            weights = read_adapter(Path(directory), self._targets, self._dtype, self._max_rank)
            self._holder.load(slot, weights)
            seconds = round(time.perf_counter() - began, 3)
            log.info("adapter_loaded", slot=slot, modules=len(weights), seconds=seconds)

    def computing(self, plan: StepPlan, step: StepContext) -> AbstractContextManager[None]:
        """While PyTorch computes `plan`; decoders read it themselves."""
        return self._holder.computing(plan, step) if isinstance(self._holder, ModuleAdapters) else nullcontext()


class _Delta:
    """What adapters add to one linear."""

    def __init__(self, current: Callable[[], StepRows | None]) -> None:
        self.pairs: dict[int, LowRank] = {}  # by slot
        self._current = current

    def add(self, x: Tensor, made: Tensor) -> Tensor:
        """`made` [..., out] with what the adapters make of `x` [..., in]."""
        groups = self.of_rows()
        if not groups:
            return made
        flat, out = x.reshape(-1, x.shape[-1]), made.reshape(-1, made.shape[-1])
        rows = self._current()
        assert rows is not None, "there are groups"
        assert len(flat) == rows.count, "a linear is called once for each row"
        for at, a, b in groups:
            out.index_add_(0, at, functional.linear(functional.linear(flat[at], a), b))
        return out.view(made.shape)

    def of_rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(rows, A, B) of each adapter of the rows that are computed."""
        rows = self._current()
        if rows is None or not self.pairs:
            return []
        pairs = ((at, self.pairs.get(slot)) for slot, at in rows.groups)
        return [(at, pair.a, pair.b) for at, pair in pairs if pair is not None]

    def add_of_expert(self, slots: Tensor, expert: int, rows: Tensor, x: Tensor, made: Tensor) -> None:
        """Adds to `made` [n, out] what is made of `x` [n, in], `rows` [n] of one expert; `slots` are the adapters of
        all rows."""
        own = slots[rows]
        for slot, pair in self.pairs.items():
            at = (own == slot).nonzero().squeeze(1)
            if len(at):
                low = functional.linear(x[at], pair.a[expert])
                made.index_add_(0, at, functional.linear(low, pair.b[expert]))


def _attach_experts(experts: Any, deltas: Mapping[str, _Delta], current: Callable[[], StepRows | None]) -> None:
    plain = experts.forward
    entry, out = (deltas[leaf] for leaf in expert_leaves(experts))

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made: Tensor
        rows = current()
        if rows is None or not (entry.pairs or out.pairs):
            made = plain(hidden_states, top_k_index, top_k_weights)
            return made
        chosen = (hidden_states, top_k_index, top_k_weights)
        if hasattr(plain, "with_adapters"):  # of a GPU's kernels, which hold the weights
            added = [partial(_add_of_pairs, delta, rows.slots) for delta in (entry, out)]
            made = plain.with_adapters(*chosen, *added)
            return made
        of_experts = [partial(delta.add_of_expert, rows.slots) for delta in (entry, out)]
        return expert_by_expert(experts, *chosen, *of_experts)

    experts.forward = forward


def _add_of_pairs(delta: _Delta, slots: Tensor, x: Tensor, chosen: Tensor, made: Tensor) -> None:
    """Adds to `made` [T * K, out] of each row's experts `chosen` [T, K] what is made of `x`, [T, in] or one row for
    each pair; `slots` [T]."""
    of_pairs = slots.repeat_interleave(chosen.shape[1])
    inputs = x if len(x) == len(made) else x.repeat_interleave(chosen.shape[1], 0)
    experts = chosen.flatten()
    for expert in sorted(set(experts[of_pairs >= 0].tolist())):
        at = (experts == expert).nonzero().squeeze(1)
        part = made[at]
        delta.add_of_expert(of_pairs, expert, at, inputs[at], part)
        made[at] = part
