"""One model's files into another format's: read tensor by tensor, written tensor by tensor."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from services.executor.model.conversion import gguf_header, gguf_types, safetensors_file
from services.executor.model.conversion.models import (
    SourceModel,
    SourceTensor,
    copy_texts,
    directory_model,
)
from services.executor.model.conversion.partial_file import (
    Progress,
    WrittenTensor,
    check_room,
    digest_of,
    partial_directory,
    size_of_file,
    write_tensors,
)
from services.executor.model.loading.gguf_blocks import values
from services.executor.model.loading.gguf_file import GgufFile
from services.executor.model.loading.loader import load_config
from services.executor.model.loading.schemes import scheme_of
from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ConfigurationError, ModelLoadError

FORMATS = {"gguf": tuple(gguf_types.DTYPES), "safetensors": tuple(safetensors_file.DTYPES)}
"""What can be written, and as which dtypes."""
_TEXTS_BYTES = 64 << 20
"""Room for configuration and tokenizer."""


def convert(source: Path, target: Path, to: str, dtype: str, report: Progress) -> int:
    """Writes the model `source`, a directory, to `target`: a .gguf file or a directory of safetensors.

    `target` appears whole or not at all; what a killed run had finished is kept for the next. Returns its bytes. Raises
    `ModelLoadError` for models, `ConfigurationError` for everything else that is in the way, `OSError`.
    """
    _check(target, to, dtype)
    with open_model(source) as model:
        if to == "gguf":
            return _to_gguf(model, source, target, gguf_types.DTYPES[dtype], report)
        return _to_safetensors(model, source, target, safetensors_file.DTYPES[dtype], report)


@contextlib.contextmanager
def open_model(source: Path) -> Iterator[SourceModel]:
    """The model to read. Raises `ModelLoadError`."""
    if not source.is_dir():
        raise ModelLoadError(f"{source} is no model directory; give one that holds config.json.")
    config = load_config(source)
    with WeightFiles(source, scheme_of(config)) as files:
        yield directory_model(source, config, files)


def gguf_written_from(model: SourceModel, file: Path) -> SourceModel:
    """The model as `file`, which was made of `model`, holds it."""
    config = model.config.to_dict()
    architecture = gguf_header.architecture_of(config)
    names = gguf_header.names_of([tensor.name for tensor in model.tensors], architecture, config)
    written = GgufFile(file)
    held = {tensor.name: tensor for tensor in written.header.tensors}

    def back(one: SourceTensor) -> SourceTensor:
        stored = held[names[one.name]]
        count = _heads_of(one.name, config) if architecture.interleaved else None

        def pieces() -> Iterator[Tensor]:
            rows = values(written.rows(stored), stored.kind).reshape(one.shape).float()
            yield rows if count is None else gguf_header.in_halves(rows, count)

        return SourceTensor(one.name, one.shape, pieces)

    tensors = tuple(back(one) for one in model.tensors if one.name in names)
    return SourceModel(model.directory, model.config, tensors)


def _check(target: Path, to: str, dtype: str) -> None:
    if dtype not in FORMATS[to]:
        raise ConfigurationError(f"{to} files are not written as {dtype}, but as {', '.join(FORMATS[to])}.")
    if target.exists():
        raise ConfigurationError(f"{target} exists already; remove it, or give another target.")
    if to == "gguf" and target.suffix != ".gguf":
        raise ConfigurationError(
            f"{target} does not end in .gguf, by which such files are known; name it so."
        )


def _to_gguf(
    model: SourceModel, source: Path, target: Path, dtype: gguf_types.GgufDtype, report: Progress
) -> int:
    config = model.config.to_dict()
    architecture = gguf_header.architecture_of(config)
    names = gguf_header.names_of([tensor.name for tensor in model.tensors], architecture, config)
    tensors = [
        _in_rotary_order(tensor, config) if architecture.interleaved else tensor
        for tensor in model.tensors
        if tensor.name in names
    ]
    named = [(names[tensor.name], tensor) for tensor in tensors]
    if (factors := gguf_header.rope_factors(config)) is not None:
        extra = SourceTensor("", tuple(factors.shape), lambda: iter((factors,)))
        named.append(("rope_freqs.weight", extra))
    layers = config["num_hidden_layers"]
    listed = [(name, one.shape, gguf_types.type_of(name, one.shape, dtype, layers)) for name, one in named]
    written = [_gguf_tensor(one, kind) for (_, one), (_, _, kind) in zip(named, listed, strict=True)]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.header")
    header = gguf_header.header_of(scratch, source.resolve().name, config, model.directory, dtype, listed)
    with partial_directory(target, digest_of(source, header, dtype.name)) as partial:
        made = partial / target.name
        _write(made, header, written, gguf_header.ALIGNMENT, 0, report)
        made.rename(target)
    return target.stat().st_size


def _to_safetensors(
    model: SourceModel, source: Path, target: Path, dtype: safetensors_file.SafetensorsDtype, report: Progress
) -> int:
    safetensors_file.check(model, dtype)
    header, written = safetensors_file.file_of(model, dtype)
    with partial_directory(target, digest_of(source, header, dtype.name)) as partial:
        made = partial / "model"
        made.mkdir(exist_ok=True)
        weights = made / "model.safetensors"
        _write(weights, header, written, safetensors_file.ALIGNMENT, _TEXTS_BYTES, report)
        copy_texts(model.directory, made, safetensors_file.configuration(dtype))
        made.rename(target)
    return sum(file.stat().st_size for file in target.iterdir())


def _write(
    path: Path, header: bytes, tensors: list[WrittenTensor], alignment: int, more: int, report: Progress
) -> None:
    kept = path.stat().st_size if path.exists() else 0
    check_room(path.parent, size_of_file(header, tensors, alignment) + more, kept)
    write_tensors(path, header, tensors, alignment, report)


def _in_rotary_order(tensor: SourceTensor, config: Mapping[str, Any]) -> SourceTensor:
    count = _heads_of(tensor.name, config)
    if count is None:
        return tensor
    return tensor.mapped(lambda rows: gguf_header.interleaved(rows, count))


def _heads_of(name: str, config: Mapping[str, Any]) -> int | None:
    """None where the tensor is not turned."""
    heads = config["num_attention_heads"]
    by_name = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    return by_name.get(name.rpartition(".")[0].rpartition(".")[2])


def _gguf_tensor(tensor: SourceTensor, kind: Type) -> WrittenTensor:
    return WrittenTensor(
        tensor.name,
        gguf_types.nbytes_of(tensor.shape, kind),
        lambda: (gguf_types.encoded(piece, kind) for piece in tensor.pieces()),
    )
