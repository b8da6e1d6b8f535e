"""One model's files into another format's: read tensor by tensor, written tensor by tensor."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.executor.families.gguf import GgufArchitecture
from services.executor.model.catalogue import is_encoder
from services.executor.model.conversion import gguf_header, gguf_types, safetensors_file
from services.executor.model.conversion.calibration import Calibration
from services.executor.model.conversion.merging import fingerprint, with_adapter
from services.executor.model.conversion.models import (
    SourceModel,
    SourceTensor,
    copy_texts,
    directory_model,
    gguf_model,
    row_spans,
)
from services.executor.model.conversion.partial_file import (
    Piece,
    Progress,
    WrittenTensor,
    check_free,
    check_room,
    digest_of,
    partial_directory,
    size_of_file,
    write_tensors,
)
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.config_file import load_config
from services.executor.model.loading.gguf_blocks import values
from services.executor.model.loading.gguf_errors import told_of_file
from services.executor.model.loading.gguf_file import GgufFile, GgufTensor, open_parts
from services.executor.model.loading.gguf_transforms import transform_of
from services.executor.model.loading.gguf_weights import GgufWeights
from services.executor.model.loading.quantization_schemes import scheme_of
from services.executor.model.loading.text_models import whole_of
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.pooling import is_classifier
from shared.errors import ConfigurationError, ModelLoadError
from shared.models import linked_gguf

# What can be written, and as which dtypes.
FORMATS = {"gguf": tuple(gguf_types.DTYPES), "safetensors": tuple(safetensors_file.DTYPES)}
_TEXTS_BYTES = 64 << 20  # room for configuration and tokenizer


def convert(
    source: Path,
    target: Path,
    to: str,
    dtype: str,
    report: Progress,
    calibrate: Path | None = None,
    adapter: Path | None = None,
) -> int:
    """Writes the model `source`, a directory or a .gguf file, to `target`: a .gguf file or a directory of safetensors.

    `target` appears whole or not at all; what a killed run had finished is kept for the next. `calibrate` is
    a text by which codes of 4 bits are chosen, `adapter` a directory of peft's files that is merged into the weights.
    Returns its bytes. Raises `ModelLoadError` for models and adapters, `ConfigurationError` for everything else that is
    in the way, `OSError`.
    """
    _check(target, to, dtype)
    if calibrate is not None and not (to == "safetensors" and safetensors_file.DTYPES[dtype].group):
        raise ConfigurationError(
            "--calibrate is for groups of 4 bits; give --to safetensors --dtype int4-g128, or leave it out."
        )
    linked = linked_gguf(source)
    if to == "gguf" and (linked or is_gguf(source)) and adapter is None:
        return _between_types(linked[0] if linked else source, target, gguf_types.DTYPES[dtype], report)
    with open_model(source) as model:
        made_of = ""
        if adapter is not None:
            model, made_of = with_adapter(model, adapter), fingerprint(adapter)
        if to == "gguf":
            return _to_gguf(model, source, target, gguf_types.DTYPES[dtype], report, made_of)
        return _to_safetensors(model, source, target, safetensors_file.DTYPES[dtype], report, calibrate, made_of)


@contextlib.contextmanager
def open_model(source: Path) -> Iterator[SourceModel]:
    """The model to read. Raises `ModelLoadError`."""
    with tempfile.TemporaryDirectory() as scratch, told_of_file(source):
        directory = source
        if is_gguf(source):
            directory = Path(scratch) / source.stem
            convert_gguf(source, directory, lambda *stage: None)
        elif not source.is_dir():
            raise ModelLoadError(
                f"{source} is neither a model directory nor a .gguf file; give one that holds config.json, or a file."
            )
        config = load_config(directory)
        if is_encoder(config.to_dict()) or is_classifier(config.to_dict()):
            raise ModelLoadError(
                f"The model in {directory} embeds or classifies ({config.model_type!r}) and is not converted; "
                "it is served as it is."
            )
        if linked_gguf(directory):
            with GgufWeights(directory) as weights:
                yield gguf_model(directory, weights)
            return
        if whole := whole_of(config):
            raise ModelLoadError(
                f"The model in {directory} takes more than text ({whole!r}) and is not converted; "
                "save its text model alone."
            )
        with WeightFiles(directory, scheme_of(config)) as files:
            yield directory_model(directory, config, files)


def is_gguf(source: Path) -> bool:
    return source.suffix == ".gguf" and not source.is_dir()


def _check(target: Path, to: str, dtype: str) -> None:
    if dtype not in FORMATS[to]:
        raise ConfigurationError(f"{to} files are not written as {dtype}, but as {', '.join(FORMATS[to])}.")
    check_free(target)
    if to == "gguf" and target.suffix != ".gguf":
        raise ConfigurationError(f"{target} does not end in .gguf, by which such files are known; name it so.")


def _to_gguf(
    model: SourceModel, source: Path, target: Path, dtype: gguf_types.GgufDtype, report: Progress, made_of: str
) -> int:
    config = {**model.config.to_dict(), **_rotary_settings(model)}
    architecture = gguf_header.architecture_of(config)
    names = gguf_header.names_of([tensor.name for tensor in model.tensors], architecture, config)
    named = [
        (names[tensor.name], _as_gguf_has_it(tensor, names[tensor.name], architecture, config))
        for tensor in model.tensors
        if tensor.name in names
    ]
    named += [(name, _made(factors)) for name, factors in gguf_header.rope_factors(config).items()]
    layers = config["num_hidden_layers"]
    listed = [(name, one.shape, gguf_types.type_of(name, one.shape, dtype, layers)) for name, one in named]
    written = [_gguf_tensor(one, kind) for (_, one), (_, _, kind) in zip(named, listed, strict=True)]
    if linked := linked_gguf(model.directory):  # merged with an adapter: what the file says of its tokenizer stays
        header = gguf_header.header_from(open_parts(linked[0])[0], dtype, listed)
    else:
        header = gguf_header.header_of(source.resolve().name, config, model.directory, dtype, listed)
    return _write_gguf(source, target, header, written, f"{dtype.name} {made_of}".strip(), report)


def _between_types(source: Path, target: Path, dtype: gguf_types.GgufDtype, report: Progress) -> int:
    """GGUF to GGUF: what the file says of its model and its tokenizer stays, whichever architecture it has."""
    files = open_parts(source)
    metadata = files[0].header.metadata
    layers = metadata.get(f"{metadata.get('general.architecture')}.block_count", 0)
    held = [(file, tensor) for file in files for tensor in file.header.tensors]
    keeps_wide = any(tensor.kind is not Type.F32 for _, tensor in held if len(tensor.shape) > 1)
    kinds = [
        tensor.kind
        if keeps_wide and tensor.kind is Type.F32  # who made the file found that fewer bits hurt
        else gguf_types.type_of(tensor.name, tensor.shape, dtype, layers if isinstance(layers, int) else 0)
        for _, tensor in held
    ]
    listed = [(tensor.name, tensor.shape, kind) for (_, tensor), kind in zip(held, kinds, strict=True)]
    header = gguf_header.header_from(files[0], dtype, listed)
    written = [_from_rows(*one, kind) for one, kind in zip(held, kinds, strict=True)]
    return _write_gguf(source, target, header, written, dtype.name, report)


def _from_rows(file: GgufFile, tensor: GgufTensor, kind: Type) -> WrittenTensor:
    def pieces() -> Iterator[Piece]:
        for first, end in row_spans((tensor.rows, tensor.shape[-1])):
            raw = file.rows(tensor)[first:end]
            try:
                yield (raw.numpy() if kind is tensor.kind else gguf_types.encoded(values(raw, tensor.kind), kind))
            except (ValueError, NotImplementedError) as error:
                raise ModelLoadError(
                    f"The tensor {tensor.name} of {file.path} cannot be read as {tensor.kind.name} ({error}); the "
                    "file is damaged or newer than this program, fetch it again or choose another."
                ) from error
        file.release()

    return WrittenTensor(tensor.name, gguf_types.nbytes_of(tensor.shape, kind), pieces)


def _write_gguf(
    source: Path, target: Path, header: bytes, tensors: list[WrittenTensor], options: str, report: Progress
) -> int:
    with partial_directory(target, digest_of(source, header, options)) as directory:
        made = directory / target.name
        _write(made, header, tensors, gguf_header.ALIGNMENT, 0, report)
        made.rename(target)
    return target.stat().st_size


def _to_safetensors(
    model: SourceModel,
    source: Path,
    target: Path,
    dtype: safetensors_file.SafetensorsDtype,
    report: Progress,
    text: Path | None,
    made_of: str,
) -> int:
    changes = {**safetensors_file.configuration(dtype), **_rotary_settings(model), **_named_class(model)}
    safetensors_file.check(model, dtype)
    rounded = partial(safetensors_file.quantize, dtype=dtype)
    calibration = None if text is None else Calibration(model, text, rounded, report)
    header, written = safetensors_file.file_of(model, dtype, calibration.rows if calibration else rounded)
    made_by = [dtype.name, *([str(text.resolve()), str(text.stat().st_mtime_ns)] if text else [])]
    made_by += [made_of] if made_of else []
    with partial_directory(target, digest_of(source, header, " ".join(made_by))) as directory:
        made = directory / "model"
        made.mkdir(exist_ok=True)
        weights = made / "model.safetensors"
        if calibration is not None:
            calibration.directory = directory
        _write(weights, header, written, safetensors_file.ALIGNMENT, _TEXTS_BYTES, report)
        copy_texts(model.directory, made, changes)
        made.rename(target)
    return sum(file.stat().st_size for file in target.iterdir())


def _named_class(model: SourceModel) -> dict[str, Any]:
    """`architectures`, which other programs know a model by, and GGUF files do not have."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type)
    return {} if model.config.architectures or known is None else {"architectures": [known]}


def _rotary_settings(model: SourceModel) -> dict[str, Any]:
    """What a GGUF file keeps as a tensor of factors, and config.json as settings. Raises `ModelLoadError`."""
    if model.gguf is None or (factors := model.gguf.rotary_factors()) is None:
        return {}
    return {"rope_parameters": _rope_parameters(model.config.to_dict(), factors)}


def _rope_parameters(config: Mapping[str, Any], factors: Tensor) -> dict[str, Any]:
    """What config.json says where a file divides rotary frequencies by `factors`: those of Llama 3.1, which are known.

    Raises `ModelLoadError` for others, for which a configuration has no place.
    """
    rope = {**(config.get("rope_parameters") or {}), **_LLAMA_3, "factor": float(factors.max())}
    (made,) = gguf_header.rope_factors({**config, "rope_parameters": rope}).values()
    if made.shape != factors.shape or not torch.allclose(made, factors, rtol=1e-3):
        raise ModelLoadError(
            "The file divides rotary frequencies by factors that are not Llama 3's (rope_freqs.weight), for which a "
            "configuration has no place; convert to gguf, or convert the model that it was made from."
        )
    return rope


_LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _write(
    path: Path, header: bytes, tensors: list[WrittenTensor], alignment: int, more: int, report: Progress
) -> None:
    kept = path.stat().st_size if path.exists() else 0
    check_room(path.parent, size_of_file(header, tensors, alignment) + more, kept)
    write_tensors(path, header, tensors, alignment, report)


def _made(values: Tensor) -> SourceTensor:
    return SourceTensor("", tuple(values.shape), lambda: iter((values,)))


def _as_gguf_has_it(
    tensor: SourceTensor, name: str, architecture: GgufArchitecture, config: Mapping[str, Any]
) -> SourceTensor:
    """`name`: the file's."""
    transform = transform_of(architecture, name)
    if transform is None:
        return tensor
    return tensor.mapped(lambda rows: transform.write(rows, name, config))


def _gguf_tensor(tensor: SourceTensor, kind: Type) -> WrittenTensor:
    return WrittenTensor(
        tensor.name,
        gguf_types.nbytes_of(tensor.shape, kind),
        lambda: (gguf_types.encoded(piece, kind) for piece in tensor.pieces()),
    )
