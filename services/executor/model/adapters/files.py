"""The files of a LoRA adapter, as peft writes them: checked against the model that they are for, and cut for a rank.

    adapter_config.json            `configuration.py`
    adapter_model.safetensors      base_model.model.<module>.lora_A.weight [rank, in], ....lora_B.weight [out, rank]

Of experts peft writes one pair for each (`experts.3.gate_proj`), or one for all of a parameter (`target_parameters`):
A [experts * rank, in], expert by expert, and B [out, rank * experts], rank by rank. The second parameter of the same
module wraps the first: its tensors stand at the module itself, those of the first at `base_layer`.
Pickled files are not read. Source: https://github.com/huggingface/peft, modules `tuners.lora.layer` and
`utils.save_and_load`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.model.adapters.configuration import MAX_RANK, AdapterConfig, read_config
from services.executor.model.adapters.targets import AdapterTarget, Spans, whole_targets
from shared.errors import ModelLoadError, reason_of

log = structlog.get_logger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_BYTES = 4 << 30  # of an adapter's weights
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_OF_ALL_EXPERTS = re.compile(r"(.+\.experts)(?:\.base_layer)?")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_DTYPES = frozenset({"F16", "BF16", "F32"})
_NAMES_TOLD = 120  # characters of a name in an error


@dataclass(frozen=True)
class AdapterInfo:
    """What is told of an adapter before it is stored."""

    rank: int  # the largest of its modules
    bytes: int  # of its factors, as the files hold them
    modules: int  # linears that it changes; of experts one for all that do the same
    digest: str  # SHA-256 of scales and factors, in hexadecimal: two adapters that compute the same have one


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one linear: x [T, in] -> (x A^T) B^T."""

    a: Tensor  # [rank, in]; of experts [experts, rank, in]
    b: Tensor  # [out, rank], the scale folded in; of experts [experts, out, rank]

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


LowRankWeights = Mapping[str, LowRank]  # an adapter, by the names of the targets that it changes


def inspect_adapter(directory: Path, config: Any, max_rank: int = MAX_RANK) -> AdapterInfo:
    """What the adapter in `directory` is, for the model of the transformers text configuration `config`.

    Raises `ModelLoadError`, one sentence, where it is no adapter, asks for what is not served, is of another model,
    or of a rank above `max_rank`.
    """
    return inspect_for(directory, whole_targets(config), max_rank)


def inspect_for(directory: Path, targets: Sequence[AdapterTarget], max_rank: int = MAX_RANK) -> AdapterInfo:
    """The same, for a model with these `targets`."""
    with _files(directory, targets, max_rank) as files:
        digest = hashlib.sha256()
        for name, pair in files.pairs():
            shapes = (tuple(pair.a.shape), tuple(pair.b.shape))
            digest.update(repr((name, files.scale(name), shapes, str(pair.a.dtype))).encode())
            for factor in (pair.a, pair.b):
                digest.update(_bytes_of(factor))
        return AdapterInfo(files.rank, files.bytes, len(files.groups), digest.hexdigest())


def read_adapter(
    directory: Path, targets: Sequence[AdapterTarget], dtype: torch.dtype, max_rank: int = MAX_RANK
) -> dict[str, LowRank]:
    """A rank's share of the adapter in `directory`, on the host, in `dtype`; `targets` are those of the rank.

    Raises `ModelLoadError` as `inspect_adapter` does.
    """
    by_name = {target.name: target for target in targets}
    with _files(directory, targets, max_rank) as files:
        return {name: _cut(pair, by_name[name], files.scale(name), dtype) for name, pair in files.pairs()}


def _cut(pair: LowRank, target: AdapterTarget, scale: float, dtype: torch.dtype) -> LowRank:
    a = _selected(pair.a, -1, target.columns).to(dtype).contiguous()
    b = _selected(pair.b, -2, target.rows)
    return LowRank(a, (b.float() * scale).to(dtype).contiguous())


def _selected(tensor: Tensor, dim: int, spans: Spans | None) -> Tensor:
    if spans is None:
        return tensor
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in spans], dim)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass
class _Group:
    """The tensors of one target: part ("", or "gate.3" of an expert) -> {"A": name in the file, "B": name}."""

    target: AdapterTarget
    parts: dict[str, dict[str, str]] = field(default_factory=dict)


class _Files:
    """An adapter's files, checked but for their values, which are checked as they are read."""

    def __init__(
        self, path: Path, reader: Any, config: AdapterConfig, targets: Sequence[AdapterTarget], max_rank: int
    ) -> None:
        self._path, self._reader, self._config = path, reader, config
        self._targets = {target.name: target for target in targets}
        self._max_rank = max_rank
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_dtypes: dict[str, str] = {}
        self.rank = self.bytes = 0
        self.groups: dict[str, _Group] = {}
        self._check()

    def scale(self, name: str) -> float:
        """Of the target `name`."""
        part = next(iter(self.groups[name].parts.values()))
        return self._config.scale_of(self._configured(part["A"], name))

    def pairs(self) -> Iterator[tuple[str, LowRank]]:
        """The factors of each target that the adapter changes, in the order of their names, whole and as the file
        has them. Raises `ModelLoadError` where some are no numbers."""
        for name in sorted(self.groups):
            yield name, self._pair(self.groups[name])

    # --- checks ----------------------------------------------------------------------------------

    def _check(self) -> None:
        names = list(self._reader.keys())
        if not names:
            raise ModelLoadError(f"The adapter's {self._path} holds no tensors.")
        for name in names:
            described = self._reader.get_slice(name)
            self._shapes[name] = tuple(described.get_shape())
            self._file_dtypes[name] = described.get_dtype()
            self._sort(name)
        for group in self.groups.values():
            self._check_group(group)

    def _sort(self, name: str) -> None:
        """Puts the tensor `name` to the target that it is for."""
        if self._file_dtypes[name] not in _DTYPES:
            raise self._wrong(name, f"is of {self._file_dtypes[name]} where F32, F16 or BF16 is read")
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise self._wrong(name, _why_no_factor(name))
        module, factor = _own_name(match[1]), match[2]
        target, part = self._find(module, name)
        group = self.groups.setdefault(target.name, _Group(target))
        if factor in group.parts.setdefault(part, {}):
            raise self._wrong(name, f"is there twice for {target.name}")
        group.parts[part][factor] = name

    def _find(self, module: str, name: str) -> tuple[AdapterTarget, str]:
        """(what `module` means, which part of it)."""
        for candidate in _spellings(module):
            if candidate in self._targets and not self._targets[candidate].experts:
                return self._targets[candidate], ""
            if (match := _EXPERT.fullmatch(candidate)) is not None:
                part = _PARTS[match[3]]
                leaves = ("down_proj",) if part == "down" else ("gate_up_proj", "up_proj")
                found = next((t for leaf in leaves if (t := self._targets.get(f"{match[1]}.{leaf}"))), None)
                if found is not None and int(match[2]) < found.experts:
                    return found, f"{part}.{int(match[2])}"
            if (match := _OF_ALL_EXPERTS.fullmatch(candidate)) is not None:
                found = self._of_all(match[1], candidate.endswith(".base_layer"), name)
                if found is not None:
                    return found, ""
        if module.rpartition(".")[2] in ("lm_head", "embed_tokens", "embed_out", "wte"):
            raise self._wrong(name, "adapts an embedding or the output layer, which is not served")
        if re.search(r"(^|\.)(gate|router|shared_expert_gate)(\.\w+)?$", module):
            raise self._wrong(name, "adapts what chooses experts, which is not served; train without it")
        raise self._wrong(name, "is of a module that the model does not have, or in which adapters are not served")

    def _of_all(self, experts: str, is_inner: bool, name: str) -> AdapterTarget | None:
        """Which parameter of `experts` the tensor `name` is for: by its size, else by the order peft wraps them in."""
        leaves = ("gate_up_proj", "up_proj", "down_proj")
        found = [t for leaf in leaves if (t := self._targets.get(f"{experts}.{leaf}")) is not None]
        factor = name.removesuffix(".weight").removesuffix(".default")[-1]
        fitting = [
            target
            for target in found
            if self._shapes[name][-1 if factor == "A" else 0] == (target.inputs if factor == "A" else target.outputs)
        ]
        if len(fitting) == 1:
            return fitting[0]
        candidates = fitting or found
        return None if not candidates else candidates[0 if is_inner else -1]

    def _check_group(self, group: _Group) -> None:
        target = group.target
        for part, factors in group.parts.items():
            for missing in {"A", "B"} - factors.keys():
                have = next(iter(factors.values()))
                raise self._wrong(have, f"is there without its lora_{missing}")
            self._check_pair(target, part, factors)
        if target.experts and "" not in group.parts:
            self._check_experts(group)

    def _check_pair(self, target: AdapterTarget, part: str, factors: Mapping[str, str]) -> None:
        a, b = (self._shapes[factors[factor]] for factor in "AB")
        stacked = target.experts if target.experts and not part else 1
        expected = self._config.rank_of(self._configured(factors["A"], target.name))
        outputs = target.outputs
        if part and not part.startswith("down"):
            outputs //= 2 if target.name.endswith("gate_up_proj") else 1
        for factor, shape, wanted in (
            ("A", a, (expected * stacked, target.inputs)),
            ("B", b, (outputs, expected * stacked)),
        ):
            if shape == wanted:
                continue
            raise self._wrong(
                factors[factor],
                f"has the shape {list(shape)} where rank {expected} and the model call for {list(wanted)}: the "
                "adapter is of another model, or its configuration of another adapter",
            )
        if expected > self._max_rank:
            raise self._wrong(factors["A"], f"has rank {expected}, and --max-adapter-rank allows {self._max_rank}")
        self.rank = max(self.rank, expected)
        for name, shape in ((factors["A"], a), (factors["B"], b)):
            self.bytes += shape[0] * shape[1] * (4 if self._file_dtypes[name] == "F32" else 2)

    def _check_experts(self, group: _Group) -> None:
        """That all parts have one rank and one scale, so that they are one weight."""
        ranks = {self._shapes[factors["A"]][0] for factors in group.parts.values()}
        scales = {
            self._config.scale_of(self._configured(factors["A"], group.target.name)) for factors in group.parts.values()
        }
        if len(ranks) > 1 or len(scales) > 1:
            some = next(iter(group.parts.values()))["A"]
            raise self._wrong(some, "has another rank or scale than others of its layer's experts")

    def _configured(self, tensor: str, target: str) -> str:
        """What the configuration's patterns call the module of `tensor`."""
        match = _FACTOR.fullmatch(tensor)
        assert match is not None, "tensors of groups are factors"
        module = _own_name(match[1])
        return target if _OF_ALL_EXPERTS.fullmatch(module) else module

    # --- values ----------------------------------------------------------------------------------

    def _pair(self, group: _Group) -> LowRank:
        target = group.target
        if "" in group.parts:
            factors = group.parts[""]
            a, b = self._tensor(factors["A"]), self._tensor(factors["B"])
            if not target.experts:
                return LowRank(a, b)
            count = target.experts
            return LowRank(a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1).contiguous())
        return self._of_experts(group)

    def _of_experts(self, group: _Group) -> LowRank:
        """Of pairs for each expert, the gate's factors beside the up projection's."""
        target, first = group.target, next(iter(group.parts.values()))
        rank, dtype = self._shapes[first["A"]][0], self._tensor(first["A"]).dtype
        kinds = ["gate", "up"] if target.name.endswith("gate_up_proj") else ["up", "down"]
        kinds = [kind for kind in kinds if any(part.startswith(kind) for part in group.parts)]
        halves = 2 if target.name.endswith("gate_up_proj") else 1
        width = target.outputs // halves
        a = torch.zeros(target.experts, rank * len(kinds), target.inputs, dtype=dtype)
        b = torch.zeros(target.experts, target.outputs, rank * len(kinds), dtype=dtype)
        for part, factors in group.parts.items():
            kind, expert = part.split(".")
            at, row = kinds.index(kind) * rank, width if kind == "up" and halves == 2 else 0
            a[int(expert), at : at + rank] = self._tensor(factors["A"])
            b[int(expert), row : row + width, at : at + rank] = self._tensor(factors["B"])
        return LowRank(a, b)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._reader.get_tensor(name)
        if not bool(tensor.isfinite().all()):
            raise self._wrong(name, "holds NaN or infinite values")
        return tensor

    def _wrong(self, name: str, what: str) -> ModelLoadError:
        shown = name if len(name) <= _NAMES_TOLD else f"{name[:_NAMES_TOLD]}..."
        return ModelLoadError(f"The tensor {shown} of the adapter's {self._path} {what}.")


@contextmanager
def _files(directory: Path, targets: Sequence[AdapterTarget], max_rank: int) -> Iterator[_Files]:
    """Raises `ModelLoadError` as `inspect_adapter` does."""
    config, path = read_config(directory), directory / WEIGHTS_FILE
    with _opened(directory, path) as reader:
        yield _Files(path, reader, config, targets, max_rank)


def _opened(directory: Path, path: Path) -> Any:
    pickled = next((name for name in _PICKLED if (directory / name).exists()), None)
    try:
        size = path.stat().st_size
    except OSError:
        if pickled is not None:
            raise ModelLoadError(
                f"The adapter's {directory / pickled} is pickled, which may hold code and is not read; save it as "
                "safetensors (save_pretrained of peft)."
            ) from None
        raise ModelLoadError(
            f"The directory {directory} has no {WEIGHTS_FILE}, so the adapter is incomplete; fetch it again."
        ) from None
    if size > MAX_BYTES:
        raise ModelLoadError(
            f"The adapter's {path} has {size} bytes, and {MAX_BYTES} are read at most; choose a smaller rank."
        )
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"The adapter's {path} is not a safetensors file ({reason_of(error)}); fetch it again."
        ) from error


def _own_name(module: str) -> str:
    return module.removeprefix(PREFIX)


def _spellings(module: str) -> Iterator[str]:
    """What the served model may call `module`: where the author had the model with its vision part around it, or
    Mixtral under its older names."""
    for name in dict.fromkeys((module, module.replace(".language_model.", "."), f"model.{module}")):
        yield name
        if ".block_sparse_moe." in name:
            yield name.replace(".block_sparse_moe.", ".mlp.")
    if "language_model.model." in module:
        yield module.replace("language_model.model.", "model.")


def _why_no_factor(name: str) -> str:
    if "lora_embedding" in name:
        return "adapts an embedding, which is not served"
    if "lora_magnitude_vector" in name:
        return "is DoRA's, which is not served"
    if "modules_to_save" in name or not re.search(r"lora_", name):
        return "is no factor of a low-rank product, and only those are served"
    return "is neither lora_A.weight nor lora_B.weight, and only those are served"
