"""The weights of a directory that are GGUF files: what each parameter is in them, read as codes or as numbers.

Names are translated by gguf's table. The files keep a few architectures' tensors in another order or with something
added, which is undone as rows are read: a row of codes is as good as a row of numbers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor

from services.executor.core.sharding import ShardRange
from services.executor.families.gguf_architectures import gguf_architecture
from services.executor.model.loading.composition import Composition, TensorBox, stacked
from services.executor.model.loading.gguf_blocks import has_codes, quantized, values
from services.executor.model.loading.gguf_compositions import COMPOSED, fitted, lacks, matrix_of, misshapen
from services.executor.model.loading.gguf_file import GgufTensor, open_parts
from services.executor.model.loading.gguf_transforms import Settings, Transform, transform_of
from services.executor.model.loading.reading import Progress, Read, ReadMeter
from services.executor.model.loading.sources import CheckpointSources
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.weight_formats import Weight, quantize
from shared.errors import ModelLoadError
from shared.models import linked_gguf

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# Bytes of a file that are taken apart at once: codes and what they are made by stay near the caches.
_SLAB = 4 << 20
_NAMED = 8  # tensors that a line of the log names, at most
_NUMBERS = ("F32", "F16", "BF16")
_ROTARY_FACTORS = "rope_freqs.weight"
_OF_KEYS = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm|v_norm)\.weight")
_NO_PARAMETERS = frozenset({_ROTARY_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"})


class GgufWeights:
    """The files, open for reading. A context manager. Raises `ModelLoadError`."""

    def __init__(self, directory: Path) -> None:
        files = open_parts(linked_gguf(directory)[0])
        self._tensors = {tensor.name: (file, _as_matrix(tensor)) for file in files for tensor in file.header.tensors}
        self._files = files
        self._architecture = gguf_architecture(files[0].header.metadata, self._tensors)

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(self, *exception: object) -> None:
        """Weights that have been deferred keep the files open, each until it is let go."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by the file's name."""
        return {name: tensor.shape for name, (_, tensor) in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """float32, on the CPU: the numbers of the tensor `name`."""
        file, tensor = self._tensors[name]
        return file.numbers(tensor).float().view(tensor.shape)

    def sources(self, model: Any) -> CheckpointSources:
        """Which tensor each parameter is, of a model as transformers builds it."""
        name_in_file = self._architecture.tensor_names(model.config.num_hidden_layers)
        state = model.state_dict()
        parameters, experts = self._of_stacks(state), set()
        numbers = self._numbers(model.config.num_hidden_layers)
        within = f"{model.base_model_prefix}."  # tables leave that out of the names of encoders' parameters
        for name, parameter in state.items():
            if name in parameters:
                continue
            found = numbers.get(name) or name_in_file(name) or name_in_file(name.removeprefix(within))
            joined = next((end for end in self._architecture.joined if name.endswith(f".{end}")), None)
            composed = next((how for end, how in self._architecture.composed.items() if name.endswith(f".{end}")), None)
            if joined and f"{found}.weight" in self._tensors:  # gate and up of experts, joined by the file's writer
                parameters[name] = _of_experts([f"{found}.weight"], self.shapes)
                experts.add(name)
            elif joined is not None:
                ends = self._architecture.joined[joined]
                sides = [name_in_file(name.removesuffix(joined) + end) for end in ends]
                experts |= {name} if joined.startswith("experts.") else set()
                parameters[name] = self._joined(sides, joined, parameter.shape)
            elif composed is not None and found is not None and found not in self._tensors:
                block = ".".join(found.split(".")[:2])
                parameters[name] = COMPOSED[composed](block, self.shapes, model.config.to_dict())
            elif found is not None and found in self._tensors and self._is_served(found, parameter):
                whole = self._whole(found, parameter.shape)
                is_turned = name.endswith(self._architecture.transposed)
                parameters[name] = whole.transposed(0, 1) if is_turned else whole
        used = {part.source for composition in parameters.values() for part in composition.parts}
        rest = self._tensors.keys() - used - _NO_PARAMETERS
        heads = self._heads_behind(model.config.num_hidden_layers)
        unused = (name for name in rest if not self._follows(name) and not name.startswith(heads))
        return CheckpointSources(parameters, frozenset(unused), dict.fromkeys(experts, True))

    def _of_stacks(self, state: Mapping[str, Tensor]) -> dict[str, Composition]:
        """Parameters that are matrices of a tensor, or rows of a matrix."""
        stacks = {name: stack for name in state if (stack := self._architecture.stack_of(name))}
        rows = Counter(stack for stack, _ in stacks.values())
        return {
            name: self._rows(stack, rows[stack], len(state[name]))[number]
            if state[name].dim() == 1
            else matrix_of(stack, number, self.shapes)
            for name, (stack, number) in stacks.items()
        }

    def _rows(self, name: str, rows: int, width: int) -> list[Composition]:
        """Of a matrix of numbers, which is read as a vector from here on."""
        if name not in self._tensors or self._tensors[name][1].kind.name not in _NUMBERS:
            raise lacks(f"{name} of numbers")
        file, tensor = self._tensors[name]
        if tensor.shape not in ((rows, width), (rows * width,)):
            raise misshapen(name, tensor.shape, (rows, width))
        self._tensors[name] = (file, replace(tensor, shape=(rows * width,)))
        return Composition.whole(name, (rows * width,)).split([width] * rows, 0)

    def _numbers(self, layers: int) -> dict[str, str]:
        """By parameter that is a number of the metadata: what it is called among the tensors, where it stands now."""
        found = {}
        for key, pattern in self._architecture.numbers.items():
            for layer in range(layers):
                number = self._files[0].number(key, layer)
                self._tensors[number.name] = (self._files[0], number)
                found[pattern.format(layer)] = number.name
        return found

    def _follows(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._architecture.follow) or self._is_idle(name)

    def _is_idle(self, name: str) -> bool:
        """Whether the tensor makes keys or values of a layer that reads another's."""
        said, prefix = self._files[0].header.metadata, self._architecture.name
        layers, shared = said.get(f"{prefix}.block_count"), said.get(f"{prefix}.attention.shared_kv_layers")
        found = _OF_KEYS.fullmatch(name)
        if found is None or not isinstance(layers, int) or not isinstance(shared, int):
            return False
        return layers - shared <= int(found.group(1)) < layers

    def _heads_behind(self, layers: int) -> tuple[str, ...]:
        """How names of tensors begin that are of heads for multi-token prediction, which are no part of the model."""
        count = self._files[0].header.metadata.get(f"{self._architecture.name}.nextn_predict_layers", 0)
        return tuple(f"blk.{layers + head}." for head in range(count if isinstance(count, int) else 0))

    def _is_served(self, name: str, parameter: Tensor) -> bool:
        """Vectors of numbers, matrices, and what the model has so but for dimensions of size 1."""
        tensor = self._tensors[name][1]
        if 1 in (len(tensor.shape), parameter.dim()) and tensor.kind.name not in _NUMBERS:
            return False
        return len(tensor.shape) <= 2 or _squeezed(tensor.shape) == _squeezed(parameter.shape)

    def _whole(self, name: str, shape: Sequence[int]) -> Composition:
        """The tensor as a parameter of `shape`: files leave dimensions of size 1 out, or have some of their own, and
        have a few vectors by groups, as rows."""
        file, tensor = self._tensors[name]
        plain = len(tensor.shape) == len(shape) <= 2
        is_vector = len(shape) == 1 and tensor.kind.name in _NUMBERS and math.prod(tensor.shape) == shape[0]
        if plain or not (is_vector or _squeezed(tensor.shape) == _squeezed(shape)):
            return Composition.whole(name, tensor.shape)
        if not shape:
            return Composition((), (TensorBox(name, (), (), (), ()),))
        held = _squeezed(shape) or (1,)
        held = (1, *held) if shape[0] == 1 and len(held) < len(shape) else held  # one row
        self._tensors[name] = (file, replace(tensor, shape=held))
        composed = Composition.whole(name, held)
        if len(held) < len(shape):
            for dim, size in enumerate(shape):
                composed = composed.unsqueezed(dim) if size == 1 and (dim or held[0] > 1) else composed
        return composed

    def _joined(self, sides: Sequence[str | None], end: str, shape: Sequence[int]) -> Composition:
        whole = [str(side).endswith(".bias") or len(shape) == 1 for side in sides]
        names = [str(side) if one else f"{side}.weight" for side, one in zip(sides, whole, strict=True)]
        if end.startswith("experts.") and len(shape) > 2:
            return _of_experts(names, self.shapes)
        if missing := [name for name in names if name not in self._tensors]:
            raise lacks(missing[0])
        stored = [self._tensors[name][1].shape for name in names]
        if end.startswith("experts."):  # their biases, side by side
            pieces = [Composition.whole(*one) for one in zip(names, stored, strict=True)]
            return fitted(pieces, 1, ", ".join(names))
        rows = [(_squeezed(one) or (1,))[0] for one in stored]
        pieces = [self._whole(name, (count, *shape[1:])) for name, count in zip(names, rows, strict=True)]
        return fitted(pieces, 0, ", ".join(names))

    def rotary_factors(self) -> Tensor | None:
        """float32 [frequencies]: what each is divided by, where the file has factors (Llama 3.1) and the configuration
        does not say as much."""
        if _ROTARY_FACTORS not in self._tensors or self._follows(_ROTARY_FACTORS):
            return None
        file, tensor = self._tensors[_ROTARY_FACTORS]
        return file.numbers(tensor).float()

    def scale_frequencies(self, model: Any) -> None:
        """Divides the rotary frequencies of `model` by the factors of the file, where it has some."""
        factors = self.rotary_factors()
        if factors is None:
            return
        for name, buffer in model.named_buffers():
            if not name.endswith("inv_freq"):
                continue
            if buffer.shape != factors.shape or not bool((factors > 0).all()):
                raise ModelLoadError(
                    f"The file {self._files[0].path} has {factors.numel()} rotary factors for {buffer.numel()} "
                    "frequencies; fetch it again."
                )
            buffer.div_(factors)

    def read_all(self, reads: Sequence[Read], config: Any, device: torch.device, progress: Progress) -> list[Weight]:
        """What `reads` describe, on `device`: those that keep codes as codes, where the file has some; those with a
        codec quantised by it; others in their dtype. Raises `ModelLoadError` where a tensor holds no numbers."""
        meter = ReadMeter(progress, sum(self._read_bytes(read) for read in reads))
        made: list[Weight] = []
        unpacked: dict[str, list[str]] = {}
        for read in reads:
            weight: Weight | None = None
            if read.keeps_codes:
                weight = (self._deferred if read.defers else self._codes)(read, config, meter)
            if weight is None:
                self._note(read, unpacked)
                weight = self._plain(read, config, device, meter)
            made.append(weight)
            self._release(read)
        for kind, names in unpacked.items():
            log.info("weights_unpacked", type=kind, tensors=len(names), names=names[:_NAMED])
        if not any(isinstance(weight, DeferredRows) for weight in made):
            meter.finish()
        return made

    def _release(self, read: Read) -> None:
        for part in read.content.parts:
            self._tensors[part.source][0].release()

    def _note(self, read: Read, unpacked: dict[str, list[str]]) -> None:
        """Which quantized weights are not kept so."""
        kinds = {self._tensors[part.source][1].kind for part in read.content.parts}
        for kind in kinds:
            if kind.name not in _NUMBERS:
                unpacked.setdefault(kind.name, []).append(read.content.parts[0].source)

    def _deferred(self, read: Read, config: Any, meter: ReadMeter) -> DeferredRows | None:
        """As `_codes`, which the files are kept open for."""

        def rows(first: int, end: int, meter: ReadMeter) -> QuantizedRows | None:
            return self._codes(replace(read, content=read.content.selected(0, [ShardRange(first, end)])), config, meter)

        def reader(first: int, end: int) -> QuantizedRows:
            codes = rows(first, end, meter)
            assert codes is not None, "the first row could be cut as well"
            self._release(read)
            return codes

        like = rows(0, 1, ReadMeter(lambda done, total: None, 0))
        return None if like is None else DeferredRows(like, 0, read.content.shape[0], reader)

    def _codes(self, read: Read, config: Any, meter: ReadMeter) -> QuantizedRows | None:
        """None where the parts have no codes, or none that are cut as is asked for."""
        kinds = {self._tensors[part.source][1].kind for part in read.content.parts}
        if len(kinds) != 1 or not has_codes(*kinds) or any(part.axes != (0, 1) for part in read.content.parts):
            return None
        room: QuantizedRows | None = None
        outputs, inputs = read.content.shape
        for part in read.content.parts:
            if part.size[1] != inputs:
                return None
            for first, raw in self._slabs(part, config):
                codes = self._taken(quantized, part, raw)
                try:
                    if (blocks := self._columns(part.source, config)) is not None:
                        codes = codes.rearranged(*blocks)
                    codes = codes.columns(part.origin[1], part.origin[1] + inputs)
                except ValueError as reason:
                    log.info("codes_not_cut", tensor=part.source, reason=str(reason))
                    return None
                if codes.outputs == outputs:
                    meter.add(raw.numel())
                    return codes
                if room is None:
                    room = codes.picked(torch.zeros(outputs, dtype=torch.long))
                first += part.at[0]
                room.rows(first, first + codes.outputs).copy_from(codes)
                meter.add(raw.numel())
        return room

    def _plain(self, read: Read, config: Any, device: torch.device, meter: ReadMeter) -> Weight:
        if not read.content.shape:  # one number
            one = Composition.whole(read.content.parts[0].source, (1,))
            vector = self._plain(replace(read, content=one), config, device, meter)
            assert isinstance(vector, Tensor), "one number has no codes"
            return vector.reshape(())
        made = torch.empty(read.content.shape, dtype=read.dtype, device=device)
        for placed in read.content.parts:
            part, place = _by_file(placed), _in_order_of_file(placed, placed.place(made))
            transform = self._transform(part.source)
            for first, raw in self._slabs(part, config):
                numbers = self._taken(partial(values, dtype=read.dtype), part, raw)
                if (blocks := self._columns(part.source, config)) is not None:
                    numbers = numbers.view(len(numbers), -1, blocks[1])[:, blocks[0]].flatten(1)
                if len(part.size) > 1:
                    numbers = numbers[:, part.origin[-1] : part.origin[-1] + part.size[-1]]
                numbers = numbers.reshape(-1, *part.size[1:])
                if transform is not None and transform.numbers is not None:
                    numbers = transform.numbers[0](numbers)
                place[first : first + len(numbers)].copy_(numbers)
                meter.add(raw.numel())
        return made if read.codec is None else quantize(made, read.codec)

    def _slabs(self, part: TensorBox, config: Any) -> Iterator[tuple[int, Tensor]]:
        """(number of the first, bytes) of rows of `part`, in the model's order; each value of a vector is a row."""
        file, tensor = self._tensors[part.source]
        raw = file.rows(tensor)
        if len(tensor.shape) == 1:
            raw = raw.view(tensor.shape[0], -1)
        rows = self._order(tensor, config)[part.origin[0] : part.origin[0] + part.size[0]]
        step = max(1, _SLAB // raw.shape[1])
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            start = int(some[0])
            together = torch.equal(some, torch.arange(start, start + len(some)))
            yield first, raw[start : start + len(some)] if together else raw.index_select(0, some)

    def _order(self, tensor: GgufTensor, config: Any) -> Tensor:
        """int64 [rows]: the row of the file for each of the model's."""
        transform = self._transform(tensor.name)
        if transform is None or transform.order is None:
            return torch.arange(_rows_of(tensor))
        return _fitting(transform.order, _rows_of(tensor), tensor.name, config)

    def _columns(self, name: str, config: Any) -> tuple[Tensor, int] | None:
        """(int64 [blocks]: the block of the file for each of the model's, columns of a block); None: as they are."""
        transform = self._transform(name)
        if transform is None or transform.columns is None:
            return None
        return _fitting(transform.columns, self._tensors[name][1].shape[-1], name, config)

    def _transform(self, name: str) -> Transform | None:
        return transform_of(self._architecture, name)

    def _taken(self, take: Callable[[Tensor, Any], _T], part: TensorBox, raw: Tensor) -> _T:
        file, tensor = self._tensors[part.source]
        try:
            return take(raw, tensor.kind)
        except (ValueError, NotImplementedError) as error:
            raise ModelLoadError(
                f"The tensor {part.source} of {file.path} cannot be read as {tensor.kind.name} ({error}); the file is "
                "damaged or newer than this program, fetch it again or choose another."
            ) from error

    def _read_bytes(self, read: Read) -> int:
        tensors = [(_by_file(part), self._tensors[part.source][1]) for part in read.content.parts]
        return sum(tensor.nbytes // _rows_of(tensor) * math.prod(part.size[:1]) for part, tensor in tensors)


def _fitting(find: Callable[[int, str, Settings], _T], count: int, name: str, config: Any) -> _T:
    try:
        return find(count, name, config.to_dict())
    except ValueError as error:
        raise ModelLoadError(f"The tensor {name} {error}; the file is damaged, fetch it again.") from error


def _as_matrix(tensor: GgufTensor) -> GgufTensor:
    """The gate of a shared expert has one row, which some programs write as a vector."""
    vector = len(tensor.shape) == 1 and tensor.name.endswith("ffn_gate_inp_shexp.weight")
    return replace(tensor, shape=(1, *tensor.shape)) if vector else tensor


def _file_dims(part: TensorBox) -> list[int]:
    """The dimension of the composed tensor for each of the file's."""
    return sorted((dim for dim, axis in enumerate(part.axes) if axis is not None), key=lambda dim: part.axes[dim] or 0)


def _by_file(part: TensorBox) -> TensorBox:
    """The same box, described by dimensions of the file's tensor."""
    dims = _file_dims(part)
    origin, at, size = (tuple(values[dim] for dim in dims) for values in (part.origin, part.at, part.size))
    return TensorBox(part.source, tuple(range(len(dims))), origin, at, size, part.matrix)


def _in_order_of_file(part: TensorBox, place: Tensor) -> Tensor:
    """`place` by dimensions of the file's tensor. Shares its memory."""
    dims = _file_dims(part)
    new = [dim for dim in range(place.dim()) if dim not in dims]
    return place.permute(*dims, *new).flatten(len(dims)).squeeze(-1) if new else place.permute(*dims)


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _rows_of(tensor: GgufTensor) -> int:
    """Each value of a vector is a row."""
    return tensor.rows if len(tensor.shape) > 1 else tensor.shape[0]


def _of_experts(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Composition:
    """The tensors `names` [experts, out, in], each of whose rows the file has one after the other, side by side."""
    sides = []
    for name in names:
        if len(shape := shapes.get(name, ())) != 3:
            raise lacks(f"{name} of three dimensions")
        sides.append(stacked([matrix_of(name, expert, shapes) for expert in range(shape[0])], 0))
    return fitted(sides, 1, ", ".join(names))
