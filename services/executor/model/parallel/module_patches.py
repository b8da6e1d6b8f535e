"""Brings the step's context, and the paged attention, to models that do not pass them on.

A step reaches attention as a keyword argument. Some models drop it on the way, and some (Falcon, BLOOM, GPT-J,
MPT, XGLM, the first GPT) do not use transformers' `AttentionInterface` either. What nearly every model passes to every
layer is the past keys and values, so in those the step travels in their place:

    model(step=...) ─▶ past_key_values = step ─▶ layers ─▶ attention: takes the step out again

and an attention module without the interface gets a forward of ours: the model's own projections and rotary
embedding around the paged attention.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj
from transformers.models.jetmoe.modeling_jetmoe import apply_rotary_pos_emb as rotate_jetmoe

from services.executor.core.sharding import ShardLayout
from services.executor.families.registry import family_of
from services.executor.model.attention import ATTENTION_NAME, WINDOW_ATTRIBUTE, paged_attention
from services.executor.model.layer_states import keeps_latents
from services.executor.model.parallel.latent import LATENT_NAME
from services.executor.model.states.attention import KEY_BIAS_WIDTH
from services.executor.model.states.base import StatePlace
from services.executor.model.step_context import Chunks, KeyBias, StepContext
from shared.errors import ModelLoadError

_LEFT = "step_left"

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with
_Waves = tuple[Tensor, Tensor]  # cosines and sines of a step's positions
_Forward = Callable[..., tuple[Tensor | None, ...] | list[Tensor]]


def attention_to_build_with(config: Any) -> str:
    """The attention implementation that the model of `config` must be built with."""
    family = family_of(config.model_type)
    if keeps_latents(config.model_type):
        return LATENT_NAME
    return "eager" if family.own_attention else ATTENTION_NAME


def rewire_attention(model: Any, config: Any, attentions: Mapping[str, nn.Module], layout: ShardLayout) -> None:
    """Makes the attention modules of an architecture without `AttentionInterface` paged; others stay."""
    family = family_of(config.model_type)
    make_forward = _FORWARDS[family.own_attention] if family.own_attention else None
    if make_forward is None and not family.drops_step:
        return
    hook = _leave_step(attentions) if family.without_cache else _step_as_cache
    model.register_forward_pre_hook(hook, with_kwargs=True)
    if family.with_mask:
        model.register_forward_pre_hook(_any_mask, with_kwargs=True)
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


def attend_within_chunks(attention: Any, place: StatePlace) -> None:
    """Llama 4's, in layers that do not see everything."""
    if place.state.kind == "chunked":
        setattr(attention, WINDOW_ATTRIBUTE, Chunks(place.config.attention_chunk_size))


def scale_queries_by_position(attention: Any) -> None:
    """Has the paged attention scale the queries of Llama 4's layers without rotation, as their code does by a token's
    place in its batch, which is its position there and not here."""
    attention.attn_temperature_tuning = False
    if not attention.use_rope:
        attention.query_scales = partial(_temperature, attention.floor_scale, attention.attn_scale)


def _temperature(floor_scale: int, attn_scale: float, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0


def compute_chosen_logits(model: Any) -> None:
    """Has a model that does not know `logits_to_keep` compute those rows alone."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return
    rows: list[Tensor] = []

    def take(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        rows[:] = [named.pop("logits_to_keep")]
        return arguments, named

    def choose(module: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
        return arguments[0][:, rows[0]]

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.get_output_embeddings().register_forward_pre_hook(choose)


class _StepAsCache:
    """A step in the place of past keys and values; for the model an empty cache."""

    def __init__(self, step: StepContext):
        self.step = step

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return query_length, 0


def _step_as_cache(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Arguments:
    step = named.pop("step")
    return arguments, {**named, "past_key_values": _StepAsCache(step)}


def _leave_step(attentions: Mapping[str, nn.Module]) -> Callable[..., _Arguments]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Arguments:
        step = _StepAsCache(named.pop("step"))
        for attention in attentions.values():
            attention.__dict__[_LEFT] = step
        return arguments, named

    return hook


def _any_mask(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Arguments:
    return arguments, {**named, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}


def _cache_as_step(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> _Arguments:
    return arguments, {**named, "past_key_values": None, "step": named["past_key_values"].step}


def _falcon(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    bias = None
    if config.alibi:
        # Rounded to bfloat16 as the model was trained.
        _hold_slopes(attention, layout, torch.bfloat16)
        bias = partial(_bias, attention, layout.head_dim**-0.5)

    def forward(
        hidden: Tensor, *, layer_past: _StepAsCache, position_embeddings: _Waves, **others: Any
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

    def forward(hidden: Tensor, residual: Tensor, *, layer_past: _StepAsCache, **others: Any) -> tuple[Tensor, None]:
        query, key, value = _by_group(attention.query_key_value(hidden), layout)
        attended = _attend(attention, query, key, value, layer_past, bias)
        return attention.dense(attended) + residual, None

    return forward


def _gptj(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _turned_in_pairs(attention, config, layout, lambda hidden: [_heads(p(hidden), layout) for p in projections])


def _codegen(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    return _turned_in_pairs(attention, config, layout, lambda hidden: _by_block(attention.qkv_proj(hidden), layout))


def _turned_in_pairs(
    attention: Any, config: Any, layout: ShardLayout, project: Callable[[Tensor], Sequence[Tensor]]
) -> _Forward:
    """With a table of waves by position. `project` makes q, k, v [1, heads, T, d]."""
    rotary: int = config.rotary_dim or layout.head_dim
    if not 0 < rotary <= layout.head_dim or rotary % 2:
        raise ModelLoadError(
            f"The model's config.json says rotary_dim {rotary}, which is no even part of a head of {layout.head_dim}; "
            "it is damaged, fetch the model again."
        )

    def forward(
        hidden_states: Tensor, *, layer_past: _StepAsCache, position_ids: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        query, key, value = project(hidden_states)
        sin, cos = attention.embed_positions[position_ids].to(key.dtype).chunk(2, dim=-1)
        query, key = (
            torch.cat((rotate_gptj(part[..., :rotary], sin, cos), part[..., rotary:]), dim=-1).transpose(1, 2)
            for part in (query.transpose(1, 2), key.transpose(1, 2))
        )
        return attention.out_proj(_attend(attention, query, key, value, layer_past, None)), None

    return forward


def _gpt_neox_japanese(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    rotary: int = attention.rotary_ndims

    def forward(
        hidden: Tensor, *, layer_past: _StepAsCache, position_embeddings: _Waves, **others: Any
    ) -> tuple[Tensor, None, Tensor]:
        query, key, value = _by_group(attention.query_key_value(hidden), layout)
        turned = rotate_falcon(query[..., :rotary], key[..., :rotary], *position_embeddings)
        query, key = (
            torch.cat((part, whole[..., rotary:]), dim=-1) for part, whole in zip(turned, (query, key), strict=True)
        )
        attended = _attend(attention, query, key, value, layer_past, None)
        return attention.dense(attended), None, attention.dense_bias

    return forward


def _gpt_neo(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    del attention.bias  # the mask of the longest context
    if attention.attention_type == "local":
        setattr(attention, WINDOW_ATTRIBUTE, config.window_size)
    return _unrotated(attention, config, layout, scaling=1.0)


def _mpt(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    _hold_slopes(attention, layout, torch.float32)
    bias, most = partial(_bias, attention, 1.0), config.attn_config.clip_qkv

    def forward(hidden: Tensor, *, past_key_values: _StepAsCache, **others: Any) -> tuple[Tensor, None]:
        projected = attention.Wqkv(hidden)
        if most:
            projected = projected.clamp(min=-most, max=most)
        query, key, value = _by_block(projected, layout)
        attended = _attend(attention, query, key, value, past_key_values, bias, scaling=attention.softmax_scale)
        return attention.out_proj(attended), None

    return forward


def _openai_gpt(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    def forward(hidden: Tensor, **others: Any) -> list[Tensor]:
        query, key, value = _by_block(attention.c_attn(hidden), layout)
        return [attention.c_proj(_attend(attention, query, key, value, attention.__dict__[_LEFT], None))]

    return forward


def _jetmoe(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    """Each of a token's experts makes a query for every KV head, and multiplies what those attend."""
    experts, keys, chosen = attention.experts, layout.kv_heads, attention.top_k
    heads = torch.arange(keys.start * chosen, keys.stop * chosen).view(keys.size, chosen, 1)
    # Of heads that several ranks hold one alone adds what they attend.
    counted = (heads >= layout.output_heads.start) & (heads < layout.output_heads.stop)
    attention.register_buffer("counted", counted, persistent=False)

    def forward(
        hidden_states: Tensor, *, past_key_values: _StepAsCache, position_embeddings: _Waves, **others: Any
    ) -> tuple[Tensor, None, None]:
        queries, _, topology = experts.map(hidden_states)
        tokens = hidden_states.shape[:2]
        query = queries.view(*tokens, chosen, keys.size, layout.head_dim).permute(0, 3, 2, 1, 4).flatten(1, 2)
        key, value = (_heads(part, layout) for part in attention.kv_proj(hidden_states).chunk(2, dim=-1))
        query, key = rotate_jetmoe(query, key, *position_embeddings)
        attended = _attend(attention, query, key, value, past_key_values, None)
        by_head = attended.view(*tokens, keys.size, chosen, layout.head_dim) * attention.counted
        return experts.reduce(by_head.transpose(2, 3).flatten(3), topology), None, None

    return forward


def _unrotated(attention: Any, config: Any, layout: ShardLayout, scaling: float | None = None) -> _Forward:
    """Projections of their own for queries, keys and values, which are attended as they are."""

    def forward(
        hidden: Tensor,
        *,
        past_key_values: _StepAsCache | None = None,
        layer_past: _StepAsCache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (_heads(projection(hidden), layout) for projection in projections)
        cache = past_key_values or layer_past
        assert cache is not None, "the model passes one of the two"
        return attention.out_proj(_attend(attention, query, key, value, cache, None, scaling)), None

    return forward


def _diffllama(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    """The difference of two softmaxes over the same values: a head is two, its keys and values side by side.

    Each query is asked twice, beside zeros in the place of the other, and the values are read once.
    """
    half = layout.head_dim // 2

    def forward(
        hidden_states: Tensor, *, past_key_values: _StepAsCache, position_embeddings: _Waves, **others: Any
    ) -> tuple[Tensor, None]:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        parts = (p(hidden_states).view(1, hidden_states.shape[1], -1, half).transpose(1, 2) for p in projections)
        query, key, value = parts
        query, key = rotate_falcon(query, key, *position_embeddings)
        key, value = (torch.cat(part.chunk(2, dim=1), dim=-1) for part in (key, value))
        first, second = query.chunk(2, dim=1)
        asked = torch.stack((pad(first, (0, half)), pad(second, (half, 0))), dim=2).flatten(1, 2)
        attended = _attend(attention, asked, key, value, past_key_values, None, half**-0.5)
        plus, minus = attended.view(*attended.shape[:2], -1, 2, 2 * half).unbind(-2)
        weight = _difference_weight(attention).to(query.dtype) + attention.lambda_init
        normed = (1 - attention.lambda_init) * attention.groupnorm(plus - weight * minus)
        return attention.o_proj(normed.flatten(2)), None

    return forward


def _difference_weight(attention: Any) -> Tensor:
    pairs = ((attention.lambda_q1, attention.lambda_k1), (attention.lambda_q2, attention.lambda_k2))
    first, second = (torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(q.dtype) for q, k in pairs)
    return first - second


def _doge(attention: Any, config: Any, layout: ShardLayout) -> _Forward:
    """A bias for each key, which follows from its value. It is kept behind the key, and a query reads it."""
    groups = (layout.kv_heads.start, layout.kv_heads.stop)
    rest = KEY_BIAS_WIDTH - 1
    scaling = layout.head_dim**-0.5

    def forward(
        hidden_states: Tensor, *, past_key_values: _StepAsCache, position_embeddings: _Waves, **others: Any
    ) -> tuple[Tensor, None]:
        projected = attention.v_proj(hidden_states)
        query, key = (_heads(projection(hidden_states), layout) for projection in (attention.q_proj, attention.k_proj))
        query, key = rotate_falcon(attention.q_norm(query), attention.k_norm(key), *position_embeddings)
        steps = attention.dt_proj(projected)[..., slice(*groups)]
        bias = torch.exp(attention.A * softplus(steps)).transpose(1, 2).unsqueeze(-1)
        key = torch.cat((key, pad(bias, (0, rest))), dim=-1)
        query = torch.cat((query, pad(torch.full_like(query[..., :1], 1 / scaling), (0, rest))), dim=-1)
        attended = _attend(attention, query, key, _heads(projected, layout), past_key_values, None, scaling)
        return attention.o_proj(attended), None

    return forward


# By `own_attention` of a family.
_FORWARDS: Mapping[str, Callable[[Any, Any, ShardLayout], _Forward]] = {
    "bloom": _bloom,
    "codegen": _codegen,
    "diffllama": _diffllama,
    "doge": _doge,
    "falcon": _falcon,
    "gpt_neo": _gpt_neo,
    "gpt_neox_japanese": _gpt_neox_japanese,
    "gptj": _gptj,
    "jetmoe": _jetmoe,
    "mpt": _mpt,
    "openai_gpt": _openai_gpt,
    "unrotated": _unrotated,
}


def _attend(
    attention: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: _StepAsCache,
    bias: KeyBias | None,
    scaling: float | None = None,
) -> Tensor:
    """[1, heads, T, d] each -> [1, T, q heads * d]."""
    attended, _ = paged_attention(attention, query, key, value, None, step=cache.step, key_bias=bias, scaling=scaling)
    return attended.flatten(2)


def _heads(projected: Tensor, layout: ShardLayout) -> Tensor:
    """[1, T, heads * d] -> [1, heads, T, d]."""
    return projected.view(*projected.shape[:2], -1, layout.head_dim).transpose(1, 2)


def _by_block(projected: Tensor, layout: ShardLayout) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, heads, T, d] of [1, T, rows] whose rows are all queries, then all keys, then all values."""
    counts = (layout.q_heads.size, layout.kv_heads.size, layout.kv_heads.size)
    query, key, value = torch.split_with_sizes(projected, [count * layout.head_dim for count in counts], -1)
    return _heads(query, layout), _heads(key, layout), _heads(value, layout)


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
