"""A model with a LoRA adapter merged into its weights: W + scale * B A, added in float32.

Rows are added to as they are read, so that memory holds the adapter's factors and a few rows of one weight. A weight
that is kept as codes is merged as the values that serving computes with: a merged model then says what base and adapter
said, and takes the room of plain weights.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from services.executor.model.adapters.configuration import CONFIG_FILE
from services.executor.model.adapters.files import WEIGHTS_FILE, LowRank, read_adapter
from services.executor.model.adapters.targets import whole_targets
from services.executor.model.conversion.inspection import inspect
from services.executor.model.conversion.models import SourceModel, SourceTensor
from shared.errors import ModelLoadError

# What `models inspect` calls formats that are not codes, and the `--dtype` that writes them.
_PLAIN = {"float32": "f32", "F32": "f32", "float16": "f16", "F16": "f16", "bfloat16": "bf16", "BF16": "bf16"}
_OF_CODES = "bf16"  # what a base of codes is written as


def with_adapter(model: SourceModel, directory: Path) -> SourceModel:
    """`model`, with the adapter of peft's files in `directory` added to its weights, which are read as float32.

    Raises `ModelLoadError`: what is wrong with the adapter, or why it cannot be merged into this model's files.
    """
    targets = {target.name: target for target in whole_targets(model.config)}
    pairs = read_adapter(directory, list(targets.values()), torch.float32)
    weights = {tensor.name: tensor for tensor in model.tensors}
    for name, pair in pairs.items():
        if targets[name].experts:
            raise ModelLoadError(
                f"The adapter in {directory} changes experts ({name}), which are not merged here; serve it as an "
                "adapter, or merge it with PEFT (merge_and_unload)."
            )
        stored, shape = weights.get(f"{name}.weight"), (pair.b.shape[0], pair.a.shape[1])
        if stored is None or stored.shape != shape:
            raise ModelLoadError(
                f"The files in {model.directory} have no tensor {name}.weight of shape {list(shape)}, as the model "
                "names it, so the adapter cannot be merged into it; load and save the model with transformers first."
            )
    tensors = [
        _added(tensor, pairs[name]) if (name := tensor.name.removesuffix(".weight")) in pairs else tensor
        for tensor in model.tensors
    ]
    return replace(model, tensors=tuple(tensors))


def _added(tensor: SourceTensor, pair: LowRank) -> SourceTensor:
    def pieces() -> Iterator[Tensor]:
        first = 0
        for rows in tensor.pieces():
            end = first + len(rows)
            yield torch.addmm(rows.float(), pair.b[first:end], pair.a)
            first = end

    return SourceTensor(tensor.name, tensor.shape, pieces)


def dtype_of(base: Path) -> tuple[str, str]:
    """(the `--dtype` of the weights of the model `base`, which codes they are kept as: "" where they are plain). Raises
    `ModelLoadError`."""
    sizes = Counter[str]()
    for tensor in inspect(base).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.format] += tensor.bytes
    (form, _), *_ = sizes.most_common(1) or [("", 0)]
    return (_PLAIN[form], "") if form in _PLAIN else (_OF_CODES, form)


def fingerprint(directory: Path) -> str:
    """Of an adapter's files: what was written with another one is not gone on with. Raises `OSError`."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
