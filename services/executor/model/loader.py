"""Brings one rank's share of a model into memory.

    config.json ─▶ model on the meta device, buffers real ─▶ parallel plan ─▶ slices from safetensors

Parameters take no memory until their slice is read. Buffers are made for real from the start: they are
not in the checkpoint, and a buffer that goes through the meta device (rotary frequencies) comes back as
garbage without a word.
"""

import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.executor.model.attention import register_attention
from services.executor.model.collectives import Collectives
from services.executor.model.layers import LinearShard, TensorSlice, held_elsewhere, piece_of
from services.executor.model.packing import can_pack, packed_weight
from services.executor.model.parallel import apply_plan
from services.executor.model.rewiring import attention_to_build_with
from services.executor.model.sharding import ShardLayout
from services.executor.model.support import check_supported, longest_context
from services.executor.model.weights import WeightFiles
from shared.errors import ModelLoadError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of this rank's share."""

_LOADING = threading.Lock()
"""Building on the meta device patches torch for the whole process, so threads load one after the other."""

_NOT_NEEDED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
"""Buffers that older versions of transformers saved and newer ones compute."""


def load_config(directory: Path) -> Any:
    """The transformers configuration of the model in `directory`. Raises `ModelLoadError`."""
    if not directory.is_dir():
        raise ModelLoadError(f"The model directory {directory} does not exist; check the path.")
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"The directory {directory} has no config.json, so it is not a model; "
            "give a directory that transformers' save_pretrained made, a .gguf file or a hub name."
        )
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(
            f"The config.json in {directory} is not one that can be served ({_first_line(error)}); "
            "check the file, or choose a model of an architecture that transformers knows."
        ) from error
    if config.get_text_config() is not config:
        raise ModelLoadError(
            f"The model in {directory} takes more than text ({config.model_type!r}), which is not served; "
            "choose a text model."
        )
    return config


def context_length(config: Any) -> int:
    """Most tokens of one sequence. Raises `ModelLoadError` where the configuration does not say."""
    return longest_context(config)


def load_model(
    directory: Path,
    dtype: torch.dtype,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    progress: Progress,
) -> nn.Module:
    """This rank's share of the model in `directory`, ready for `ModelRunner`.

    Raises `ModelLoadError`: one sentence with the remedy.
    """
    config = load_config(directory)
    check_supported(config)
    with _LOADING, WeightFiles(directory) as files:
        model, ties = _build(config, dtype)
        apply_plan(model, config, layout, collectives)
        jobs = _plan_reads(model, ties, files)
        _check_leftovers(model, jobs, files, directory)
        _read(jobs, files, dtype, device, progress)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if can_pack(device, dtype):
        _pack(model)
    served: nn.Module = model.eval()
    return served


def _build(config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, str]]:
    """(model with meta parameters and real buffers, tied parameter name -> the name it is tied to)."""
    register_attention()
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention_to_build_with(config),
                trust_remote_code=False,
            )
        model.tie_weights()
    except Exception as error:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} cannot be served as a language model "
            f"({_first_line(error)}); choose another model."
        ) from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} cannot compute logits for chosen tokens only "
            "and is not served; choose another model."
        )
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return model, ties


@dataclass
class _Read:
    """One parameter to be read: where it goes and what it is called."""

    shape: tuple[int, ...]
    piece: TensorSlice | None
    targets: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, attribute): more than one where parameters are tied."""
    names: list[str] = field(default_factory=list)
    """What the checkpoint may call it, the most likely first."""
    source: str = ""
    """What the checkpoint does call it."""
    buffer: bool = False


def _plan_reads(model: nn.Module, ties: dict[str, str], files: WeightFiles) -> list[_Read]:
    reads: dict[int, _Read] = {}
    for name, tensor, owner in _wanted(model):
        leaf = name.rpartition(".")[2]
        read = reads.setdefault(id(tensor), _Read(tuple(tensor.shape), piece_of(owner, leaf)))
        read.buffer = not isinstance(tensor, nn.Parameter)
        read.targets.append((owner, leaf))
        read.names += [name, *([ties[name]] if name in ties else [])]
        read.names += [tied for tied, to in ties.items() if to == name]
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    available = files.names
    jobs = []
    for read in reads.values():
        candidates = read.names + [name.removeprefix(prefix) for name in read.names]
        found = next((name for name in candidates if name in available), None)
        if found is None and read.buffer:
            continue
        if found is None:
            raise ModelLoadError(
                f"The weights have no tensor {read.names[0]}, which config.json calls for; "
                "the directory mixes two models or is incomplete, fetch the model again."
            )
        read.source = found
        _check_shape(read, files.shape(found))
        jobs.append(read)
    return jobs


def _wanted(model: nn.Module) -> Iterable[tuple[str, torch.Tensor, nn.Module]]:
    """(name, tensor, owning module) of all that the checkpoint may hold: parameters and persistent buffers."""
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        yield name, tensor, model.get_submodule(name.rpartition(".")[0])


def _check_shape(read: _Read, stored: tuple[int, ...]) -> None:
    expected = list(read.shape)
    if read.piece is not None:
        expected[read.piece.dim] = read.piece.full
    if list(stored) != expected:
        raise ModelLoadError(
            f"The tensor {read.source} has the shape {list(stored)} where config.json calls for {expected}; "
            "the directory mixes two models, fetch the model again."
        )


def _check_leftovers(model: nn.Module, jobs: list[_Read], files: WeightFiles, directory: Path) -> None:
    """Raises when the checkpoint holds weights that the model has no place for: it would compute nonsense."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = {name for job in jobs for name in (job.source, *job.names)}
    for name, module in model.named_modules():
        known |= {f"{name}.{leaf}" for leaf in held_elsewhere(module)}
    known |= {name.removeprefix(prefix) for name in known}
    ignored = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    for name in sorted(files.names - known):
        if _NOT_NEEDED.search(name) or any(pattern.search(name) for pattern in ignored):
            continue
        raise ModelLoadError(
            f"The weights in {directory} hold a tensor {name} that the architecture does not use; "
            "config.json belongs to another model, fetch the model again."
        )


def _read(
    jobs: list[_Read], files: WeightFiles, dtype: torch.dtype, device: torch.device, progress: Progress
) -> None:
    total = sum(torch.Size(job.shape).numel() for job in jobs) * dtype.itemsize
    done = 0
    progress(done, total)
    with torch.no_grad():
        for job in jobs:
            stored = files.read(job.source, job.piece)
            # Copied even where the dtype agrees: the mapped file may go, and may lie unaligned.
            held = torch.empty(
                job.shape, dtype=dtype if stored.is_floating_point() else stored.dtype, device=device
            )
            held.copy_(stored)
            value = held if job.buffer else nn.Parameter(held, requires_grad=False)
            for module, attribute in job.targets:
                setattr(module, attribute, value)
            done += held.numel() * dtype.itemsize
            progress(done, total)


def _pack(model: nn.Module) -> None:
    """Packs every linear share in place. The plain weight is let go, unless the embedding shares it: a
    tied head is held twice."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        if isinstance(module, LinearShard):
            module.pack(packed_weight(module.weight), keep_plain=uses[id(module.weight)] > 1)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
