"""Mamba 2: a state space whose heads each fade at a rate of their own. How it is split over the ranks, and computed
from whatever state a chunk begins with.

    state = exp(A dt) * state + dt * x B^T        [head dim, state size] of a head, float32; dt of each head and token
    out   = state C + D x

Heads come in groups that share B and C, as query heads share a KV head, and are split as those are. A group is held by
each rank that has one of its heads.

    in_proj      [all gates | all x | all B | all C | all dt]
    conv1d       [all x | all B | all C]
    norm         of the gated outputs, over the heads of each group: where they are on several ranks, these sum squares
    A_log, D, dt_bias: one number each;  out_proj: inputs by heads

transformers' own takes the steps as they come where it goes on from a state with one token, and clamps them where it
computes several. Here every token's step is clamped.
Source: Dao and Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060, sections 6 and 7.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.model.parallel.layers import TensorSlice, hold, merged, shifted
from services.executor.model.parallel.mixers.split import MixerSplit, Spans, output_span
from services.executor.model.recurrent import StateCache
from services.executor.model.states.scans import StateSpaceSizes

# Tokens: within a block work grows with its square, between blocks it is one product with the state.
_BLOCK = 64


def state_space(config: Any, layout: ShardLayout) -> MixerSplit:
    sizes = StateSpaceSizes.of(config)
    heads = sizes.heads_of(layout)
    total, one_each = heads.total, (heads.q_heads,)
    inner, state = heads.q_heads.scaled(sizes.head_dim), heads.kv_heads.scaled(sizes.state)
    all_inner, all_states = total.q_heads * sizes.head_dim, total.kv_heads * sizes.state
    convolved = [inner, shifted(state, all_inner), shifted(state, all_inner + all_states)]
    steps = shifted(heads.q_heads, 2 * (all_inner + all_states))
    projected = merged([inner, *(shifted(span, all_inner) for span in convolved), steps])

    def adapt(mixer: Any, collectives: Collectives) -> None:
        _hold_multipliers(mixer, projected)
        mixer.forward = _forward_of(mixer, heads, sizes)

    return MixerSplit(
        outputs={"in_proj": projected},
        channels={"conv1d": merged(convolved)},
        values=dict.fromkeys(("A_log", "D", "dt_bias"), one_each),
        inputs={"out_proj": output_span(heads, sizes.head_dim)},
        replaced={"norm": lambda norm, ranks: GatedNorm(norm, heads, ranks)},
        adapt=adapt,
    )


def _hold_multipliers(mixer: Any, projected: Spans) -> None:
    """Falcon H1's: a number for each output of the projection."""
    multipliers: Tensor | None = getattr(mixer, "mup_vector", None)
    if multipliers is not None:
        held = torch.cat([multipliers[..., span.start : span.stop] for span in projected], dim=-1)
        mixer.register_buffer("mup_vector", held, persistent=False)


class GatedNorm(nn.Module):
    """A rank's share of what comes behind the scan: the gate, and an RMS norm over the heads of each group, if the
    model has one. `x` and `gate` [..., heads * head dim] -> the same, in float32.

    Some gate what is normed (`norm_before_gate`), the others norm what is gated.
    Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """

    weight: nn.Parameter

    def __init__(self, norm: Any, heads: ShardLayout, collectives: Collectives):
        super().__init__()
        span = heads.q_heads.scaled(heads.head_dim)
        self.columns = span  # what of a whole row it holds
        self._groups = heads.kv_heads
        self.all_groups = heads.total.kv_heads
        self.width = heads.total.q_heads // heads.total.kv_heads * heads.head_dim  # of a whole group
        # With fewer groups than ranks some are on several, and all ranks meet; else each rank has whole ones.
        self.spans_ranks = heads.total.kv_heads < heads.world_size
        self._collectives = collectives
        self.norms = not isinstance(norm, nn.Identity)
        self.gate_first = not getattr(norm, "norm_before_gate", False)
        if self.norms:
            self.epsilon: float = norm.variance_epsilon
            hold(self, "weight", norm.weight, TensorSlice(0, (span,), norm.weight.shape[0]))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = functional.silu(gate.float())
        if not self.norms:
            return x * gate
        if self.gate_first:
            x = x * gate
        groups = _parted(x, self._groups.size, -1)
        mean = self._squares(groups) / self.width
        normed = (groups * torch.rsqrt(mean + self.epsilon)).flatten(-2) * self.weight
        return normed if self.gate_first else normed * gate

    def _squares(self, groups: Tensor) -> Tensor:
        """[..., groups, 1] of `groups` [..., groups, width]: sums over the whole group, on whatever ranks it is."""
        squares = groups.square().sum(-1, keepdim=True)
        if not self.spans_ranks:
            return squares
        everywhere = squares.new_zeros((*squares.shape[:-2], self.all_groups, 1))
        own = slice(self._groups.start, self._groups.stop)
        everywhere[..., own, :] = squares
        return self._collectives.all_reduce(everywhere)[..., own, :]


def _forward_of(mixer: Any, heads: ShardLayout, sizes: StateSpaceSizes) -> Any:
    groups, each = heads.kv_heads.size, heads.q_per_kv
    inner, state = groups * each * sizes.head_dim, groups * sizes.state
    least, most = mixer.time_step_limit

    def forward(hidden_states: Tensor, cache_params: StateCache, **others: object) -> Tensor:
        projected = mixer.in_proj(hidden_states * getattr(mixer, "ssm_in_multiplier", 1.0))
        if hasattr(mixer, "mup_vector"):
            projected = projected * mixer.mup_vector.to(projected.dtype)
        gate, channels, steps = projected.split((inner, inner + 2 * state, groups * each), dim=-1)
        known = cache_params.update_conv_state(channels.transpose(1, 2), mixer.layer_idx)
        convolution = mixer.conv1d
        mixed = functional.conv1d(known, convolution.weight, convolution.bias, groups=convolution.groups)
        x, before, behind = mixer.act(mixed).transpose(1, 2).float().split((inner, state, state), dim=-1)
        taken = functional.softplus(steps.float() + mixer.dt_bias.float()).clamp(least, most)
        kept = cache_params.tensors["recurrent"]
        out, after = scanned(
            _parted(x, groups, each, -1),
            _parted(taken, groups, each),
            -torch.exp(mixer.A_log.float()).view(groups, each),
            _parted(before, groups, -1),
            _parted(behind, groups, -1),
            kept.view(kept.shape[0], groups, each, *kept.shape[2:]),
        )
        out = out + mixer.D.float().view(groups, each, 1) * x.view_as(out)
        cache_params.update_recurrent_state(after.flatten(1, 2), mixer.layer_idx)
        made: Tensor = mixer.out_proj(mixer.norm(out.flatten(2), gate).to(hidden_states.dtype))
        return made

    return forward


def _parted(x: Tensor, *sizes: int) -> Tensor:
    """With the last dimension cut into `sizes`."""
    return x.reshape(*x.shape[:-1], *sizes)


def scanned(
    x: Tensor, steps: Tensor, rates: Tensor, before: Tensor, behind: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [n, T, groups, heads, head dim], the state behind the last token), all float32.

    `x` [n, T, groups, heads, head dim], `steps` [n, T, groups, heads], `rates` [groups, heads], `before` (B) and
    `behind` (C) [n, T, groups, state size], `state` [n, groups, heads, head dim, state size].
    """
    parts = []
    for start in range(0, x.shape[1], _BLOCK):
        rows = slice(start, start + _BLOCK)
        out, state = _block(x[:, rows], steps[:, rows], rates, before[:, rows], behind[:, rows], state)
        parts.append(out)
    return torch.cat(parts, dim=1), state


def _block(
    x: Tensor, steps: Tensor, rates: Tensor, before: Tensor, behind: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `scanned`, of one block. `fades` are logarithms of what is left of the state before it, token by token."""
    fades = (steps * rates).cumsum(1).permute(0, 2, 3, 1)
    added = (x * steps.unsqueeze(-1)).permute(0, 2, 3, 1, 4)
    keys, queries = (part.permute(0, 2, 1, 3).unsqueeze(2) for part in (before, behind))
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    left = (fades.unsqueeze(-1) - fades.unsqueeze(-2)).masked_fill(hidden, float("-inf")).exp()
    out = (queries @ keys.transpose(-1, -2) * left) @ added
    out = out + fades.exp().unsqueeze(-1) * (queries @ state.transpose(-1, -2))
    last = fades[..., -1:]
    kept = added * (last - fades).exp().unsqueeze(-1)
    after = state * last.exp().unsqueeze(-1) + kept.transpose(-1, -2) @ keys
    return out.permute(0, 3, 1, 2, 4), after
