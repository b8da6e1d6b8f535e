"""Brings the step's context, and the paged attention, to models that do not pass them on.

A step reaches attention as a keyword argument. Some models drop it on the way, and some (Falcon, BLOOM,
GPT-J) do not use transformers' `AttentionInterface` either. What every model passes to every layer is the
past keys and values, so in those the step travels in their place:

    model(step=...) ─▶ past_key_values = step ─▶ layers ─▶ attention: takes the step out again

and an attention module without the interface gets a forward of ours: the model's own projections and rotary
embedding around the paged attention.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj

from services.executor.core.sharding import ShardLayout
from services.executor.model.attention import ATTENTION_NAME, paged_attention
from services.executor.model.step_context import KeyBias, StepContext

_STEP_DROPPED = frozenset({"nemotron", "stablelm"})
"""Architectures whose layers hand their attention no further arguments."""

_Forward = Callable[..., tuple[Tensor, None]]


def attention_to_build_with(config: Any) -> str:
    """The attention implementation that the model of `config` must be built with."""
    return "eager" if config.model_type in _FORWARDS else ATTENTION_NAME


def rewire_attention(
    model: Any, config: Any, attentions: Mapping[str, nn.Module], layout: ShardLayout
) -> None:
    """Makes the attention modules of an architecture without `AttentionInterface` paged; others stay."""
    make_forward = _FORWARDS.get(config.model_type)
    if make_forward is None and config.model_type not in _STEP_DROPPED:
        return
    model.register_forward_pre_hook(_step_as_cache, with_kwargs=True)
    for attention in attentions.values():
        if make_forward is None:
            attention.register_forward_pre_hook(_cache_as_step, with_kwargs=True)
        else:
            attention.forward = make_forward(attention, config, layout)
    for module in model.modules():
        if hasattr(module, "slow_but_exact"):
            module.slow_but_exact = False  # it reads weights past their layers; its sum is the same
    # Nobody reads the mask that these models would build for their own attention.
    model.config._attn_implementation = ATTENTION_NAME  # noqa: SLF001  # no public name


class _StepAsCache:
    """A step in the place of past keys and values; for the model an empty cache."""

    def __init__(self, step: StepContext):
        self.step = step

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return query_length, 0


def _step_as_cache(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    step = named.pop("step")
    return arguments, {**named, "past_key_values": _StepAsCache(step)}


def _cache_as_step(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {**named, "past_key_values": None, "step": named["past_key_values"].step}


def _falcon(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    bias = None
    if config.alibi:
        # Rounded to bfloat16 as the model was trained.
        _hold_slopes(attention, layout, torch.bfloat16)
        bias = partial(_bias, attention, layout.head_dim**-0.5)

    def forward(
        hidden: Tensor,
        *,
        layer_past: _StepAsCache,
        position_embeddings: tuple[Tensor, Tensor],
        **others: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = _by_group(attention.query_key_value(hidden), layout)
        if bias is None:
            query, key = rotate_falcon(query, key, *position_embeddings)
        attended = _attend(attention, query, key, value, layer_past, bias)
        return attention.dense(attended), None

    return forward


def _bloom(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    _hold_slopes(attention, layout, torch.float32)
    bias = partial(_bias, attention, 1.0)

    def forward(
        hidden: Tensor, residual: Tensor, *, layer_past: _StepAsCache, **others: Any
    ) -> tuple[Tensor, None]:
        query, key, value = _by_group(attention.query_key_value(hidden), layout)
        attended = _attend(attention, query, key, value, layer_past, bias)
        return attention.dense(attended) + residual, None

    return forward


def _gptj(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    rotary: int = config.rotary_dim or layout.head_dim

    def forward(
        hidden_states: Tensor, *, layer_past: _StepAsCache, position_ids: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        heads = (*hidden_states.shape[:-1], -1, layout.head_dim)
        query = attention.q_proj(hidden_states).view(heads)
        key = attention.k_proj(hidden_states).view(heads)
        value = attention.v_proj(hidden_states).view(heads).transpose(1, 2)
        waves = attention.embed_positions[position_ids].to(key.dtype)
        sin, cos = waves.chunk(2, dim=-1)
        query, key = (
            torch.cat((rotate_gptj(part[..., :rotary], sin, cos), part[..., rotary:]), dim=-1).transpose(1, 2)
            for part in (query, key)
        )
        attended = _attend(attention, query, key, value, layer_past, None)
        return attention.out_proj(attended), None

    return forward


_FORWARDS: Mapping[str, Callable[[Any, Any, ShardLayout], _Forward]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gptj": _gptj,
}


def _attend(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, cache: _StepAsCache, bias: KeyBias | None
) -> Tensor:
    """[1, heads, T, d] each -> [1, T, q heads * d]."""
    attended, _ = paged_attention(attention, query, key, value, None, step=cache.step, key_bias=bias)
    return attended.flatten(2)


def _by_group(projected: Tensor, layout: ShardLayout) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, heads, T, d] of [1, T, rows] whose rows are query heads, key and value, KV head by KV head."""
    groups = projected.view(*projected.shape[:2], layout.kv_heads.size, layout.q_per_kv + 2, layout.head_dim)
    query = groups[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), groups[..., -2, :].transpose(1, 2), groups[..., -1, :].transpose(1, 2)


def _hold_slopes(attention: nn.Module, layout: ShardLayout, dtype: torch.dtype) -> None:
    """Keeps in `attention` the slope of each of this rank's query heads: [kv heads, group].

    Source: Press et al., "ALiBi", https://arxiv.org/abs/2108.12409, section 3 and its published code for
    head counts that are no power of two.
    """
    heads = layout.total.q_heads
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    slopes += [2 ** (-4 * (2 * index + 1) / power) for index in range(heads - power)]
    local = slopes[layout.q_heads.start : layout.q_heads.stop]
    held = torch.tensor(local, dtype=dtype).view(layout.kv_heads.size, layout.q_per_kv, 1)
    attention.register_buffer("alibi_slopes", held, persistent=False)


def _bias(attention: Any, scale: float, positions: Tensor) -> Tensor:
    biases: Tensor = attention.alibi_slopes * positions
    return biases.float() * scale
