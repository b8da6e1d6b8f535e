"""The models that are converted: a configuration, a tokenizer, and named tensors that are read a few rows at a time."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.executor.core.sharding import ShardRange
from services.executor.model.loading.completeness import check_whole
from services.executor.model.loading.composition import Composition
from services.executor.model.loading.config_file import load_config
from services.executor.model.loading.gguf_compositions import misshapen
from services.executor.model.loading.gguf_weights import GgufWeights
from services.executor.model.loading.quantization_schemes import unreadable
from services.executor.model.loading.quantized_tensors import CodedTensor
from services.executor.model.loading.reading import Read
from services.executor.model.loading.sources import find_sources
from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ModelLoadError, reason_of
from shared.models import WEIGHT_DTYPE

_AT_ONCE = 1 << 22  # values that are read together


@dataclass(frozen=True)
class SourceTensor:
    """A tensor under transformers' name."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]  # its rows, a few at a time, in any floating dtype

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "SourceTensor":
        """The same with `change` made to it as a whole."""
        return SourceTensor(self.name, self.shape, lambda: iter((change(torch.cat(list(self.pieces()))),)))


@dataclass(frozen=True)
class SourceModel:
    """A model that is read."""

    directory: Path  # with config.json and the tokenizer
    config: Any
    tensors: tuple[SourceTensor, ...]
    gguf: GgufWeights | None = None  # what it is read from, where that is no model directory's own weights

    def linear_weights(self) -> frozenset[str]:
        """The names of the weights of linear layers, but the head's."""
        model = empty_model(self.config)
        head = model.get_output_embeddings()
        return frozenset(
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        )


def directory_model(directory: Path, config: Any, files: WeightFiles) -> SourceModel:
    """The model of a directory of safetensors or PyTorch files. Raises `ModelLoadError`."""
    model = empty_model(config)
    check_whole(model, find_sources(model, files.shapes), directory)
    tensors = []
    for name, shape in sorted(files.shapes.items()):
        if name in files.coded:
            tensors.append(SourceTensor(name, tuple(shape), _coded_reader(files, name, files.coded[name])))
            continue
        stored = files.tensor(name)
        if name.endswith(".bias") and f"{name[:-5]}.weight" in files.coded and not stored.any():
            continue  # quantizers give every linear layer a bias, of zeros where the model has none
        if not stored.is_floating_point():
            raise ModelLoadError(
                f"The tensor {name} in {directory} is of {stored.dtype}, which is not converted; use plain weights."
            )
        tensors.append(SourceTensor(name, tuple(shape), _reader(files, name, stored)))
    return SourceModel(directory, config, tuple(tensors))


def gguf_model(directory: Path, weights: GgufWeights) -> SourceModel:
    """The model of a directory that leads to GGUF files, under transformers' names and in its order of rows.

    Raises `ModelLoadError`.
    """
    config = load_config(directory)
    model = empty_model(config)
    sources = weights.sources(model)
    check_whole(model, sources, directory)
    state = model.state_dict()
    for name, content in sources.parameters.items():
        expected = tuple(state[name].shape)
        if content.shape != expected and name not in sources.outputs_first:
            raise misshapen(content.parts[0].source, content.shape, expected)
    if sources.unused:
        raise ModelLoadError(
            f"The file has a tensor {min(sources.unused)}, which the architecture does not use; it is not converted."
        )
    tensors = tuple(
        SourceTensor(name, content.shape, _gguf_reader(weights, content, config))
        for name, content in sorted(sources.parameters.items())
    )
    return SourceModel(directory, config, tensors, weights)


def empty_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """As transformers builds it: parameters without memory, real buffers."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tokens_of(model: SourceModel, text: str) -> list[int]:
    """Without special tokens. Raises `ModelLoadError`."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.directory), local_files_only=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:
        raise ModelLoadError(f"The tokenizer in {model.directory} cannot be read ({reason_of(error)}).") from error
    return ids


def _gguf_reader(weights: GgufWeights, content: Composition, config: Any) -> Callable[[], Iterator[Tensor]]:
    def pieces() -> Iterator[Tensor]:
        for first, end in row_spans(content.shape):
            some = content.selected(0, [ShardRange(first, end)]) if content.shape else content
            flat = some.flattened() if len(some.shape) == 3 else None
            read = Read(flat or some, torch.float32)
            (piece,) = weights.read_all([read], config, torch.device("cpu"), lambda done, total: None)
            assert isinstance(piece, Tensor), "codes were not asked for"
            yield piece.view(some.shape)

    return pieces


def _coded_reader(files: WeightFiles, name: str, stored: CodedTensor) -> Callable[[], Iterator[Tensor]]:
    def pieces() -> Iterator[Tensor]:
        rest = tuple(slice(0, extent) for extent in stored.shape[1:])
        for first, end in row_spans(stored.shape):
            try:
                yield stored.values((slice(first, end), *rest))
            except ValueError as error:
                raise unreadable(name, error) from error
        files.release_coded(name)

    return pieces


def _reader(files: WeightFiles, name: str, stored: Tensor) -> Callable[[], Iterator[Tensor]]:
    def pieces() -> Iterator[Tensor]:
        for first, end in row_spans(tuple(stored.shape)):
            part = stored[first:end] if stored.dim() else stored
            yield part
            files.release(name, part)

    return pieces


def row_spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Rows that are read together."""
    count = shape[0] if shape else 1
    step = max(1, _AT_ONCE * count // max(1, torch.Size(shape).numel()))
    for first in range(0, count, step):
        yield first, min(first + step, count)


_TEXTS = (
    *("generation_config.json", "tokenizer*.json", "special_tokens_map.json"),
    *("*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt"),
)


def copy_texts(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """The configuration, with `changes`, and the tokenizer."""
    for pattern in _TEXTS:
        for file in source.glob(pattern):
            made = target / file.relative_to(source)
            made.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, made)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for old in ("torch_dtype", "quantization_config", WEIGHT_DTYPE):
        config.pop(old, None)
    (target / "config.json").write_text(json.dumps({**config, **changes}, indent=2) + "\n", encoding="utf-8")
