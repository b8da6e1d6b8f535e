"""Brings one rank's share of a draft head into memory (`model/draft_heads.py`).

    a model's own head    in its checkpoint, under the names of `_KINDS`
    EAGLE-3               a checkpoint of its own, whose config.json has the architecture LlamaForCausalLMEagle3

Either is built as a causal language model of one layer, which is split, and whose tensors are found, as any other's.
Embeddings and output layer that a head shares with its model are read once more from that one's checkpoint.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.model.catalogue import longest_context
from services.executor.model.draft_heads import Eagle3Head, Eagle3Norms, HeadModel, MtpHead, ReducedHead
from services.executor.model.loading.completeness import leftovers
from services.executor.model.loading.composition import Composition
from services.executor.model.loading.loader import (
    LOADING,
    build_causal,
    is_gguf,
    load_config,
    move_buffers,
    parameters_of,
    place,
    plan_reads,
)
from services.executor.model.loading.quantization_schemes import scheme_of
from services.executor.model.loading.reading import read_all
from services.executor.model.loading.sources import CheckpointSources, find_sources
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.parallel.splitting import apply_plan
from services.executor.model.rotary import fix_frequencies
from shared.errors import ModelLoadError

_LEAVE_OUT = "leave out --draft-model."


@dataclass(frozen=True)
class _Names:
    """What checkpoints call the parts of a model's own head."""

    root: str  # before all of them; `{}`: the number of the model's layers
    layer: str  # behind it, before those of its layer
    beside: Mapping[str, str]  # its tensors beside the layer, as `MtpHead` calls them
    # Tensors of the layer that the model's own layers call otherwise.
    within: Mapping[str, str] = field(default_factory=dict)
    # Of its layer, by the configuration's lists of them, where it is none as the last one.
    kinds: Mapping[str, str] = field(default_factory=dict)

    def of(self, shapes: Mapping[str, tuple[int, ...]], layers: int) -> tuple[dict[str, str], dict[str, str]]:
        """For the tensors of the first head in a checkpoint of `shapes`, as it calls them: those beside its layer, as
        `MtpHead` calls them, and those of a model of this layer alone. Both empty where it has none."""
        root = self.root.format(layers)
        found = {name.removeprefix(root): name for name in shapes if name.startswith(root)}
        if not any(name in found for name, own in self.beside.items() if own == "eh_proj.weight"):
            return {}, {}
        beside = {own: found.pop(name) for name, own in self.beside.items() if name in found}
        layer = {}
        for short, name in found.items():
            if short.startswith("layers.") and not short.startswith(self.layer):
                continue  # of a further head
            within = short.removeprefix(self.layer)
            layer[f"model.layers.0.{self.within.get(within, within)}"] = name
        return beside, layer


_HEAD = {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight"}
_NORM = "model.model.norm.weight"
# Sources: transformers' conversions for its `MtpModel`; vLLM's mimo_v2_mtp.py and qwen3_next_mtp.py.
_KINDS = (
    # DeepSeek V3 and GLM-4.5, and what came after them
    _Names(
        "model.layers.{}.",
        "",
        {
            **_HEAD,
            "shared_head.norm.weight": _NORM,
            "shared_head.head.weight": "model.lm_head.weight",
            "embed_tokens.weight": "model.model.embed_tokens.weight",
        },
    ),
    # MiMo V2
    _Names(
        "model.mtp.layers.0.",
        "",
        {**_HEAD, "final_layernorm.weight": _NORM},
        {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"},
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    ),
    # Mellum 2, Qwen3-Next, Qwen3.5
    _Names(
        "mtp.",
        "layers.0.",
        {
            "pre_fc_norm_embedding.weight": "enorm.weight",
            "pre_fc_norm_hidden.weight": "hnorm.weight",
            "fc.weight": "eh_proj.weight",
            "norm.weight": _NORM,
        },
    ),
)
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
# What is the model's where a head has none: the first that is there.
_SHARED = {"model.model.embed_tokens.weight": _EMBEDDINGS, "model.lm_head.weight": ("lm_head.weight", *_EMBEDDINGS)}
_TABLES = ("d2t", "t2d")
_LAYER = "model.model.layers.0."


@dataclass(frozen=True)
class LoadedHead:
    """One rank's share."""

    model: HeadModel
    config: Any  # of the one layer
    # Whose inputs are the states that it reads; none: what comes behind the last norm.
    layers: tuple[int, ...]

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""
        return longest_context(self.config)


@dataclass(frozen=True)
class HeadPlacement:
    """Where a head is to compute."""

    dtype: torch.dtype
    device: torch.device
    collectives: Collectives
    before_reading: Callable[[int], None] = lambda least: None  # as of `load_model`

    def layout(self, config: Any) -> ShardLayout:
        return ShardLayout.from_config(config, self.collectives.world_size, self.collectives.rank)


# --- heads of the model's own checkpoint ---------------------------------------------------------


def load_mtp_head(directory: Path, where: HeadPlacement) -> LoadedHead:
    """The first head of the model in `directory`. Raises `ModelLoadError`."""
    whole = load_config(directory)
    if is_gguf(directory):
        raise ModelLoadError(
            f"Heads for multi-token prediction are read from safetensors, and {directory} is a GGUF file; {_LEAVE_OUT}"
        )
    with LOADING, WeightFiles(directory, scheme_of(whole)) as files:
        shapes = files.shapes
        names, beside, of_layer = _own_head(directory, shapes, whole.num_hidden_layers)
        config = _of_one_layer(whole, names)
        model, ties = build_causal(config, where.dtype)
        fix_frequencies(model, longest_context(config))
        sources = _renamed(find_sources(model, {own: shapes[name] for own, name in of_layer.items()}), of_layer)
        apply_plan(model, config, where.layout(config), where.collectives)
        norm = type(model.base_model.norm)
        norms = [norm(config.hidden_size, eps=config.rms_norm_eps).to("meta", where.dtype) for _ in range(2)]
        head = MtpHead(model, config.hidden_size, norms, where.dtype)
        found = {f"model.{name}": content for name, content in sources.parameters.items()}
        found |= {own: Composition.whole(name, shapes[name]) for own, name in beside.items()}
        found |= _shared(found, shapes)
        _read(head, ties, CheckpointSources(found, sources.unused), {"": files}, where, directory)
    return LoadedHead(head, config, ())


def _own_head(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], layers: int
) -> tuple[_Names, dict[str, str], dict[str, str]]:
    """The first kind whose head the checkpoint has, and that one's tensors as `_Names.of` gives them."""
    for names in _KINDS:
        beside, of_layer = names.of(shapes, layers)
        if beside:
            return names, beside, of_layer
    if any(".mtp" in f".{name}" for name in shapes):
        raise ModelLoadError(
            f"The heads for multi-token prediction in {directory} are of none of the kinds that are computed "
            f"(docs/performance.md); {_LEAVE_OUT}"
        )
    raise ModelLoadError(f"The model in {directory} has no heads for multi-token prediction; {_LEAVE_OUT}")


# What has a configuration's first layer be of experts, where any is.
_WITH_EXPERTS: Mapping[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}


def _of_one_layer(whole: Any, names: _Names) -> Any:
    """The configuration of a head's layer: as the head's own list of kinds has it, or `names`, or as the last one; it
    attends where that one is recurrent."""
    config = copy.deepcopy(whole)
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, name, None):
            own = getattr(config, f"mtp_{name}", None) or [names.kinds.get(name, kinds[-1])]
            setattr(config, name, ["full_attention" if own[0] == "linear_attention" else own[0]])
    for name, value in _WITH_EXPERTS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.num_hidden_layers = 1
    config.tie_word_embeddings = False
    return config


# --- EAGLE-3 -------------------------------------------------------------------------------------


def load_eagle3_head(directory: Path, model_directory: Path, where: HeadPlacement) -> LoadedHead:
    """The head in `directory` of the model in `model_directory`. Raises `ModelLoadError`."""
    config, whole = load_config(directory), load_config(model_directory)
    reduced: int = getattr(config, "draft_vocab_size", None) or config.vocab_size
    _check_eagle3(directory, config, whole)
    config.tie_word_embeddings = False
    with LOADING, WeightFiles(directory) as files, WeightFiles(model_directory, scheme_of(whole)) as others:
        shapes = files.shapes
        for name in ("fc.weight", "lm_head.weight"):
            if name not in shapes:
                raise ModelLoadError(
                    f"The EAGLE-3 head in {directory} has no tensor {name}; fetch it again, or {_LEAVE_OUT}"
                )
        model, ties = build_causal(config, where.dtype)
        fix_frequencies(model, longest_context(config))
        norms = _widen(model, config, where.dtype)
        apply_plan(model, config, where.layout(config), where.collectives)
        rank, ranks = where.collectives.rank, where.collectives.world_size
        reduced_head = nn.Linear(config.hidden_size, reduced, bias=False, device="meta", dtype=where.dtype)
        targets = _targets(files, reduced, config.vocab_size, directory)
        model.lm_head = ReducedHead(reduced_head, targets, config.vocab_size, rank, ranks)
        head = Eagle3Head(model, config.hidden_size, norms, 3 * whole.hidden_size, where.dtype)
        own = {name: Composition.whole(name, shape) for name, shape in shapes.items() if name not in _TABLES}
        found = {_eagle3_name(name): content for name, content in own.items()}
        found |= _shared(found, others.shapes, _OTHERS)
        _read(head, ties, CheckpointSources(found, frozenset()), {"": files, _OTHERS: others}, where, directory)
    return LoadedHead(head, config, _aux_layers(config, whole.num_hidden_layers, directory))


_OTHERS = "of the model: "  # before the names of tensors that are in the model's checkpoint


def _check_eagle3(directory: Path, config: Any, whole: Any) -> None:
    if config.model_type != "llama" or config.num_hidden_layers != 1:
        raise ModelLoadError(
            f"The EAGLE-3 head in {directory} has {config.num_hidden_layers} layers of the type {config.model_type}, "
            f"and one of the type llama is computed; {_LEAVE_OUT}"
        )
    if is_gguf(directory) or scheme_of(config) is not None:
        raise ModelLoadError(f"The EAGLE-3 head in {directory} is quantized, which is not read; {_LEAVE_OUT}")
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    for what, own, theirs in (
        ("states of the width", width, whole.hidden_size),
        ("a vocabulary of the size", config.vocab_size, whole.vocab_size),
    ):
        if own != theirs:
            raise ModelLoadError(
                f"The EAGLE-3 head in {directory} was made for another model: it reads {what} {own}, and the model has "
                f"{theirs}; choose the head of this model, or {_LEAVE_OUT}"
            )


def _aux_layers(config: Any, layers: int, directory: Path) -> tuple[int, ...]:
    """Whose inputs the head reads: low, middle, high."""
    told = getattr(config, "eagle_config", None) or {}
    ids = told.get("eagle_aux_hidden_state_layer_ids") or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    found = tuple(ids or (min(2, layers - 1), layers // 2, max(layers - 3, 0)))
    if len(found) != 3 or not all(isinstance(one, int) and 0 <= one < layers for one in found):
        raise ModelLoadError(
            f"The EAGLE-3 head in {directory} reads the states of the layers {list(found)}, and the model has "
            f"{layers}; choose the head of this model, or {_LEAVE_OUT}"
        )
    return found


def _widen(model: Any, config: Any, dtype: torch.dtype) -> Eagle3Norms:
    """Has the layer's keys, queries and values read embeddings and states side by side."""
    layer = model.base_model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(layer.self_attn, name)
        wide = nn.Linear(
            2 * config.hidden_size, linear.out_features, bias=linear.bias is not None, device="meta", dtype=dtype
        )
        setattr(layer.self_attn, name, wide)
    of_states = type(layer.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps).to("meta", dtype)
    normed = bool(getattr(config, "norm_before_residual", False))
    norms = layer.input_layernorm = Eagle3Norms(layer.input_layernorm, of_states, normed=normed)
    return norms


def _eagle3_name(name: str) -> str:
    """What `Eagle3Head` calls the checkpoint's tensor `name`."""
    for layer in ("midlayer.", "layers.0.", "model.layers.0."):
        if name.startswith(layer):
            within = name.removeprefix(layer)
            within = within.replace("hidden_norm.", "input_layernorm.of_states.")
            if within == "input_layernorm.weight":
                within = "input_layernorm.of_embeddings.weight"
            return _LAYER + within
    short = name.removeprefix("model.")
    if short.startswith("fc."):
        return short
    return f"model.{short}" if short.startswith("lm_head.") else f"model.model.{short}"


def _targets(files: WeightFiles, reduced: int, vocab_size: int, directory: Path) -> NDArray[np.int64]:
    """The token of the vocabulary for each of the head's: int64 [reduced], ascending."""
    numbers = np.arange(reduced, dtype=np.int64)
    if "d2t" in files.shapes:
        stored = files.tensor("d2t").to(torch.int64).numpy()
        if stored.shape == numbers.shape:
            numbers = numbers + stored
        elif reduced != vocab_size:
            numbers = numbers[:0]
    if not len(numbers) or numbers[0] < 0 or numbers[-1] >= vocab_size or (np.diff(numbers) <= 0).any():
        raise ModelLoadError(
            f"The table d2t of the EAGLE-3 head in {directory} does not name {reduced} tokens of {vocab_size} in "
            f"ascending order; fetch it again, or {_LEAVE_OUT}"
        )
    return numbers


# --- reading -------------------------------------------------------------------------------------


def _shared(
    found: Mapping[str, Composition], shapes: Mapping[str, tuple[int, ...]], prefix: str = ""
) -> dict[str, Composition]:
    """What of the model's is read because the head has none of its own; `prefix`: before the names of its tensors."""
    more = {}
    for own, names in _SHARED.items():
        name = next((name for name in names if name in shapes), None)
        if own not in found and name is not None:
            more[own] = Composition.whole(prefix + name, shapes[name])
    return more


def _renamed(sources: CheckpointSources, names: Mapping[str, str]) -> CheckpointSources:
    """`sources` with the checkpoint's names in place of those that they were found by."""
    parameters = {
        own: replace(content, parts=tuple(replace(part, source=names[part.source]) for part in content.parts))
        for own, content in sources.parameters.items()
    }
    return CheckpointSources(parameters, frozenset(names[name] for name in sources.unused))


def _read(
    head: HeadModel,
    ties: dict[str, str],
    sources: CheckpointSources,
    files: Mapping[str, WeightFiles],
    where: HeadPlacement,
    directory: Path,
) -> None:
    """Gives `head` its weights. `files`: by what stands before the names in `sources`."""
    parameters = parameters_of(head, {f"model.{name}": f"model.{to}" for name, to in ties.items()})
    if surplus := leftovers(head, [parameter.names for parameter in parameters], sources):
        raise ModelLoadError(
            f"The draft head in {directory} holds a tensor {surplus[0]} that is not known; it is of another kind, "
            f"{_LEAVE_OUT}"
        )
    plan = plan_reads(parameters, sources)
    where.before_reading(sum(read.least_bytes for _, read in plan))
    for prefix, held in files.items():
        own = [
            (parameter, replace(read, content=_without(prefix, read.content)))
            for parameter, read in plan
            if read.content.parts[0].source.startswith(_OTHERS) is bool(prefix)
        ]
        tensors = read_all([read for _, read in own], held, where.device, lambda done, total: None)
        for (parameter, _), tensor in zip(own, tensors, strict=True):
            place(parameter, tensor)
    move_buffers(head, where.device)
    head.eval()


def _without(prefix: str, content: Composition) -> Composition:
    parts = (replace(part, source=part.source.removeprefix(prefix)) for part in content.parts)
    return replace(content, parts=tuple(parts))
