"""Which models our own decoders can run, and what they need to know of them.

A model is lowered when its layers have the shape that `native/decoder.h` and docs/adr/0020 draw. Its family must say so
(`lowered`): structure alone does not tell what a forward pass does between its modules. Everything else is read from
the modules, so that one function serves all of them. What only one decoder asks for, it checks itself.

One `Decoder` per kind of machine computes a lowered model in place of transformers' modules:

    CPU    cpu/decoder.py    kernels in C
    GPU    gpu/decoder.py    kernels in Triton between PyTorch's products
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.core.step_plan import Int32Array, StepPlan
from services.executor.families.family import LayerStyle
from services.executor.families.registry import family_of
from services.executor.model.lowered_experts import Routing, lower_experts, lower_experts_apart
from services.executor.model.lowered_inputs import LayerInput, ModelInputs, lower_inputs, lower_layer_input
from services.executor.model.lowered_latent import Latent, lower_latent
from services.executor.model.lowered_recurrent import CannotLower as CannotLower
from services.executor.model.lowered_recurrent import OutputRows, Recurrent, lower_recurrent
from services.executor.model.parallel.layers import LinearShard, VocabParallelEmbedding, WeightShard
from services.executor.model.states.base import layer_layouts
from services.executor.model.weight_formats import Weight


class Decoder(Protocol):
    """Holds a lowered model's weights and the rank's KV store, and runs step plans that compute some tokens."""

    @property
    def label(self) -> str: ...

    def forward(self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array) -> tuple[Tensor, Floats]:
        """Computes one step; `progress` counts the layers.

        Returns this rank's share of the logits of `plan.sample_rows`, float32 or the model's dtype [R, rows of the
        head]; and of `pools`, int32 [P, 2], the sums of the normed hidden states of the rows [first, end), float32
        [P, hidden]. Raises `RingLost` when another rank is gone.
        """
        ...

    def forward_with_states(
        self, plan: StepPlan, progress: ProgressCounter, pools: Int32Array, layers: Sequence[int]
    ) -> tuple[Tensor, Floats, Tensor]:
        """`forward`, and of all rows what `layers` read, side by side, [T, layers * hidden]; none: what comes behind
        the last norm."""
        ...

    def forward_to_largest(self, plan: StepPlan, progress: ProgressCounter) -> tuple[Tensor, Tensor]:
        """`forward`, and then `largest` of its logits."""
        ...

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(largest value [R], its token int64 [R]) of `logits` [R, V], contiguous. Of those that tie the one with the
        smallest id; NaN is larger than all."""
        ...


def sums_of(states: Tensor, pools: Int32Array) -> Floats:
    """float32 [P, hidden]: of `states` [T, hidden] the sum of the rows [first, end) of each of `pools` int32 [P, 2]."""
    if not len(pools):
        return np.zeros((0, 0), np.float32)
    sums: Floats = torch.stack([states[first:end].float().sum(dim=0) for first, end in pools.tolist()]).cpu().numpy()
    return sums


Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
Weights = tuple[Weight, Tensor | None]  # a linear's weight [out, in], plain or quantised, and its bias [out]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass
class LoweredLayer:
    """One layer. Norm weights are float32, on the model's device; linears are still the modules'."""

    # Where there are: `attention_norm`, `feed_forward_norm`, `after_attention_norm`, `after_feed_forward_norm`,
    # `after_input_norm` [hidden], `query_norm`, `key_norm` [head dim, or all heads' of this rank]; and `sinks`
    # [q heads], times log2(e).
    norms: dict[str, Tensor]
    attention: nn.Module | None  # None: there is `recurrent`
    latent: Latent | None  # of what `attention` keeps one line for all heads
    recurrent: Recurrent | None
    feed_forward: nn.Module | None  # of all rows; beside experts the shared one, if there is one
    routing: Routing | None
    rotary: int  # index of its set of frequencies; -1: it turns nothing
    window: int  # tokens that it sees back; 0: all
    page: int  # the page layer that it attends to; -1: none
    heads: int  # which of `Lowered.heads` it has; nothing where it does not attend
    reads_only: bool  # another layer stores what it attends to
    keys_are_values: bool  # as they are projected
    norms_values: bool
    scale: float  # what the residual is multiplied by after the layer
    input: LayerInput | None


@dataclass(frozen=True)
class Scalars:
    """The numbers of a model's forward pass; caps are 0 where there are none."""

    eps: float
    attention_scale: float
    attention_cap: float
    embedding_scale: float
    residual_scale: float  # of what attention and feed-forward add
    logit_scale: float
    logit_cap: float
    wide_norms: bool = False
    norms_turned: bool = False
    rotary_interleaved: bool = False
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0


@dataclass
class Lowered:
    """All of a model but its linears' weights."""

    family: LayerStyle
    heads: list[HeadCounts]  # of the whole model: as many kinds as there are
    layers: list[LoweredLayer]
    final_norm: Tensor
    embedding: nn.Module
    head: LinearShard
    # (radians per position float32 [rotary dim / 2], scale of cosines and sines)
    frequencies: list[tuple[Tensor, float]]
    scalars: Scalars
    activation: Activation
    inputs: ModelInputs | None  # of the layers
    names: dict[nn.Module, str]  # of the model's modules

    @property
    def native_alone(self) -> str:
        """What of it the native kernels alone compute; empty: nothing."""
        features = {
            "recurrent layers": any(layer.recurrent for layer in self.layers),
            "latent attention": any(layer.latent for layer in self.layers),
            "gates of attention": self.family.gated,
            "heads of several kinds": len(self.heads) > 1,
            "norms of values": self.family.norms_values,
            "inputs of layers": self.inputs is not None,
            "experts with norms of their own": any(layer.routing and layer.routing.norms for layer in self.layers),
            "norms over all heads": self.scalars.wide_norms,
            "norms after rotations": self.scalars.norms_turned,
            "interleaved rotations": self.scalars.rotary_interleaved,
            "clamped activations": self.activation == "swiglu_clamped",
            "attention sinks": any("sinks" in layer.norms for layer in self.layers),
            "layers without norms before them": any("attention_norm" not in layer.norms for layer in self.layers),
        }
        return ", ".join(name for name, there in features.items() if there)


def lower(model: Any, dtype: torch.dtype) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed, that computes in `dtype`.

    Raises `CannotLower` with the reason, on all ranks or on none.
    """
    config = model.config
    family = family_of(config.model_type).lowered
    if family is None:
        raise CannotLower(f"models of type {config.model_type} run through PyTorch")
    if getattr(config, "clip_qkv", None) is not None:
        raise CannotLower("queries, keys and values are clipped")
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    activation = _ACTIVATIONS.get(name)
    if getattr(config, "swiglu_limit", None) is not None:
        activation = "swiglu_clamped"
    if activation is None:
        raise CannotLower(f"the activation {name} is not among those that are lowered")
    base = model.model
    frequencies = _Frequencies(base.rotary_emb)
    of_layers = [layout.total for layout in layer_layouts(config, ShardLayout.from_config(config, 1, 0))]
    heads = list(dict.fromkeys(of_layers))
    layers = [
        _layer(layer, config, family, frequencies, _recurrent(layer, config.model_type), heads.index(of_layers[index]))
        for index, layer in enumerate(base.layers)
    ]
    return Lowered(
        family=family,
        heads=heads,
        layers=layers,
        final_norm=norm_weight(base.norm, family),
        embedding=base.embed_tokens,
        head=model.get_output_embeddings(),
        frequencies=frequencies.sets,
        scalars=_scalars(model, config, family, layers, dtype),
        activation=activation,
        inputs=lower_inputs(base, dtype),
        names={module: name for name, module in model.named_modules()},
    )


def qkv_of(attention: Any) -> list[Weights]:
    """Queries, keys and values of a layer, in one linear or in three."""
    return [weights_of(linear) for linear in qkv_linears_of(attention)]


def qkv_linears_of(attention: Any) -> list[Any]:
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [getattr(attention, name) for name in projections_of(attention)]


def projections_of(attention: Any) -> tuple[str, ...]:
    """What makes queries, keys and values of a layer, where it is not one linear: keys may be the values, or another
    layer's."""
    names = ("q_proj", "k_proj", "v_proj")
    if _reads_only(attention):
        return names[:1]
    return names[:2] if _keys_are_values(attention) else names


def _reads_only(attention: Any) -> bool:
    return bool(getattr(attention, "is_kv_shared_layer", False))


def _keys_are_values(attention: Any) -> bool:
    return not _reads_only(attention) and getattr(attention, "v_proj", attention) is None


def gated_rows_of(attention: Any) -> list[OutputRows]:
    """Queries, keys, values and gates of a layer whose query projection has a head's gate after its query."""
    size, linear = int(attention.head_dim), attention.q_proj
    both = [
        [OutputRows(linear, at, at + size) for at in range(begin, linear.stored.shape[0], 2 * size)]
        for begin in (0, size)
    ]
    return [*both[0], OutputRows.all(attention.k_proj), OutputRows.all(attention.v_proj), *both[1]]


def gate_up_of(feed_forward: Any) -> list[Weights]:
    """Gate and up projections of a layer, in one linear or in two."""
    return [weights_of(linear) for linear in gate_up_linears_of(feed_forward)]


def gate_up_linears_of(feed_forward: Any) -> list[Any]:
    fused = fused_gate_up_of(feed_forward)
    return [feed_forward.gate_proj, feed_forward.up_proj] if fused is None else [fused]


def fused_gate_up_of(feed_forward: Any) -> Any:
    """The linear that is a layer's gate and up projections; None: there are two."""
    return next((getattr(feed_forward, name) for name in _GATE_UP if hasattr(feed_forward, name)), None)


def down_of(feed_forward: Any) -> Any:
    return next(getattr(feed_forward, name) for name in _DOWN if hasattr(feed_forward, name))


_GATE_UP, _DOWN = ("gate_up_proj", "input_linear"), ("down_proj", "output_linear")


def weights_of(linear: Any) -> Weights:
    return linear.stored, linear.bias


def linears_of(layer: LoweredLayer) -> Iterator[LinearShard]:
    """The linears of a layer, whose plain weights go once a decoder has its own."""
    recurrent = None if layer.recurrent is None else layer.recurrent.module
    for part in (layer.attention, recurrent, layer.feed_forward):
        yield from (module for module in part.modules() if isinstance(module, LinearShard)) if part else ()
    if layer.input is not None:
        yield from layer.input


def release(module: nn.Module) -> None:
    """Empties the parameters of `module` itself, which a decoder has taken over."""
    if isinstance(module, WeightShard):
        module.keep_quantized(None)
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False))


def vocabulary(lowered: Lowered) -> tuple[Weight, int, bool]:
    """(embedding weight [rows, hidden], token of its first row, whether the ranks hold different rows)"""
    embedding: Any = lowered.embedding
    if isinstance(embedding, VocabParallelEmbedding):
        return embedding.stored, embedding.span.start, True
    return embedding.weight, 0, False


def _layer(
    layer: Any, config: Any, family: LayerStyle, frequencies: "_Frequencies", recurrent: Recurrent | None, heads: int
) -> LoweredLayer:
    attention, routing, latent = None if recurrent else layer.self_attn, None, None
    feed_forward = _feed_forward(layer)
    if hasattr(attention, "kv_b_proj"):
        latent = lower_latent(attention, config)
    elif attention is not None:
        _check_linears(attention, ("qkv_proj",), projections_of(attention), ("o_proj",))
    if hasattr(feed_forward, "experts"):
        routing = lower_experts(feed_forward, family.scores)
        shared = (getattr(owner, name, None) for owner in (feed_forward, layer) for name in _SHARED)
        feed_forward = next((part for part in shared if part is not None), None)
    elif getattr(layer, "enable_moe_block", False):
        routing = lower_experts_apart(layer, config)
    if feed_forward is not None:
        _check_linears(feed_forward, _GATE_UP, ("gate_proj", "up_proj"), _DOWN)
    return LoweredLayer(
        norms=_vectors(layer, attention, family),
        attention=attention,
        latent=latent,
        recurrent=recurrent,
        feed_forward=feed_forward,
        routing=routing,
        rotary=-1 if attention is None else frequencies.of(attention, config, family),
        window=0 if attention is None else _window(attention, config),
        page=-1 if attention is None else int(getattr(attention, "page", attention.layer_idx)),
        heads=heads,
        reads_only=_reads_only(attention),
        keys_are_values=_keys_are_values(attention),
        norms_values=family.norms_values and not _reads_only(attention),
        scale=float(getattr(layer, "layer_scalar", 1.0)),
        input=lower_layer_input(layer),
    )


def _vectors(layer: Any, attention: Any, family: LayerStyle) -> dict[str, Tensor]:
    """`LoweredLayer.norms`; `attention`: None where the layer does not attend."""
    norms = {} if family.last_norms else {"attention_norm": layer.input_layernorm}
    if family.last_norms:
        norms["after_attention_norm"] = layer.post_attention_layernorm
        norms["after_feed_forward_norm"] = layer.post_feedforward_layernorm
    elif family.post_norms:
        norms["after_attention_norm"] = layer.post_attention_layernorm
        norms["feed_forward_norm"] = layer.pre_feedforward_layernorm
        norms["after_feed_forward_norm"] = layer.post_feedforward_layernorm
    else:
        norms["feed_forward_norm"] = layer.post_attention_layernorm
    if (last_norm := getattr(getattr(layer, "mlp", None), "post_mlp_layernorm", None)) is not None:
        norms["after_feed_forward_norm"] = last_norm
    for query, key in (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm")):
        found = {"query_norm": getattr(attention, query, None), "key_norm": getattr(attention, key, None)}
        norms |= {name: norm for name, norm in found.items() if norm is not None}
    if lower_layer_input(layer) is not None:
        norms["after_input_norm"] = layer.post_per_layer_input_norm
    vectors = {name: norm_weight(norm, family) for name, norm in norms.items()}
    sinks: Tensor | None = getattr(attention, "sinks", None)
    if sinks is not None:
        vectors["sinks"] = sinks.detach().float() * math.log2(math.e)
    return vectors


def _feed_forward(layer: Any) -> Any:
    """The mixture of experts, where there is one: a shared expert may stand beside it, or alone."""
    names = ("mlp", "block_sparse_moe", "shared_mlp")
    return next(part for name in names if (part := getattr(layer, name, None)) is not None)


def _recurrent(layer: Any, model_type: str) -> Recurrent | None:
    """What keeps recurrent state in a layer in place of attention."""
    names = family_of(model_type).recurrent_modules
    found = (getattr(layer, name, None) for name in names)
    module = next((module for module in found if module is not None), None)
    return None if module is None else lower_recurrent(module)


_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


def _check_linears(part: Any, fused: tuple[str, ...], single: tuple[str, ...], last: tuple[str, ...]) -> None:
    """Of `fused` and of `last` there may be any one."""
    first = [name for name in fused if hasattr(part, name)] or single
    names = (*first, *(name for name in last if hasattr(part, name)))
    if len(names) == len(first) or not all(isinstance(getattr(part, name, None), LinearShard) for name in names):
        raise CannotLower(f"a {type(part).__name__} is built of other layers")


def norm_weight(norm: Any, family: LayerStyle) -> Tensor:
    """float32, as `LoweredLayer.norms` has them."""
    weight: Tensor = norm.weight.detach().float() + family.norm_offset
    return weight.contiguous()


def _window(attention: Any, config: Any) -> int:
    """As the model hands it to attention: some keep it in the layer, some in the configuration."""
    if not getattr(attention, "is_sliding", True):
        return 0
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return int(window or 0)


class _Frequencies:
    """The rotary frequencies of a model: one set, or one per type of layer; none where nothing turns."""

    def __init__(self, rotary: Any) -> None:
        self._names: list[str] = []
        self.sets: list[tuple[Tensor, float]] = []
        if rotary is None:
            return
        names = [name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]
        if not 1 <= len(names) <= 2:
            raise CannotLower(f"the model has {len(names)} sets of rotary frequencies")
        self._names = names
        for name in names:
            scaling = getattr(rotary, name.replace("inv_freq", "attention_scaling"), 1.0)
            self.sets.append((getattr(rotary, name).detach().float().contiguous(), float(scaling)))

    def of(self, attention: Any, config: Any, family: LayerStyle) -> int:
        """Index of the set that a layer turns by; -1 where it turns nothing."""
        alone = family.turns_windows_alone and config.sliding_window is not None
        turns = bool(self._names) and getattr(attention, "use_rope", True)
        if not turns or (alone and not attention.is_sliding):
            return -1
        if len(self._names) == 1:
            return 0
        return self._names.index(f"{config.layer_types[attention.layer_idx]}_inv_freq")


def _scalars(model: Any, config: Any, family: LayerStyle, layers: list[LoweredLayer], dtype: torch.dtype) -> Scalars:
    attention: Any = next((layer.attention for layer in layers if layer.attention is not None), None)
    scale = getattr(model.model.embed_tokens, "embed_scale", None)
    # Rounded as the model rounds it.
    embedding_scale = 1.0 if scale is None else float(scale.to(dtype))
    return Scalars(
        eps=float(config.rms_norm_eps),
        attention_scale=0.0 if attention is None else float(attention.scaling),
        attention_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        embedding_scale=float(getattr(config, "embedding_multiplier", embedding_scale))
        if family.scaled
        else embedding_scale,
        residual_scale=_residual_scale(model.model.layers[0], config) if family.scaled else 1.0,
        logit_scale=1.0 / float(config.logits_scaling) if family.scaled else 1.0,
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        wide_norms=family.wide_norms,
        norms_turned=family.norms_turned,
        rotary_interleaved=family.interleaved,
        swiglu_alpha=float(getattr(config, "swiglu_alpha", None) or 0.0),
        swiglu_limit=float(getattr(config, "swiglu_limit", None) or 0.0),
    )


def _residual_scale(layer: Any, config: Any) -> float:
    """In the configuration, or as a layer makes it of one."""
    return float(layer.residual_scale if hasattr(layer, "residual_scale") else config.residual_multiplier)
