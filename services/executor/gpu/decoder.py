"""A rank's forward pass on a GPU: our kernels between PyTorch's matrix products (docs/adr/0020-gpu-decoder.md).

`compute` and `logits` wait for nothing on the host, and no shape in them depends on what tensors hold: a CUDA graph
can hold them. What a step reads is in `StepInputs`; what it writes are the KV store and the tensors it returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, InRankOrder
from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import Int32Array, StepPlan, as_int32
from services.executor.gpu.adapters import AdaptedProduct, DecoderAdapters
from services.executor.gpu.attention import GpuKernels, processors_of
from services.executor.gpu.experts import Mixture
from services.executor.gpu.inputs import Shape, Split, StepInputs, inputs_of
from services.executor.gpu.kernels import elementwise, low_rank
from services.executor.gpu.kernels.experts import arrivals_of
from services.executor.gpu.kernels.low_rank import LowRankRows
from services.executor.gpu.linear import invariant_product, make_joined, make_lookup, make_product
from services.executor.gpu.sparse_attention import SparseStep, sparse_rows
from services.executor.kv_cache.store import KvStore
from services.executor.model.adapters.holder import slots_of_rows
from services.executor.model.lowered_experts import Routing
from services.executor.model.lowering import (
    Lowered,
    LoweredLayer,
    down_of,
    gate_up_linears_of,
    gate_up_of,
    linears_of,
    qkv_linears_of,
    qkv_of,
    release,
    sums_of,
    vocabulary,
    weights_of,
)
from services.executor.model.products import MakeProduct, Product
from services.executor.model.step_context import ScoreRule
from services.executor.platforms.base import sent
from services.executor.sampling.candidates import largest_of


@dataclass(frozen=True)
class _Layer:
    """One layer on the device."""

    norms: dict[str, Tensor]  # as `LoweredLayer.norms`
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys
    qkv: Product
    output: Product
    gate_up: Product | None  # of all rows; beside experts the shared one's, if there is one
    down: Product | None
    adapted: dict[str, AdaptedProduct]  # what adapters add to these products, by their names here
    experts: Mixture | None
    rotary: int
    index: int  # among the layers of the KV store
    rule: ScoreRule
    window: int | None


class AuxHiddenStates(NamedTuple):
    """Where a step leaves what a draft head reads of it."""

    # Whose inputs (behind the last one: what the last norm reads); none: what comes behind the last norm.
    layers: Sequence[int]
    into: Tensor  # [T, layers * hidden], side by side

    def take(self, layer: int, states: Tensor) -> None:
        """`states` [T, hidden] are the input of `layer`."""
        width = states.shape[1]
        for place, tapped in enumerate(self.layers):
            if tapped == layer:
                self.into[:, place * width : (place + 1) * width].copy_(states)

    def take_last(self, states: Tensor) -> None:
        """`states` [T, hidden] come behind the last norm."""
        if not self.layers:
            self.into.copy_(states)


class GpuDecoder:
    """Holds a lowered model's weights on the device of its store, and runs step plans; a `model.decoder.Decoder`."""

    label = "compute: GPU decoder, sums over the ranks included"
    first_seen: ClassVar[int] = 0  # see `StepContext`
    states_width = 0  # of `StepInputs.states`; 0: there are none

    def __init__(
        self,
        lowered: Lowered,
        store: KvStore,
        layout: ShardLayout,
        collectives: Collectives,
        make: MakeProduct = make_product,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Takes the weights out of the model that was lowered, layer by layer; `make` makes them its products.

        `batch_invariant`: what a row comes to is a function of its token, its position and what it reads: not of the
        rows beside it. Products and sums over ranks are other ones then, and keys are not split.
        """
        if batch_invariant:
            make, collectives = invariant_product, InRankOrder(collectives)
        self._scalars = lowered.scalars
        self._norms = elementwise.Norms(lowered.scalars.eps, offset=lowered.family.norm_offset != 0.0)
        self._gelu = lowered.activation == "gelu_tanh"
        self._store, self.dtype = store, store.shape.dtype
        self._collectives = collectives
        self._attention = GpuKernels(store, self.first_seen)
        self._q_heads = layout.q_heads.size
        processors = 0 if batch_invariant else self._attention.processors
        self.shape = Shape(
            store.block_size, store.shape.kv_heads, layout.q_per_kv, processors, batch_invariant=batch_invariant
        )
        first = layout.output_heads.start - layout.q_heads.start
        width = store.shape.head_dim
        self._output_columns = slice(first * width, (first + layout.output_heads.size) * width)
        device = store.device
        self._arrivals = arrivals_of(processors_of(device), device)
        self._names, self.adapters = lowered.names, DecoderAdapters()
        self._frequencies = [(radians.to(device), scale) for radians, scale in lowered.frequencies]
        self._layers = [self._layer(index, layer, make) for index, layer in enumerate(lowered.layers)]
        self._names = {}  # of modules whose weights are here now
        self._final_norm = lowered.final_norm
        embedding, self._first_token, self._split = vocabulary(lowered)
        self._embedded = make_lookup(embedding, store.shape.dtype)
        self._embeddings = embedding.shape[0]
        self._head = make(*weights_of(lowered.head))
        release(lowered.head)
        release(lowered.embedding)

    # --- what a graph can hold -------------------------------------------------------------------

    def compute(
        self, inputs: StepInputs, on_layer: Callable[[], None] = lambda: None, taps: AuxHiddenStates | None = None
    ) -> Tensor:
        """The normed hidden states [T, hidden] of `inputs`, whose token ids are tokens; writes their keys and values,
        and `taps`.

        `on_layer` is called as each layer has been launched. Raises `RingLost`.
        """
        slots = self.adapters.slots
        rows = low_rank.rows_by_slot(inputs.adapters, slots) if slots and inputs.adapters is not None else None
        residual, states = self._begin(inputs)
        rotations = self._rotations(inputs.positions)
        following = [layer.norms["attention_norm"] for layer in self._layers[1:]]
        for layer, next_norm in zip(self._layers, [*following, self._final_norm], strict=True):
            if taps is not None:
                taps.take(layer.index, residual)
            attended = self._attend(layer, states, inputs, rotations, rows)
            made = layer.adapted["output"].add(attended, layer.output(attended), rows)
            summed = self._collectives.all_reduce(made)
            states = self._add_norm(summed, residual, layer, "after_attention_norm", layer.norms["feed_forward_norm"])
            summed = self._collectives.all_reduce(self._feed_forward(layer, states, inputs, rows))
            states = self._add_norm(summed, residual, layer, "after_feed_forward_norm", next_norm)
            on_layer()
        if taps is not None:
            taps.take(len(self._layers), residual)
            taps.take_last(states)
        return states

    def taps(self, rows: int, layers: Sequence[int]) -> AuxHiddenStates:
        """Room for what `layers` read of a step of so many rows."""
        width = max(len(layers), 1) * len(self._final_norm)
        return AuxHiddenStates(layers, self._final_norm.new_empty((rows, width), dtype=self.dtype))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """This rank's share of the logits [R, rows of the head] of `rows`, integers [R], of `hidden` [T, hidden]: in
        the model's dtype, or in float32 where the model scales or caps them."""
        logits = self._head(hidden.index_select(0, rows))
        scale, cap = self._scalars.logit_scale, self._scalars.logit_cap
        if scale == 1.0 and not cap:
            return logits
        scaled = logits.float() * scale
        return scaled.div_(cap).tanh_().mul_(cap) if cap else scaled

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return largest_of(logits)

    # --- steps -----------------------------------------------------------------------------------

    def inputs_of(self, plan: StepPlan) -> StepInputs:
        """`plan`, which computes some tokens, in tensors of its own on the device."""
        return inputs_of(plan, self.shape, self._store.device)._replace(
            compressions=self.pairs_of(plan), adapters=self.adapters_of(plan), sparse=self.sparse_of(plan)
        )

    def sparse_of(self, plan: StepPlan) -> Callable[[int], Split | None] | None:
        """How layers attend to `plan` in which some rows read some blocks only, as `StepInputs.sparse`."""
        rows = sparse_rows(plan, self._store.block_size) if self._store.shape.choosing else []
        return SparseStep(plan, rows, self.shape, self._store.device).split if rows else None

    def adapters_of(self, plan: StepPlan) -> Tensor | None:
        """The slots of the rows of `plan`, as `StepInputs.adapters`."""
        slots = slots_of_rows(plan) if self.adapters.slots else None
        return None if slots is None else sent(slots.astype(np.int32), self._store.device)

    def pairs_of(self, plan: StepPlan) -> Tensor | None:
        """The blocks that `plan` fills, as `StepInputs.compressions`."""
        return self._attention.pairs_of(plan)

    def compress(self, plan: StepPlan) -> None:
        """The blocks that `plan` has filled, decodes alone and computed without `compressions`, in all layers."""
        if plan.compressions:
            self._store.compress(as_int32(plan.compressions).reshape(-1, 2))

    def forward(self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array) -> tuple[Tensor, Floats]:
        inputs = self.inputs_of(plan)
        hidden = self.compute(inputs, progress.tick)
        return self.logits(hidden, inputs.sample_rows), sums_of(hidden, pools)

    def forward_with_states(
        self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array, layers: Sequence[int]
    ) -> tuple[Tensor, Floats, Tensor]:
        inputs = self.inputs_of(plan)
        taps = self.taps(len(inputs.token_ids), layers)
        hidden = self.compute(inputs, progress.tick, taps)
        return self.logits(hidden, inputs.sample_rows), sums_of(hidden, pools), taps.into

    def forward_to_largest(self, plan: StepPlan, progress: ProgressCounter) -> tuple[Tensor, Tensor]:
        inputs = self.inputs_of(plan)
        return self.largest(self.logits(self.compute(inputs, progress.tick), inputs.sample_rows))

    # --- parts -----------------------------------------------------------------------------------

    def _begin(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """What layers add to [T, hidden], in memory of its own, and what the first one reads, [T, inputs]."""
        residual = self._embed(inputs.token_ids)
        return residual, elementwise.norm(residual, self._layers[0].norms["attention_norm"], self._norms)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden], whole on every rank, in memory of its own."""
        if self._split and self._collectives.world_size > 1:
            local = token_ids - self._first_token
            foreign = (local < 0) | (local >= self._embeddings)
            rows = self._embedded(local.masked_fill(foreign, 0))
            rows = self._collectives.all_reduce(rows.masked_fill_(foreign.unsqueeze(-1), 0))
        else:
            rows = self._embedded(token_ids)
        scale = self._scalars.embedding_scale
        return rows if scale == 1.0 else rows.mul_(scale)

    def _rotations(self, positions: Tensor) -> list[elementwise.Rotation]:
        """One for each set of frequencies, shared by all layers."""
        places = positions.float().unsqueeze(1)
        rotations = []
        for radians, scale in self._frequencies:
            angles = places * radians
            cosines, sines = angles.cos(), angles.sin()
            if scale != 1.0:
                cosines, sines = cosines.mul_(scale), sines.mul_(scale)
            rotations.append(elementwise.Rotation(cosines, sines))
        return rotations

    def _attend(
        self,
        layer: _Layer,
        states: Tensor,
        inputs: StepInputs,
        rotations: list[elementwise.Rotation],
        rows: LowRankRows | None,
    ) -> Tensor:
        """[T, q heads of the output * head dim] of the normed `states` [T, hidden]."""
        query = elementwise.place(
            layer.adapted["qkv"].add(states, layer.qkv(states), rows),
            self._q_heads,
            None if layer.rotary < 0 else rotations[layer.rotary],
            inputs.slots,
            self._store.writable(layer.index),
            layer.head_norms,
            self._norms,
        )
        self._attention.seal(inputs, layer.index)
        tokens, _, width = query.shape
        grouped = query.view(tokens, -1, self.shape.group, width)
        out = torch.empty_like(grouped)
        choosing = layer.index if layer.index in self._store.shape.choosing else None
        self._attention.attend(inputs, layer.index, grouped, layer.rule, layer.window, out, choosing)
        return out.view(tokens, -1)[:, self._output_columns]

    def _feed_forward(self, layer: _Layer, states: Tensor, inputs: StepInputs, rows: LowRankRows | None) -> Tensor:
        """This rank's share of the sum, [T, hidden] of the normed `states` [T, hidden]."""
        made = None
        if layer.gate_up is not None and layer.down is not None:
            gate_up = layer.adapted["gate_up"].add(states, layer.gate_up(states), rows)
            inner = elementwise.gated(gate_up, gelu=self._gelu)
            made = layer.adapted["down"].add(inner, layer.down(inner), rows)
        if layer.experts is not None:
            adapters = None if rows is None else inputs.adapters
            made = layer.experts(states, inputs.slots, made, adapters)
        assert made is not None, "a layer feeds forward by something"
        return made

    def _add_norm(self, x: Tensor, residual: Tensor, layer: _Layer, after: str, weight: Tensor) -> Tensor:
        return elementwise.add_norm(
            x, residual, weight, self._norms, layer.norms.get(after), self._scalars.residual_scale
        )

    def _mixture(self, routing: Routing, make: MakeProduct) -> Mixture:
        mixture = Mixture(routing, make, self._arrivals, gelu=self._gelu, invariant=self.shape.batch_invariant)
        mixture.take_adapters(self.adapters, self._names[routing.experts])
        return mixture

    def _adapted(self, linears: Sequence[Any]) -> AdaptedProduct:
        """What adapters add to the product of `linears`, before their weights go."""
        outputs = [linear.stored.shape[0] for linear in linears]
        return self.adapters.product([self._names[linear] for linear in linears], outputs, self._store.device)

    def _layer(self, index: int, layer: LoweredLayer, make: MakeProduct) -> _Layer:
        attention: Any = layer.attention
        feed_forward: Any = layer.feed_forward
        norms, scalars = layer.norms, self._scalars
        adapted = {"qkv": self._adapted(qkv_linears_of(attention)), "output": self._adapted([attention.o_proj])}
        if feed_forward is not None:
            adapted["gate_up"] = self._adapted(gate_up_linears_of(feed_forward))
            adapted["down"] = self._adapted([down_of(feed_forward)])
        made = _Layer(
            norms=norms,
            head_norms=(norms["query_norm"], norms["key_norm"]) if "query_norm" in norms else None,
            qkv=make_joined(qkv_of(attention), make),
            output=make(*weights_of(attention.o_proj)),
            gate_up=None if feed_forward is None else make_joined(gate_up_of(feed_forward), make),
            down=None if feed_forward is None else make(*weights_of(down_of(feed_forward))),
            adapted=adapted,
            experts=None if layer.routing is None else self._mixture(layer.routing, make),
            rotary=layer.rotary,
            index=index,
            rule=ScoreRule(scalars.attention_scale, scalars.attention_cap or None),
            window=layer.window or None,
        )
        for linear in linears_of(layer):
            release(linear)
        return made
