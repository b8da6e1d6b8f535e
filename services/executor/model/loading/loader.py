"""Brings one rank's share of a model into memory.

    config.json ─▶ model on the meta device, buffers real ─▶ parallel plan ─▶ slices of the files ─▶ packing
                                     └─▶ sources: which tensors of the files make up each parameter ─┘

Parameters take no memory until their slice is read. Buffers are made for real from the start: they are
not in the checkpoint, and a buffer that goes through the meta device (rotary frequencies) comes back as
garbage without a word.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.core.torch_imports import import_rest
from services.executor.families.registry import family_of
from services.executor.model.attention import register_attention
from services.executor.model.catalogue import check_supported, longest_context
from services.executor.model.loading.completeness import check_leftovers, check_ties, is_computed
from services.executor.model.loading.config_file import load_config as load_config
from services.executor.model.loading.gguf_weights import GgufWeights
from services.executor.model.loading.output_heads import has_output_layer
from services.executor.model.loading.prediction_heads import heads_among
from services.executor.model.loading.quantization_schemes import Find, scheme_of
from services.executor.model.loading.reading import Progress, Read, read_all
from services.executor.model.loading.sources import CheckpointSources, find_sources
from services.executor.model.loading.text_models import know_causal
from services.executor.model.loading.weight_files import WeightFiles, some_of
from services.executor.model.parallel.latent import register_latent_attention
from services.executor.model.parallel.layers import (
    LIKE_MODULE,
    LinearShard,
    StoredExperts,
    TensorSlice,
    VocabParallelEmbedding,
    VocabParallelHead,
    WeightShard,
    holds_experts,
    keep_quantized_experts,
    piece_of,
    unpack_experts,
)
from services.executor.model.parallel.module_patches import attention_to_build_with
from services.executor.model.parallel.splitting import apply_plan
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.quantizing import RowsCodec
from services.executor.model.rotary import fix_frequencies
from services.executor.model.weight_formats import Weight, WeightCodec, can_pack, packed_weight
from services.executor.native.library import why_not
from services.executor.platforms.catalog import platform_of
from shared.errors import ModelLoadError, reason_of
from shared.models import WEIGHT_DTYPE, linked_gguf

log = structlog.get_logger(__name__)

_UNPACKED_TOGETHER = 1 << 22  # values
_CPU = torch.device("cpu")
# Building on the meta device patches torch for the whole process, so threads load one after the other.
LOADING = threading.Lock()


def load_model(
    directory: Path,
    dtype: torch.dtype,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    progress: Progress,
    codec: WeightCodec | None = None,
    *,
    keep_codes: bool = False,
    defer_codes: bool = False,
    before_reading: Callable[[int], None] = lambda least: None,
    context: int | None = None,
    quantizes_experts: bool = False,
) -> nn.Module:
    """This rank's share of the model in `directory`, ready for `ModelRunner`.

    With a `codec` the weights of its linear layers are quantised as they are read, with a `RowsCodec` those of head and
    embedding too. With `keep_codes` weights that the files have quantized stay so; else they are unpacked. Codes with
    scales for groups lie on the host, whatever `device` is; with `defer_codes` they are read when they are packed.
    `quantizes_experts`: whether experts on the host are like linear layers where `dtype` is fp32 too.
    `before_reading` is told how many bytes the weights will take at least, when all is known of them but their values.
    `context`: most tokens of one sequence, by which rotary frequencies may be chosen; None: `longest_context`'s.
    Raises `ModelLoadError`: one sentence with the remedy.
    """
    config = load_config(directory)
    check_supported(config)
    find = scheme_of(config)
    if find is not None and codec is not None:
        raise ModelLoadError(
            f"The model in {directory} is quantized already, and --weight-dtype would quantize it to {codec.name} "
            "again; leave --weight-dtype at auto, or choose the model's unquantized weights."
        )
    with LOADING, open_weights(directory, find) as files:
        of_host = family_of(config.model_type).lowered is not None or not why_not()

        def with_experts(parameter: _Parameter) -> bool:
            if platform_of(device).is_host:
                return of_host and (dtype is torch.bfloat16 or quantizes_experts)
            return dtype is torch.bfloat16 and parameter.stored == LIKE_MODULE

        model, plan = _planned(
            directory, config, dtype, layout, collectives, files, codec, keep_codes, defer_codes, with_experts, context
        )
        reads = [read for _, read in plan]
        before_reading(sum(read.least_bytes for read in reads))
        tensors = read_weights(reads, files, config, device, progress)
        for parameter, _ in plan:
            # Taken off the list, so that packing a weight can free it.
            place(parameter, tensors.pop(0))
    move_buffers(model, device)
    served: nn.Module = model.eval()
    return served


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """What of `model` is neither read nor placed: it was made beside its modules."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def load_frozen(directory: Path, dtype: torch.dtype, collectives: Collectives, *, mapped: bool) -> nn.Module:
    """This rank's share of the model in `directory`, on the host, for whoever computes with its weights where they lie.

    What linears and embeddings multiply by is, where it is `mapped`, a tensor over the checkpoint's mapped file, of the
    file's dtype; else it has no memory (`meta`). All else is copied, as `dtype`. Raises `ModelLoadError`.
    """
    config = load_config(directory)
    check_supported(config)
    with LOADING, open_weights(directory, scheme_of(config)) as files:
        layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
        model, plan = _planned(directory, config, dtype, layout, collectives, files)
        rest = []
        for parameter, read in plan:
            if not parameter.may_be_quantized:
                rest.append((parameter, read))
            elif mapped and isinstance(files, WeightFiles):
                stored = _stored(read, files)
                if stored is None:
                    rest.append((parameter, read))
                else:
                    place(parameter, stored)
        reads = [read for _, read in rest]
        tensors = read_weights(reads, files, config, _CPU, lambda done, total: None)
        for (parameter, _), tensor in zip(rest, tensors, strict=True):
            place(parameter, tensor)
    frozen: nn.Module = model.eval()
    return frozen


def _stored(read: Read, files: WeightFiles) -> Tensor | None:
    """What of a tensor of the files `read` would copy as it is; None: it is composed of several, or made of codes."""
    part, *others = read.content.parts
    plain = part.axes == tuple(range(len(part.size))) and part.matrix is None
    if others or not plain or part.size != read.content.shape or part.source in files.coded:
        return None
    stored = files.tensor(part.source)
    return part.view(stored) if stored.is_floating_point() else None


def is_quantized(directory: Path, config: Any) -> bool:
    """Whether the files hold codes, or are GGUF, whose tensors may."""
    return scheme_of(config) is not None or is_gguf(directory)


def keeps_codes(weight_dtype: str, config: Any) -> bool:
    """Whether weights that the files have quantized stay so with this `--weight-dtype`: with `auto`, unless config.json
    says itself what it means (`WEIGHT_DTYPE`)."""
    return weight_dtype == "auto" and getattr(config, WEIGHT_DTYPE, "auto") == "auto"


def _planned(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    layout: ShardLayout,
    collectives: Collectives,
    files: WeightFiles | GgufWeights,
    codec: WeightCodec | None = None,
    keep_codes: bool = False,
    defer_codes: bool = False,
    with_experts: "Callable[[_Parameter], bool]" = lambda parameter: False,
    context: int | None = None,
) -> tuple[Any, "list[tuple[_Parameter, Read]]"]:
    """A rank's share of the model, without memory for its weights, and what to read of them; with `LOADING` held."""
    if isinstance(files, WeightFiles) and not has_output_layer(directory, config, files.shapes):
        config.tie_word_embeddings = True  # one is built that nobody asks
    model, ties = build_causal(config, dtype)
    fix_frequencies(model, context or longest_context(config))
    sources = sources_in(files, model)
    apply_plan(model, config, layout, collectives)
    parameters = parameters_of(model, ties)
    plan = plan_reads(parameters, sources, codec, keep_codes, defer_codes, with_experts)
    names = [parameter.names for parameter in parameters]
    check_leftovers(model, names, sources, files, directory)
    if isinstance(files, WeightFiles):
        check_ties(names, sources, files, directory)
        _say_heads(files, config)
    return model, plan


def sources_in(files: WeightFiles | GgufWeights, model: Any) -> CheckpointSources:
    """Which of their tensors each parameter of `model` is made of, as transformers builds it; its rotary frequencies
    are scaled as a GGUF file says."""
    if isinstance(files, GgufWeights):
        files.scale_frequencies(model)
        return files.sources(model)
    sources = find_sources(model, files.shapes)
    first = {name for name, tensor in files.coded.items() if tensor.outputs_first}
    turned = (name for name, content in sources.parameters.items() if content.parts[0].source in first)
    return replace(sources, outputs_first=dict.fromkeys(turned, False))


def build_split(config: Any, dtype: torch.dtype, layout: ShardLayout, collectives: Collectives) -> nn.Module:
    """A rank's share of the model of this text configuration, without memory for its weights. Raises
    `ModelLoadError` where the architecture is not served."""
    with LOADING:
        model, _ = build_causal(config, dtype)
        apply_plan(model, config, layout, collectives)
    split: nn.Module = model
    return split


def open_weights(directory: Path, find: Find | None = None) -> WeightFiles | GgufWeights:
    return GgufWeights(directory) if is_gguf(directory) else WeightFiles(directory, find)


def read_weights(
    reads: list[Read], files: WeightFiles | GgufWeights, config: Any, device: torch.device, progress: Progress
) -> list[Weight]:
    """`read_all` of either kind of files."""
    if isinstance(files, GgufWeights):
        return files.read_all(reads, config, device, progress)
    return read_all(reads, files, device, progress)


def is_gguf(directory: Path) -> bool:
    plain = any((directory / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    return bool(linked_gguf(directory)) and not plain


def build_causal(config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, str]]:
    """(model with meta parameters and real buffers, tied parameter name -> the name it is tied to); with `LOADING`
    held."""
    register_attention()
    register_latent_attention()
    know_causal(config)
    make = partial(AutoModelForCausalLM.from_config, attn_implementation=attention_to_build_with(config))
    return build_empty(config, dtype, make)


def build_empty(config: Any, dtype: torch.dtype, make: Callable[..., Any]) -> tuple[Any, dict[str, str]]:
    """As `build_causal`, of what `make` makes of a configuration; with `LOADING` held."""
    import_rest()
    try:
        # Random values would be drawn for tensors that have none, which takes longer than all else here.
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = make(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
    except Exception as error:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} cannot be served ({reason_of(error)}); choose another model."
        ) from error
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return model, ties


@dataclass
class _Parameter:
    """One parameter or buffer of this rank's model, to be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    piece: TensorSlice | None  # what of the checkpoint's tensor this rank holds; None: all
    buffer: bool
    # (module, attribute): more than one where parameters are tied.
    targets: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # what the model calls it
    stored: StoredExperts = LIKE_MODULE  # how files have it

    @property
    def of_experts(self) -> bool:
        """Whether it is read as the weights [out, in] of all experts, one below the other."""
        return self.stored.outputs_first or all(holds_experts(module, leaf) for module, leaf in self.targets)

    @property
    def may_be_quantized(self) -> bool:
        return all(isinstance(module, WeightShard) and leaf == "weight" for module, leaf in self.targets)

    def codec_of(self, codec: WeightCodec | None) -> WeightCodec | None:
        """What quantises it, where all that is quantised is to be by `codec`; None: nothing. Head and embedding are
        left as they are by codecs of one scale for each row."""
        if self.of_experts:
            return codec
        if not self.may_be_quantized:
            return None
        vocabulary = VocabParallelHead | VocabParallelEmbedding
        if any(isinstance(module, vocabulary) for module, _ in self.targets):
            return codec.for_vocabulary() if isinstance(codec, RowsCodec) else None
        return codec


def parameters_of(model: nn.Module, ties: dict[str, str]) -> list[_Parameter]:
    """All that the checkpoint may hold: parameters and persistent buffers, tied ones once."""
    wanted: dict[int, _Parameter] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        piece = piece_of(owner, leaf)
        buffer = not isinstance(tensor, nn.Parameter)
        parameter = wanted.setdefault(id(tensor), _Parameter(tuple(tensor.shape), tensor.dtype, piece, buffer))
        parameter.targets.append((owner, leaf))
        parameter.names += [name, *([ties[name]] if name in ties else [])]
        parameter.names += [tied for tied, to in ties.items() if to == name]
    return list(wanted.values())


def plan_reads(
    parameters: list[_Parameter],
    sources: CheckpointSources,
    codec: WeightCodec | None = None,
    keep_codes: bool = False,
    defer_codes: bool = False,
    with_experts: Callable[[_Parameter], bool] = lambda parameter: False,
) -> list[tuple[_Parameter, Read]]:
    """What to read for each parameter. Buffers that follow from the configuration keep what they were built with where
    the checkpoint lacks them; all else that it lacks is refused.

    `with_experts`: which of theirs may be quantized too, all of a layer as one weight.
    """
    plan = []
    missing = []
    for parameter in parameters:
        found = next((name for name in parameter.names if name in sources.parameters), None)
        if found is None:
            if not (parameter.buffer and is_computed(parameter.names[0])):
                missing.append(parameter.names[0])
            continue
        content, piece = sources.parameters[found], parameter.piece
        if found in sources.outputs_first:
            parameter.stored = StoredExperts.of(*parameter.targets[0], sources.outputs_first[found])
        piece = piece and parameter.stored.piece(piece)
        if piece is not None and piece.transposed:
            content = content.transposed(0, 1)
        _check_shape(found, parameter, content.shape)
        if piece is not None:
            content = content.selected(piece.dim, piece.spans)
        flat = content.flattened() if parameter.of_experts else None
        fits = flat is not None and with_experts(parameter) if parameter.of_experts else parameter.may_be_quantized
        kind = parameter.codec_of(codec) if fits else None
        plan.append((parameter, Read(flat or content, parameter.dtype, kind, keep_codes and fits, defer_codes)))
    if missing:
        raise ModelLoadError(
            f"The weights have no tensor {some_of(missing)}, which config.json calls for; "
            "the directory mixes two models or is incomplete, fetch the model again."
        )
    return plan


def _check_shape(name: str, parameter: _Parameter, stored: tuple[int, ...]) -> None:
    expected = list(parameter.shape)
    if parameter.piece is not None:
        expected[parameter.piece.dim] = parameter.piece.full
    expected = parameter.stored.shape(expected)
    if list(stored) != expected:
        raise ModelLoadError(
            f"The tensor {name} has the shape {list(stored)} where config.json calls for {expected}; "
            "the directory mixes two models, fetch the model again."
        )


def _say_heads(files: WeightFiles, config: Any) -> None:
    heads = heads_among(files.shapes, config, files.stored_bytes)
    if heads.tensors:
        log.info(
            "prediction_heads_left_out",
            tensors=heads.tensors,
            bytes=heads.bytes,
            reason="the answers are the same without them; with --draft-model mtp the first one drafts",
        )


def place(parameter: _Parameter, held: Weight) -> None:
    if not isinstance(held, Tensor):
        for module, leaf in parameter.targets:
            if parameter.of_experts:
                keep_quantized_experts(module, leaf, held, parameter.stored)
            else:
                assert isinstance(module, WeightShard), "only linear layers, embeddings and experts are quantised"
                module.keep_quantized(held)
        return
    held = parameter.stored.restored(held.view(parameter.stored.shape(list(parameter.shape))))
    value = held if parameter.buffer else nn.Parameter(held, requires_grad=False)
    for module, attribute in parameter.targets:
        setattr(module, attribute, value)


def unpack(model: nn.Module, dtype: torch.dtype, device: torch.device = _CPU) -> None:
    """Makes plain weights of those that have stayed quantized, for models that PyTorch computes."""
    made: dict[int, nn.Parameter] = {}
    unpack_experts(model)
    for module in model.modules():
        if isinstance(module, WeightShard) and isinstance(stored := module.stored, QuantizedRows | DeferredRows):
            if id(stored) not in made:
                made[id(stored)] = nn.Parameter(_unpacked(stored, dtype).to(device), requires_grad=False)
            module.keep_quantized(None)
            module.weight = made[id(stored)]
    if made:
        log.info("weights_unpacked", tensors=len(made), reason="PyTorch computes this model")


def _unpacked(weight: QuantizedRows | DeferredRows, dtype: torch.dtype) -> Tensor:
    plain = torch.empty(weight.shape, dtype=dtype)
    outputs, inputs = weight.shape
    step = max(1, _UNPACKED_TOGETHER // inputs)
    for first in range(0, outputs, step):
        end = min(first + step, outputs)
        part = weight.rows(first, end)
        plain[first:end] = (part.read() if isinstance(part, DeferredRows) else part).dequantized()
    return plain


def pack_linears(model: nn.Module) -> None:
    """Packs every linear share in place, for models that PyTorch runs, where that gains something.

    The plain weight is let go, unless the embedding shares it: a tied head is held twice.
    """
    modules = (module for module in model.modules() if isinstance(module, LinearShard))
    linears = [linear for linear in modules if isinstance(linear.stored, Tensor)]
    if not any(can_pack(linear.weight.device, linear.weight.dtype) for linear in linears):
        return
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for module in linears:
        module.pack(packed_weight(module.weight), keep_plain=uses[id(module.weight)] > 1)
