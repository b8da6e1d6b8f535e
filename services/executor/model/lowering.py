"""Which models our own decoders can run, and what they need to know of them.

A model is lowered when its layers have the shape that `native/decoder.h` and docs/adr/0020 draw. Its type must be
listed here: structure alone does not tell what a forward pass does between its modules. Everything else is read
from the modules, so that one function serves all of them. What only one decoder asks for, it checks itself.

One `Decoder` per kind of machine computes a lowered model in place of transformers' modules:

    CPU    cpu/decoder.py    kernels in C
    GPU    gpu/decoder.py    kernels in Triton between PyTorch's products
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from services.executor.core.progress import Progress
from services.executor.core.prompt_results import Floats
from services.executor.core.step_plan import Int32Array, StepPlan
from services.executor.model.parallel.layers import (
    LinearShard,
    VocabParallelEmbedding,
    WeightShard,
    expert_weight_of,
    keep_quantized_experts,
)
from services.executor.model.weight_formats import Weight


class Decoder(Protocol):
    """Holds a lowered model's weights and the rank's KV store, and runs step plans that compute some tokens."""

    @property
    def label(self) -> str: ...

    def forward(self, plan: StepPlan, progress: Progress, pools: Int32Array) -> tuple[Tensor, Floats]:
        """Computes one step; `progress` counts the layers.

        Returns this rank's share of the logits of `plan.sample_rows`, float32 or the model's dtype [R, rows of the
        head]; and of `pools`, int32 [P, 2], the sums of the normed hidden states of the rows [first, end), float32
        [P, hidden]. Raises `RingLost` when another rank is gone.
        """
        ...

    def forward_to_largest(self, plan: StepPlan, progress: Progress) -> tuple[Tensor, Tensor]:
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
    sums: Floats = (
        torch.stack([states[first:end].float().sum(dim=0) for first, end in pools.tolist()]).cpu().numpy()
    )
    return sums


Activation = Literal["silu", "gelu_tanh"]
Weights = tuple[Weight, Tensor | None]
"""A linear's weight [out, in], plain or quantised, and its bias [out]."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
Scores = Literal["softmax", "sigmoid"]
_BY_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Family:
    """What sets a type of model apart, beyond what its modules show."""

    norm_offset: float = 0.0
    """Added to the weights of norms; where it is, values are multiplied by them before they are rounded."""
    post_norms: bool = False
    """Norms behind attention and feed-forward too, under Gemma's names."""
    scaled: bool = False
    """Granite's multipliers."""
    scores: Scores = "softmax"
    """What makes a router's outputs scores, where there are experts."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
    "seed_oss": Family(),
    "phi3": Family(),
    "granite": Family(scaled=True),
    "mixtral": Family(),
    "qwen2_moe": Family(),
    "qwen3_moe": Family(),
    "dots1": Family(scores="sigmoid"),
    "glm4_moe": Family(scores="sigmoid"),
    "solar_open": Family(scores="sigmoid"),
    "gemma": Family(norm_offset=1.0),
    "gemma2": Family(norm_offset=1.0, post_norms=True),
    "gemma3_text": Family(norm_offset=1.0, post_norms=True),
}


class CannotLower(Exception):
    """The model has another shape; says which."""


@dataclass(frozen=True)
class Routing:
    """A mixture of experts: which of them a row goes to, and how much each counts."""

    experts: nn.Module
    """transformers' own, which holds all of them: `expert_weights`"""
    router: Tensor
    """[experts, hidden]"""
    shared_gate: Tensor | None
    """[1, hidden]: what the sigmoid of weights the shared expert; None: 1"""
    correction: Tensor | None
    """float32 [experts], added to scores to choose by"""
    scores: Scores
    chosen: int
    """Experts of a row"""
    normalised: bool
    """Whether the weights of a row's experts add up to 1"""
    groups: int
    among: int
    """Experts are chosen from the best so many of the groups, by the sum of their two best scores."""
    scale: float
    """Of the weights"""


@dataclass
class LoweredLayer:
    """One layer. Norm weights are float32, on the model's device; linears are still the modules'."""

    norms: dict[str, Tensor]
    """`attention_norm`, `feed_forward_norm`, and where there are: `after_attention_norm`,
    `after_feed_forward_norm` [hidden], `query_norm`, `key_norm` [head dim]."""
    attention: nn.Module
    feed_forward: nn.Module | None
    """Of all rows; beside experts the shared one, if there is one."""
    routing: Routing | None
    rotary: int
    """Index of its set of frequencies; -1: it turns nothing."""
    window: int
    """Tokens that it sees back; 0: all."""


@dataclass(frozen=True)
class Scalars:
    """The numbers of a model's forward pass; caps are 0 where there are none."""

    eps: float
    attention_scale: float
    attention_cap: float
    embedding_scale: float
    residual_scale: float
    """Of what attention and feed-forward add."""
    logit_scale: float
    logit_cap: float


@dataclass
class Lowered:
    """All of a model but its linears' weights."""

    family: Family
    layers: list[LoweredLayer]
    final_norm: Tensor
    embedding: nn.Module
    head: LinearShard
    frequencies: list[tuple[Tensor, float]]
    """(radians per position float32 [rotary dim / 2], scale of cosines and sines)"""
    scalars: Scalars
    activation: Activation


def lower(model: Any, dtype: torch.dtype) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed, that computes in `dtype`.

    Raises `CannotLower` with the reason, on all ranks or on none.
    """
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise CannotLower(f"models of type {config.model_type} run through PyTorch")
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    activation = _ACTIVATIONS.get(name)
    if activation is None:
        raise CannotLower(f"the activation {name} is not among those that are lowered")
    base = model.model
    frequencies = _Frequencies(base.rotary_emb)
    layers = [_layer(layer, config, family, frequencies) for layer in base.layers]
    return Lowered(
        family=family,
        layers=layers,
        final_norm=_norm_weight(base.norm, family),
        embedding=base.embed_tokens,
        head=model.get_output_embeddings(),
        frequencies=frequencies.sets,
        scalars=_scalars(model, config, family, layers[0].attention, dtype),
        activation=activation,
    )


def qkv_of(attention: Any) -> list[Weights]:
    """Queries, keys and values of a layer, in one linear or in three."""
    if hasattr(attention, "qkv_proj"):
        return [weights_of(attention.qkv_proj)]
    return [weights_of(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]


def gate_up_of(feed_forward: Any) -> list[Weights]:
    """Gate and up projections of a layer, in one linear or in two."""
    if hasattr(feed_forward, "gate_up_proj"):
        return [weights_of(feed_forward.gate_up_proj)]
    return [weights_of(feed_forward.gate_proj), weights_of(feed_forward.up_proj)]


def weights_of(linear: Any) -> Weights:
    return linear.stored, linear.bias


def linears_of(layer: LoweredLayer) -> Iterator[LinearShard]:
    """The linears of a layer, whose plain weights go once a decoder has its own."""
    for part in (layer.attention, layer.feed_forward):
        yield from (module for module in part.modules() if isinstance(module, LinearShard)) if part else ()


def expert_weights(routing: Routing, leaf: str) -> Weight:
    """`gate_up_proj` or `down_proj` of all experts, one after the other: [experts * out, in]."""
    weight = expert_weight_of(routing.experts, leaf)
    return weight.flatten(0, 1) if isinstance(weight, Tensor) else weight


def release(module: nn.Module) -> None:
    """Empties the parameters of `module` itself, which a decoder has taken over."""
    if isinstance(module, WeightShard):
        module.keep_quantized(None)
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False))


def release_experts(routing: Routing) -> None:
    """Lets go of the experts' weights, which a decoder has taken over."""
    for leaf in ("gate_up_proj", "down_proj"):
        keep_quantized_experts(routing.experts, leaf, None)


def vocabulary(lowered: Lowered) -> tuple[Weight, int, bool]:
    """(embedding weight [rows, hidden], token of its first row, whether the ranks hold different rows)"""
    embedding: Any = lowered.embedding
    if isinstance(embedding, VocabParallelEmbedding):
        return embedding.stored, embedding.span.start, True
    return embedding.weight, 0, False


def _layer(layer: Any, config: Any, family: Family, frequencies: "_Frequencies") -> LoweredLayer:
    attention, feed_forward, routing = layer.self_attn, layer.mlp, None
    _check_linears(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), "o_proj")
    if hasattr(feed_forward, "experts"):
        routing = _routing(feed_forward, family)
        feed_forward = next((part for name in _SHARED if (part := getattr(feed_forward, name, None))), None)
    if feed_forward is not None:
        _check_linears(feed_forward, ("gate_up_proj",), ("gate_proj", "up_proj"), "down_proj")
    norms = {"attention_norm": layer.input_layernorm}
    if family.post_norms:
        norms["after_attention_norm"] = layer.post_attention_layernorm
        norms["feed_forward_norm"] = layer.pre_feedforward_layernorm
        norms["after_feed_forward_norm"] = layer.post_feedforward_layernorm
    else:
        norms["feed_forward_norm"] = layer.post_attention_layernorm
    if hasattr(attention, "q_norm"):
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    return LoweredLayer(
        norms={name: _norm_weight(norm, family) for name, norm in norms.items()},
        attention=attention,
        feed_forward=feed_forward,
        routing=routing,
        rotary=frequencies.of(attention, config),
        window=_window(attention, config),
    )


_SHARED = ("shared_expert", "shared_experts")


def _routing(block: Any, family: Family) -> Routing:
    gate, shared_gate = block.gate, getattr(block, "shared_expert_gate", None)
    correction = getattr(gate, "e_score_correction_bias", None)
    if getattr(block.experts, "is_transposed", True) or getattr(gate, "bias", None) is not None:
        raise CannotLower(f"a {type(block).__name__} holds its experts in another order")
    return Routing(
        experts=block.experts,
        router=gate.weight.detach(),
        shared_gate=None if shared_gate is None else shared_gate.weight.detach(),
        correction=None if correction is None else correction.detach().float().contiguous(),
        scores=family.scores,
        chosen=int(gate.top_k),
        normalised=bool(getattr(gate, "norm_topk_prob", True)),
        groups=int(getattr(gate, "num_group", None) or 1),
        among=int(getattr(gate, "topk_group", None) or 1),
        scale=float(getattr(gate, "routed_scaling_factor", 1.0)),
    )


def _check_linears(part: Any, fused: tuple[str, ...], single: tuple[str, ...], last: str) -> None:
    names = (*(fused if hasattr(part, fused[0]) else single), last)
    if not all(isinstance(getattr(part, name, None), LinearShard) for name in names):
        raise CannotLower(f"a {type(part).__name__} is built of other layers")


def _norm_weight(norm: Any, family: Family) -> Tensor:
    weight: Tensor = norm.weight.detach().float() + family.norm_offset
    return weight.contiguous()


def _window(attention: Any, config: Any) -> int:
    """As the model hands it to attention: some keep it in the layer, some in the configuration."""
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return int(window or 0)


class _Frequencies:
    """The rotary frequencies of a model: one set, or one per type of layer."""

    def __init__(self, rotary: Any) -> None:
        names = [
            name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name
        ]
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
        for kind in kinds.values():
            if kind in _BY_LENGTH:
                raise CannotLower(f"rotary embeddings of type {kind} follow the length of the text")
        if not 1 <= len(names) <= 2:
            raise CannotLower(f"the model has {len(names)} sets of rotary frequencies")
        self._names = names
        self.sets = []
        for name in names:
            scaling = getattr(rotary, name.replace("inv_freq", "attention_scaling"), 1.0)
            self.sets.append((getattr(rotary, name).detach().float().contiguous(), float(scaling)))

    def of(self, attention: Any, config: Any) -> int:
        """Index of the set that a layer turns by; -1 where it turns nothing."""
        if not getattr(attention, "use_rope", True):
            return -1
        if len(self._names) == 1:
            return 0
        return self._names.index(f"{config.layer_types[attention.layer_idx]}_inv_freq")


def _scalars(model: Any, config: Any, family: Family, attention: Any, dtype: torch.dtype) -> Scalars:
    scale = getattr(model.model.embed_tokens, "embed_scale", None)
    # Rounded as the model rounds it.
    embedding_scale = 1.0 if scale is None else float(scale.to(dtype))
    return Scalars(
        eps=float(config.rms_norm_eps),
        attention_scale=float(attention.scaling),
        attention_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        embedding_scale=float(config.embedding_multiplier) if family.scaled else embedding_scale,
        residual_scale=float(config.residual_multiplier) if family.scaled else 1.0,
        logit_scale=1.0 / float(config.logits_scaling) if family.scaled else 1.0,
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
