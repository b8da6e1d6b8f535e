"""Mixers whose states fade number by number: the selective scan of Mamba 1, and RecurrentGemma's gated recurrence
(RG-LRU). How they are split over the ranks, and computed from whatever state a chunk begins with.

    state_t = decay_t * state_(t-1) + added_t        each number for itself, float32

transformers' scan over several tokens begins with zeros, whatever the cache holds. This one goes from token to token
too, with one product and sum each, for all that comes before and behind the states is computed for a block of tokens
at once. Sums of logarithms of decays, which would do without the loop, leave the range of float32 within few tokens.

    Mamba     in_proj      [all x | all gates]                  conv1d, dt_proj, A_log, D, inputs of out_proj by channel
              x_proj       inputs by channel: its outputs [dt | B | C] are summed over the ranks, normed behind the sum
      Zamba   in_proj      [x, gate] of a channel, then the next one's
              x_proj, dt_proj   parameters with a matrix for each head; a rank holds the same channels of every head
    RG-LRU    linear_x, linear_y, conv_1d, recurrent_param, inputs of linear_out by heads;  gates: a matrix for each

Sources: Gu and Dao, "Mamba", https://arxiv.org/abs/2312.00752, section 3; De et al., "Griffin",
https://arxiv.org/abs/2402.19427, section 2.4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.model.parallel.layers import TensorSlice, merged, shifted
from services.executor.model.parallel.mixers.split import MixerSplit, output_span
from services.executor.model.recurrent import StateCache
from services.executor.model.states.scans import ScanSizes, gate_heads

_BLOCK = 32  # tokens whose states are in memory at once

# [n, T, heads, channels] of this rank -> [n, T, heads, rank + 2 states], summed over the ranks.
Project = Callable[[Tensor], Tensor]


def selective_scan(config: Any, layout: ShardLayout) -> MixerSplit:
    """Of Mamba 1, Falcon Mamba and Jamba, whose channels are one head."""
    sizes = ScanSizes.of(config)
    span = layout.dimension(sizes.width)

    def adapt(mixer: Any, collectives: Collectives) -> None:
        _scan_by(mixer, sizes, lambda inner: mixer.x_proj(inner.squeeze(2)).unsqueeze(2))

    return MixerSplit(
        outputs={"in_proj": merged([span, shifted(span, sizes.width)])},
        channels={"conv1d": (span,)},
        values=dict.fromkeys(("dt_proj.weight", "dt_proj.bias", "A_log", "D"), (span,)),
        inputs={"x_proj": (span, 0), "out_proj": (span, 0)},
        adapt=adapt,
    )


def selective_scan_by_heads(config: Any, layout: ShardLayout) -> MixerSplit:
    """Of Zamba, of whose heads each has projections of its own."""
    sizes = ScanSizes.of(config)
    span = layout.dimension(sizes.width)
    channels = merged([shifted(span, head * sizes.width) for head in range(sizes.heads)])

    def adapt(mixer: Any, collectives: Collectives) -> None:
        def project(inner: Tensor) -> Tensor:
            made = torch.einsum("nthc,hoc->ntho", inner, mixer.x_proj_weight)
            return collectives.all_reduce(made.contiguous())

        _scan_by(mixer, sizes, project)

    piece = TensorSlice(1, (span,), sizes.width)
    return MixerSplit(
        outputs={"in_proj": tuple(part.scaled(2) for part in channels)},
        channels={"conv1d": channels},
        values={
            **dict.fromkeys(("dt_proj_weight", "dt_proj_bias", "A_log", "D"), piece),
            "x_proj_weight": TensorSlice(2, (span,), sizes.width),
        },
        inputs={"out_proj": (channels, 0)},
        adapt=adapt,
    )


def _scan_by(mixer: Any, sizes: ScanSizes, project: Project) -> None:
    """Has transformers' `mixer` compute with a slot of states."""
    norms = [getattr(mixer, f"{name}_layernorm", nn.Identity()) for name in ("dt", "b", "c")]
    by_channel = hasattr(mixer, "x_proj_weight")

    def forward(hidden_states: Tensor, cache_params: StateCache, **others: object) -> Tensor:
        projected = mixer.in_proj(hidden_states)
        if by_channel:
            inner, gate = projected.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            inner, gate = projected.chunk(2, dim=-1)
        inner = mixer.act(convolved(mixer.conv1d, inner, cache_params)).unflatten(-1, (sizes.heads, -1))
        parts = torch.split_with_sizes(project(inner), (sizes.rank, sizes.states, sizes.states), -1)
        step, entry, reading = (norm(part) for norm, part in zip(norms, parts, strict=True))
        mixed = _scanned(mixer, inner.float(), _step(mixer, step), entry.float(), reading.float(), cache_params)
        gated = mixed.flatten(2) * functional.silu(gate.float())
        out: Tensor = mixer.out_proj(gated.to(hidden_states.dtype))
        return out

    mixer.forward = forward


def convolved(convolution: nn.Conv1d, inner: Tensor, cache: StateCache) -> Tensor:
    """`inner` [n, T, channels] behind the window of the cache, without an activation: the same shape."""
    known = cache.update_conv_state(inner.transpose(1, 2), 0)
    made = functional.conv1d(known, convolution.weight, convolution.bias, groups=convolution.groups)
    return made.transpose(1, 2)


def _step(mixer: Any, step: Tensor) -> Tensor:
    """How far each channel moves, float32 [n, T, heads, channels], of `step` [n, T, heads, rank].

    The bias is added in float32: most of it is far below 0, and what is left there of a rounded sum is a few percent.
    """
    if hasattr(mixer, "dt_proj"):
        made, bias = functional.linear(step, mixer.dt_proj.weight), mixer.dt_proj.bias
    else:
        made, bias = torch.einsum("nthr,hcr->nthc", step, mixer.dt_proj_weight), mixer.dt_proj_bias
    return functional.softplus(made.float() + bias.float())


def _scanned(mixer: Any, inner: Tensor, step: Tensor, entry: Tensor, reading: Tensor, cache: StateCache) -> Tensor:
    """What is read of the states, float32 [n, T, heads, channels]; all float32.

    `inner`, `step` [n, T, heads, channels]; `entry`, `reading` (B and C) [n, T, heads, states].
    """
    state = cache.tensors["recurrent"]
    rates = -torch.exp(mixer.A_log.float()).view(state.shape[1:])
    through: Tensor = inner * mixer.D.float().view(state.shape[1:-1])
    moved = step * inner
    parts = []
    for first in range(0, inner.shape[1], _BLOCK):
        block = slice(first, first + _BLOCK)
        decay = torch.exp(step[:, block, ..., None] * rates)
        added = moved[:, block, ..., None] * entry[:, block, :, None]
        states = recurred(decay, added, state)
        state = states[:, -1]
        parts.append((states @ reading[:, block, ..., None]).squeeze(-1))
    cache.update_recurrent_state(state, 0)
    return torch.cat(parts, dim=1) + through


_SHARPNESS = 8.0  # of RG-LRU's decays: the `c` of its paper


def gated_recurrence(config: Any, layout: ShardLayout) -> MixerSplit:
    """Of RecurrentGemma: a convolution, and a recurrence whose gates are made head by head."""
    heads = gate_heads(config, layout)
    span = heads.q_heads.scaled(heads.head_dim)
    of_heads = TensorSlice(0, (heads.q_heads,), heads.total.q_heads)
    gates = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")
    return MixerSplit(
        outputs={"linear_x": (span,), "linear_y": (span,)},
        channels={"conv_1d": (span,)},
        values={"rg_lru.recurrent_param": (span,), **{f"rg_lru.{gate}": of_heads for gate in gates}},
        inputs={"linear_out": output_span(heads, heads.head_dim)},
        adapt=_recur_by_gates,
    )


def _recur_by_gates(mixer: Any, collectives: Collectives) -> None:
    unit = mixer.rg_lru

    def forward(input_states: Tensor, position_ids: Tensor, cache: StateCache, **others: object) -> tuple[Tensor, None]:
        inner = convolved(mixer.conv_1d, mixer.linear_x(input_states), cache)
        entry = _head_gate(inner, unit.input_gate_weight, unit.input_gate_bias)
        fading = _head_gate(inner, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        exponent = -_SHARPNESS * fading * functional.softplus(unit.recurrent_param.float())
        begins = (position_ids == 0).unsqueeze(-1)
        scale = torch.sqrt(-torch.expm1(2 * exponent)).masked_fill(begins, 1.0)
        added = inner.float() * entry * scale
        states = recurred(torch.exp(exponent), added, cache.tensors["recurrent"])
        cache.update_recurrent_state(states[:, -1], 0)
        gated = states.to(input_states.dtype) * mixer.act_fn(mixer.linear_y(input_states))
        return mixer.linear_out(gated), None

    mixer.forward = forward


def _head_gate(inner: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """From 0 to 1, float32 as `inner` [n, T, channels], of products within each head: `weight` [heads, w, w]."""
    by_head = inner.view(*inner.shape[:2], *bias.shape)
    made = torch.einsum("nthi,hio->ntho", by_head, weight) + bias
    return torch.sigmoid(made.flatten(2).float())


def recurred(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """The state behind each token, in the place of `added`. `decay`, `added` [n, T, ...], `state` [n, ...]."""
    for token in range(added.shape[1]):
        row = added[:, token]
        state = torch.addcmul(row, decay[:, token], state, out=row)
    return added
