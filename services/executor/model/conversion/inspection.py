"""What the weights of a model are: each tensor's format, shape and bytes, and what would compute with it. Headers alone
are read."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.executor.families.gguf_architectures import row_of
from services.executor.families.registry import family_of
from services.executor.model.catalogue import check_supported, is_encoder
from services.executor.model.loading.config_file import load_config
from services.executor.model.loading.gguf_blocks import has_codes
from services.executor.model.loading.gguf_file import open_parts
from services.executor.model.loading.prediction_heads import PredictionHeads, heads_among
from services.executor.model.loading.quantization_schemes import scheme_of
from services.executor.model.loading.quantized_tensors import CodedRows
from services.executor.model.loading.weight_files import WeightFiles
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


class InspectedModel(msgspec.Struct, frozen=True):
    """All of them, with sums."""

    architecture: str
    tensors: list[TensorFacts]
    bytes: int
    parameters: int  # values of all tensors of floating or block formats
    bits_per_weight: float
    # Why the model cannot be served, with the nearest that can; "" where nothing speaks against it.
    refused: str = ""
    # Of these tensors, those of heads for multi-token prediction: they are left out.
    prediction_heads: PredictionHeads = PredictionHeads()


class ConfigurationVerdict(msgspec.Struct, frozen=True):
    """What a configuration alone tells."""

    architecture: str  # "": config.json cannot be read as one
    refused: str = ""  # as `InspectedModel.refused`


def verdict_on(directory: Path) -> ConfigurationVerdict:
    """On the model whose config.json lies in `directory`, where nothing else need be."""
    try:
        config = load_config(directory)
    except ModelLoadError as error:
        return ConfigurationVerdict("", str(error))
    return ConfigurationVerdict(str(config.model_type), _refusal(config))


def _refusal(config: Any) -> str:
    try:
        check_supported(config)
        scheme_of(config)
    except ModelLoadError as error:
        return str(error)
    return ""


def inspect(path: Path) -> InspectedModel:
    """What `path`, a .gguf file or a model directory, holds. Raises `ModelLoadError`."""
    refused, heads = "", PredictionHeads()
    if path.is_dir() and (links := linked_gguf(path)):
        architecture, tensors = _of_gguf(links[0])
    elif path.is_dir():
        config = load_config(path)
        architecture = str(config.model_type)
        tensors = list(_of_directory(path, config))
        sizes = {tensor.name: tensor.bytes for tensor in tensors}
        refused, heads = _refusal(config), heads_among(sizes, config, sizes.__getitem__)
    elif path.suffix == ".gguf" or path.is_file():
        architecture, tensors = _of_gguf(path)
    else:
        raise ModelLoadError(f"{path} does not exist; give a model directory or a .gguf file.")
    size = sum(tensor.bytes for tensor in tensors)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    bits = 8 * size / max(1, parameters)
    return InspectedModel(architecture, tensors, size, parameters, bits, refused, heads)


def _of_directory(path: Path, config: Any) -> Iterator[TensorFacts]:
    quantization = getattr(config, "quantization_config", None) or {}
    described = config.to_dict()
    with WeightFiles(path, scheme_of(config)) as files:
        for name, shape in sorted(files.shapes.items()):
            coded = files.coded.get(name)
            if coded is None:
                form = str(files.tensor(name).dtype).removeprefix("torch.")
            elif isinstance(coded, CodedRows):
                group = f"groups of {coded.group}" if coded.group < coded.shape[1] else "rows"
                form = f"{quantization['quant_method']} int{coded.bits}, {group}"
            else:
                form = type(coded).__name__.lower()
            kept = coded is not None and coded.has_products
            served = _computed_by(shape, described, form in _PLAIN, kept)
            yield TensorFacts(name, form, shape, files.stored_bytes(name), served)


def _of_gguf(path: Path) -> tuple[str, list[TensorFacts]]:
    files = open_parts(path)
    architecture = str(files[0].header.metadata.get("general.architecture", "unknown"))
    row, tensors = row_of(files[0].header.metadata), []
    described = {"model_type": architecture} if row is None else {**row.constants, "model_type": row.config_type()}
    for file in files:
        for one in file.header.tensors:
            kept = has_codes(one.kind) and row is not None
            served = _computed_by(one.shape, described, one.kind.name in _PLAIN, kept)
            tensors.append(TensorFacts(one.name, one.kind.name, one.shape, one.nbytes, served))
    return architecture, sorted(tensors, key=lambda tensor: tensor.name)


def _computed_by(shape: tuple[int, ...], described: Mapping[str, Any], plain: bool, kept: bool) -> str:
    """What multiplies by the tensor on this machine's CPU, as codes where they are `kept`."""
    if len(shape) < 2:
        return "-"
    library, model_type = load_library(), described["model_type"]
    if library is None:
        return f"PyTorch ({why_not().split(';')[0]})"
    if is_encoder(described):
        return f"PyTorch (models of type {model_type}, both ways)"
    if kept:
        return f"kernel for codes, {library.level}"
    if family_of(model_type).lowered is None:
        return f"PyTorch (models of type {model_type})"
    return f"bf16 kernel, {library.level}" + ("" if plain else ", unpacked when it is loaded")
