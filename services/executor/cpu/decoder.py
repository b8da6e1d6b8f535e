"""A rank's forward pass through the native kernels."""

import ctypes
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.executor.collectives.shared_memory import SharedMemory
from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats
from services.executor.core.sharding import ShardLayout
from services.executor.core.sparse_attention import FIELDS
from services.executor.core.step_plan import Int32Array, StepPlan
from services.executor.cpu.adapters import NativeAdapters
from services.executor.cpu.block_fetching import FetchSteps, disk_reads
from services.executor.cpu.packed_model import ACTIVATIONS, PackedExperts, PackedLayer, PackedModel
from services.executor.cpu.sampling import NativeRows
from services.executor.cpu.weight_streaming import WeightStreamer
from services.executor.kv_cache.store import KvStore
from services.executor.model.lowered_latent import LatentShape
from services.executor.native.library import (
    PARTS,
    RzExperts,
    RzHeads,
    RzLatent,
    RzLayer,
    RzModel,
    RzRecurrent,
    RzSharedHead,
    RzSpan,
    RzStep,
    kernels_at,
    levels,
)
from shared.errors import ConfigurationError, RingLost

_INT = 4
_NO_MEMORY, _RING_LOST, _BAD_PLAN = 1, 2, 3
_NO_ROOM = "There is no memory left for the working space of a step; free some memory."


class NativeDecoder:
    """Holds a packed model's weights and runs step plans; a `model.decoder.Decoder`."""

    label = "compute: native kernels, sums over the ranks included"

    def __init__(
        self,
        library: Any,
        packed: PackedModel,
        store: KvStore,
        layout: ShardLayout,
        threads: int,
        ring: SharedMemory | None,
        cpus: Sequence[int] = (),
        beside: "NativeDecoder | None" = None,
        streamer: WeightStreamer | None = None,
    ) -> None:
        """`ring`: what sums over the ranks, with a lane for each thread. `cpus`: the cores to keep the threads on, one
        each; none: any. `beside`: a decoder that never computes at the same time, whose threads this one uses.
        `streamer`: what reads the weights that are not in memory; it is closed with this."""
        self._library = library
        self.level: str = library.level  # of instructions (`native/library.py`)
        self._store = store
        self.packed = packed
        self._streamer = streamer
        # Address of the number of layers whose blocks are there, of the step that comes; 0: all are.
        self.restored = 0
        self._handle: int | None = None
        self._layers = (RzLayer * len(packed.layers))()
        self._experts: list[RzExperts] = []
        self._recurrent: list[RzRecurrent] = []
        self._latents: list[RzLatent] = []
        # uint8 [num_quantized, KV heads] of each layer whose full blocks are in a file: `rz_layer.asked`.
        self._asked: list[Tensor] = []
        self._fetches = FetchSteps()
        self.adapters = NativeAdapters()
        for index, layer in enumerate(packed.layers):
            self._describe_layer(index, layer)
        self._model = self._describe_model(layout, ring)
        self.vocab_rows = self._model.head.outputs
        self._beside = beside  # for as long as its threads are used
        if beside is not None:
            self._handle = library.rz_decoder_beside(ctypes.byref(self._model), beside.handle)
        else:
            cores = (ctypes.c_int * threads)(*cpus) if cpus else None
            self._handle = library.rz_decoder_new(ctypes.byref(self._model), threads, cores)
        if not self._handle:
            raise ConfigurationError(_NO_ROOM)

    @property
    def handle(self) -> int:
        assert self._handle is not None, "the decoder is closed"
        return self._handle

    def forward(self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array) -> tuple[Tensor, Floats]:
        """Logits are float32. Raises IndexError, too, for a plan that names what does not exist."""
        logits, pooled, _ = self._forward(plan, progress, pools, np.empty(0, np.int32))
        return logits, pooled

    def forward_with_states(
        self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array, layers: Sequence[int]
    ) -> tuple[Tensor, Floats, Tensor]:
        taps = np.array(layers or (len(self.packed.layers),), np.int32)
        return self._forward(plan, progress, pools, taps)

    def _forward(
        self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array, taps: Int32Array
    ) -> tuple[Tensor, Floats, Tensor]:
        rows = len(plan.token_ids) // _INT
        logits = torch.empty((len(plan.sample_rows) // _INT, self.vocab_rows), dtype=torch.float32)
        pooled = np.zeros((len(pools), self._model.hidden if len(pools) else 0), np.float32)
        tapped = torch.empty((rows, len(taps) * self._model.hidden), dtype=torch.float32)
        self._run(
            plan,
            progress,
            logits=logits.data_ptr(),
            pools=pools.ctypes.data,
            pooled=pooled.ctypes.data,
            num_pools=len(pools),
            taps=taps.ctypes.data,
            tapped=tapped.data_ptr(),
            num_taps=len(taps),
        )
        return logits, pooled, tapped

    def forward_to_largest(self, plan: StepPlan, progress: ProgressCounter) -> tuple[Tensor, Tensor]:
        """`forward`, and then `largest` of its logits, which are not written to memory for it."""
        sampled = len(plan.sample_rows) // _INT
        values, tokens = torch.empty(sampled), torch.empty(sampled, dtype=torch.int64)
        self._run(plan, progress, values=values.data_ptr(), indices=tokens.data_ptr())
        return values, tokens

    def _run(self, plan: StepPlan, progress: ProgressCounter, **results: int) -> None:
        step = RzStep(
            tokens=len(plan.token_ids) // _INT,
            sequences=len(plan.query_lens) // _INT,
            sampled=len(plan.sample_rows) // _INT,
            table_blocks=len(plan.block_tables) // _INT,
            num_compressions=len(plan.compressions) // (2 * _INT),
            num_states=len(plan.state_slots) // _INT,
            num_snapshots=len(plan.state_snapshots) // (2 * _INT),
            num_sparse=len(plan.sparse) // (FIELDS * _INT),
            progress=progress.address,
            **results,
            **self.adapters.arguments(plan),
            **{name: _address(getattr(plan, name)) for name in _ARRAYS},
        )
        if self._streamer is not None:
            self._streamer.progress = progress
        step.restored = self.restored or None
        step.fetch = self._fetches.next(disk_reads()) if self._asked else 0
        result = self._library.rz_decoder_forward(self._handle, ctypes.byref(step))
        if result == _RING_LOST:
            raise RingLost("A rank of the ring is gone; the ring is restarted and the request continues.")
        if result == _BAD_PLAN:
            raise IndexError("the step plan names KV blocks, slots or rows that do not exist")
        if result == _NO_MEMORY:
            raise ConfigurationError(_NO_ROOM)

    @property
    def pages(self) -> list[int]:
        """The page layer that each layer attends to."""
        return [layer.page for layer in self.packed.layers]

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.largest(logits)

    @property
    def rows(self) -> NativeRows:
        """Searches its logits, and draws from them."""
        return NativeRows(self._library, self.handle)

    def level_with_finite_logits(self, plan: StepPlan) -> str:
        """Another level at which the processor computes finite logits of `plan`; empty: none, or its ranks or weights
        that are not in memory forbid the trial."""
        if self._model.ring or self._streamer is not None:
            return ""
        others = [level for level in levels() if level != self.level]
        return next((level for level in others if self._is_finite_at(kernels_at(level), plan)), "")

    def _is_finite_at(self, kernels: Any, plan: StepPlan) -> bool:
        own = self._library, self._handle
        handle = kernels.rz_decoder_new(ctypes.byref(self._model), 1, None)
        if not handle:
            return False
        self._library, self._handle = kernels, handle
        try:
            logits, _ = self.forward(plan, ProgressCounter.unread(), np.empty((0, 2), np.int32))
        finally:
            kernels.rz_decoder_free(handle)
            self._library, self._handle = own
        return bool(logits.isfinite().all())

    def spent(self) -> dict[str, float]:
        """Seconds that the steps so far have spent on each of `PARTS`."""
        nanoseconds = (ctypes.c_int64 * len(PARTS))()
        self._library.rz_decoder_spent(self._handle, nanoseconds)
        return {part: spent / 1e9 for part, spent in zip(PARTS, nanoseconds, strict=True)}

    def close(self) -> None:
        """Ends the threads. Safe to call twice."""
        if self._handle:
            self._library.rz_decoder_free(self._handle)
            self._handle = None
        if self._streamer is not None:
            self._streamer.close()

    def __del__(self) -> None:
        self.close()

    def _describe_layer(self, index: int, layer: PackedLayer) -> None:
        into = self._layers[index]
        for name in ("qkv", "output", "gate_up", "down", "input_gate", "input_projection"):
            if (linear := getattr(layer, name)) is not None:
                setattr(into, name, linear.describe())
                self.adapters.attach(linear, getattr(into, name))
        if layer.experts is not None:
            self._experts.append(self._describe_experts(layer.experts))
            self._experts[-1].streamed = self._streamer is not None and index in self._streamer.layers
            into.experts = ctypes.pointer(self._experts[-1])
        for name, weight in layer.norms.items():
            setattr(into, name, weight.data_ptr())
        into.scale = layer.scale
        if layer.recurrent is not None:
            assert self._store.states is not None, "the store was made without slots"
            tensors = self._store.states.tensors(len(self._recurrent))
            self._recurrent.append(layer.recurrent.describe(tensors["conv"], tensors.get("recurrent")))
            into.recurrent = ctypes.pointer(self._recurrent[-1])
            return
        into.rotary, into.window, into.gated = layer.rotary, layer.window, layer.gated
        into.heads, into.reads_only = layer.heads, layer.reads_only
        into.keys_are_values, into.norms_values = layer.keys_are_values, layer.norms_values
        if layer.latent is not None:
            self._latents.append(layer.latent.describe())
            self.adapters.attach_latent(layer.latent, self._latents[-1])
            into.latent = ctypes.pointer(self._latents[-1])
        writable = self._store.writable(layer.page)
        into.writable, into.num_writable = writable.data_ptr(), writable.shape[0]
        codec, scales = self._store.codec(layer.page), self._store.scales(layer.page)
        into.codec = 0 if codec is None else codec.number
        into.in_groups = self._store.shape.is_in_groups(layer.page)
        into.codes = self._store.codes(layer.page).data_ptr()
        into.scales = None if scales is None else scales.data_ptr()
        if self._store.is_mapped(layer.page):
            blocks, _, heads, *_ = self._store.codes(layer.page).shape
            self._asked.append(torch.zeros((blocks, heads), dtype=torch.uint8))
            into.asked = self._asked[-1].data_ptr()
        if layer.page in self._store.shape.choosing and not layer.reads_only:
            self._describe_summaries(layer.page, into)

    def _describe_summaries(self, page: int, into: RzLayer) -> None:
        into.chooses = True
        summary = self._store.shape.summary_of(page)
        if summary is not None:
            into.summaries = self._store.writable(summary).data_ptr()
            into.quantized_summaries = self._store.codes(summary).data_ptr()

    def _describe_experts(self, experts: PackedExperts) -> RzExperts:
        described = experts.describe()
        self.adapters.attach(experts.router, described.router)
        self.adapters.attach(experts.gate_up, described.gate_up, experts.count)
        self.adapters.attach(experts.down, described.down, experts.count)
        if experts.shared_gate is not None:
            self.adapters.attach(experts.shared_gate, described.shared_gate)
        return described

    def _describe_model(self, layout: ShardLayout, ring: SharedMemory | None) -> RzModel:
        packed, states = self.packed, self._store.states
        model = RzModel(
            layers=len(packed.layers),
            hidden=packed.head.inputs,
            intermediate=max(max(layer.down.inputs, layer.input_gate.outputs) for layer in self._layers),
            num_heads=len(packed.heads),
            block_size=self._store.block_size,
            activation=ACTIVATIONS[packed.activation],
            num_writable=self._store.num_writable,
            num_quantized=self._store.num_quantized,
            num_states=0 if states is None else states.num_slots,
            embedding_split=packed.is_split,
            vocab_first=packed.first_token,
            rows_in_embedding=packed.embedding.outputs,
            ranks=layout.world_size,
            layer=self._layers,
            final_norm=packed.final_norm.data_ptr(),
            embedding=packed.embedding.describe(),
            head=packed.head.describe(),
            **asdict(packed.scalars),
        )
        for index, (frequencies, scale) in enumerate(packed.frequencies):
            model.frequencies[index] = frequencies.data_ptr()
            model.rotary_dim[index] = 2 * frequencies.shape[0]
            model.rotary_scale[index] = scale
        for index, counts in enumerate(packed.heads):
            own = (layer.latent for layer in packed.layers if layer.latent and layer.heads == index)
            latent = next((latent.shape for latent in own), None)
            model.heads[index] = _heads_of(ShardLayout.of(counts, layout.world_size, layout.rank), latent)
        if packed.inputs is not None:
            model.inputs = packed.inputs.describe()
            self.adapters.attach(packed.inputs.projection, model.inputs.projection)
        if self._streamer is not None:
            model.place = ctypes.pointer(self._streamer.place)
        if ring is not None:
            model.ring, model.ring_timeout_ns = ring.handle, ring.timeout_ns
        return model


def _heads_of(layout: ShardLayout, latent: LatentShape | None) -> RzHeads:
    heads = RzHeads(
        q_heads=layout.q_heads.size,
        kv_heads=layout.kv_heads.size,
        lines=2 if latent is None else 1,
        key_dim=layout.head_dim if latent is None else latent.rank + latent.rotated,
        value_dim=layout.head_dim if latent is None else latent.rank,
        first_output=layout.output_heads.start - layout.q_heads.start,
        shared_in_ring=layout.num_shared_heads,
        shared_here=len(layout.shared_heads),
    )
    for index, shared in enumerate(layout.shared_heads):
        heads.shared[index] = RzSharedHead(shared.kv_head, shared.slot, shared.is_first, shared.first_share)
    keys = layout.counted_kv_heads
    heads.counted[0] = RzSpan(heads.first_output, layout.output_heads.size)
    heads.counted[1] = RzSpan(keys.start - layout.kv_heads.start, keys.size)
    heads.all[0], heads.all[1] = layout.total.q_heads, layout.total.kv_heads
    return heads


_ARRAYS = (
    *("token_ids", "positions", "slots", "query_lens", "context_lens", "block_tables", "sample_rows"),
    *("compressions", "state_slots", "state_snapshots", "adapters", "sparse"),
)


def _address(payload: bytes) -> int | None:
    return ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p).value
