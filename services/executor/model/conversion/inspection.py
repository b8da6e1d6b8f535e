"""What the weights of a model are: each tensor's format, shape and bytes, and what would compute with it. Headers alone
are read."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.executor.model.loading.gguf_blocks import has_codes
from services.executor.model.loading.gguf_file import open_parts
from services.executor.model.loading.gguf_weights import ARCHITECTURES
from services.executor.model.loading.loader import load_config
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.lowering import FAMILIES
from services.executor.native.library import load_library, why_not
from shared.errors import ModelLoadError
from shared.models import linked_gguf

_PLAIN = ("F32", "F16", "BF16", "float32", "float16", "bfloat16")


class TensorFacts(msgspec.Struct, frozen=True):
    """One tensor of the files."""

    name: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    computed_by: str


class ModelFacts(msgspec.Struct, frozen=True):
    """All of them, with sums."""

    architecture: str
    tensors: list[TensorFacts]
    bytes: int
    parameters: int
    """Values of all tensors of floating or block formats"""
    bits_per_weight: float


def inspect(path: Path) -> ModelFacts:
    """What `path`, a .gguf file or a model directory, holds. Raises `ModelLoadError`."""
    if path.is_dir() and (links := linked_gguf(path)):
        architecture, tensors = _of_gguf(links[0])
    elif path.is_dir():
        architecture = str(load_config(path).model_type)
        tensors = list(_of_directory(path, architecture))
    elif path.suffix == ".gguf" or path.is_file():
        architecture, tensors = _of_gguf(path)
    else:
        raise ModelLoadError(f"{path} does not exist; give a model directory or a .gguf file.")
    size = sum(tensor.bytes for tensor in tensors)
    parameters = sum(_count(tensor.shape) for tensor in tensors)
    return ModelFacts(architecture, tensors, size, parameters, 8 * size / max(1, parameters))


def _of_directory(path: Path, architecture: str) -> Iterator[TensorFacts]:
    with WeightFiles(path) as files:
        for name, shape in sorted(files.shapes.items()):
            tensor = files.tensor(name)
            form = str(tensor.dtype).removeprefix("torch.")
            yield TensorFacts(name, form, shape, tensor.nbytes, _computed_by(form, shape, architecture))


def _of_gguf(path: Path) -> tuple[str, list[TensorFacts]]:
    files = open_parts(path)
    architecture = str(files[0].header.metadata.get("general.architecture", "unknown"))
    tensors = []
    for file in files:
        for one in file.header.tensors:
            coded = has_codes(one.kind)
            served = _computed_by(one.kind.name, one.shape, architecture, coded)
            tensors.append(TensorFacts(one.name, one.kind.name, one.shape, one.nbytes, served))
    return architecture, sorted(tensors, key=lambda tensor: tensor.name)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _computed_by(form: str, shape: tuple[int, ...], architecture: str, coded: bool = False) -> str:
    """What multiplies by the tensor on this machine's CPU."""
    if len(shape) < 2:
        return "-"
    if form not in _PLAIN and not coded:
        return "part of a quantized weight"
    library = load_library()
    if library is None:
        return f"PyTorch ({why_not().split(';')[0]})"
    if {"gemma3": "gemma3_text"}.get(architecture, architecture) not in FAMILIES:
        return f"PyTorch (models of type {architecture})"
    if coded and architecture in ARCHITECTURES:
        return f"kernel for codes, {library.level}"
    return f"bf16 kernel, {library.level}" + (", unpacked when it is loaded" if coded else "")
