"""A linear layer packed for the native kernels: bf16 as in `native/short_exponents.h`, or as in `native/gemm.h` where
that does not fit or pay; quantized as in `native/quantized.h`.

Linears that are computed as one (queries, keys and values; gate and up) are joined row by row where their weights have
one format. Queries, keys and values of several formats follow each other as linears of their own; gate and up, which
meet in registers, are brought to one format.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from services.executor.cpu.quantized import PANEL, PackedFormat, format_of, pack_rows, servable, short_exponents
from services.executor.model.loading.arena import fresh
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.weight_formats import Weight
from services.executor.native.library import RzLinear

log = structlog.get_logger(__name__)

GATE_RUN = 16  # gate and up projections alternate by as many outputs: one vector of each meets in registers


@dataclass(frozen=True)
class OutputSource:
    """Which outputs of a model's module some rows are: row i its output `first + i * stride`, of this rank's."""

    module: str  # by its name in transformers' model; of experts' parameters theirs
    first: int = 0
    stride: int = 1


@dataclass(frozen=True)
class SourceRows:
    """Where a module's outputs are in a packed weight, as `PackedSegment` says it."""

    source: OutputSource
    rows: int
    first: int
    run: int
    step: int

    def places(self) -> Tensor:
        """int64 [rows]: where the rows go."""
        rows = torch.arange(self.rows)
        return self.first + rows // self.run * self.step + rows % self.run


@dataclass(frozen=True)
class PackedSegment:
    """Rows of a packed weight that come from one tensor: row i goes to `first + i // run * step + i % run`."""

    weight: Weight  # [rows, in], bf16 or quantized; rows of bf16 are contiguous
    bias: Tensor | None
    first: int
    run: int
    step: int
    source: OutputSource | None = None  # None: nothing is asked of where they come from

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    def cut(self, parts: int) -> list["PackedSegment"]:
        """The same rows of bf16 in about `parts` pieces of whole runs, without their bias."""
        assert isinstance(self.weight, Tensor), "quantized rows are packed by panels"
        size = -(-self.rows // (parts * GATE_RUN)) * GATE_RUN
        cuts = []
        for start in range(0, self.rows, size):
            first = self.first + start // self.run * self.step + start % self.run
            cuts.append(PackedSegment(self.weight[start : start + size], None, first, self.run, self.step))
        return cuts

    def places(self) -> Tensor:
        """int64 [rows]: where the rows go."""
        return SourceRows(OutputSource(""), self.rows, self.first, self.run, self.step).places()


def one_after_another(parts: Iterable[tuple[Weight, Tensor | None]]) -> list[PackedSegment]:
    """Weights [rows, in] with their biases, end to end."""
    pieces = []
    first = 0
    for weight, bias in parts:
        rows = weight.shape[0]
        pieces.append(PackedSegment(weight, bias, first, max(rows, 1), max(rows, 1)))
        first += rows
    return pieces


def alternating(gate: tuple[Weight, Tensor | None], up: tuple[Weight, Tensor | None]) -> list[PackedSegment]:
    """A gate and an up projection of equally many rows, a multiple of 16, in alternating runs."""
    return [PackedSegment(*gate, 0, GATE_RUN, 2 * GATE_RUN), PackedSegment(*up, GATE_RUN, GATE_RUN, 2 * GATE_RUN)]


def named(pieces: list[PackedSegment], sources: Iterable[OutputSource]) -> list[PackedSegment]:
    """The same, with the source of each."""
    return [replace(piece, source=source) for piece, source in zip(pieces, sources, strict=True)]


def split_rows(weight: Weight, sizes: Sequence[int]) -> list[Weight]:
    """Parts of `sizes` rows, end to end; they share the weight's memory."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [rows_between(weight, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def split_evenly(weight: Weight, parts: int) -> list[Weight]:
    """Equally many rows each, end to end; they share the weight's memory."""
    return split_rows(weight, [weight.shape[0] // parts] * parts)


def rows_between(weight: Weight, first: int, end: int) -> Weight:
    """The outputs [first, end), which share the weight's memory."""
    assert isinstance(weight, Tensor | QuantizedRows | DeferredRows), "others are for GPUs"
    return weight[first:end] if isinstance(weight, Tensor) else weight.rows(first, end)


@dataclass(frozen=True)
class PackedLinear:
    """A packed weight and its bias, with what owns their memory."""

    packed: Tensor  # uint8 [bytes]
    bias: Tensor | None  # float32 [outputs, rounded up to whole panels]
    outputs: int
    inputs: int
    form: PackedFormat | None = None  # None: bf16 as it is
    permutation: Tensor | None = None  # int32 [columns], of a quantized weight
    next: "PackedLinear | None" = None  # the outputs behind these, of another format
    sources: list[SourceRows] = field(default_factory=list)  # of its outputs; of experts those of each

    @classmethod
    def of(
        cls, library: Any, pieces: list[PackedSegment], pool: Executor, threads: int, plain: bool = False
    ) -> "PackedLinear":
        """Packs with `threads` threads of `pool`. `plain`: bf16 keeps its exponents as they are."""
        linear: PackedLinear | None = None
        for part in reversed(_of_one_format(pieces)):
            make = _pack_bf16 if isinstance(part[0].weight, Tensor) else _pack_quantized
            made = make(library, part, pool, threads)
            linear = replace(made if plain else _shortened(library, made, pool, threads), next=linear)
        assert linear is not None, "a linear has rows"
        return linear

    @classmethod
    def of_experts(
        cls, library: Any, experts: list[list[PackedSegment]], pool: Executor, threads: int
    ) -> "PackedLinear":
        """Experts of equally many outputs, whole panels each, one after the other: all in one format."""
        pieces = _unified([piece for expert in experts for piece in expert])
        each = [pieces[first : first + len(experts[0])] for first in range(0, len(pieces), len(experts[0]))]
        make = _pack_bf16 if isinstance(pieces[0].weight, Tensor) else _pack_quantized
        made = [first := make(library, each[0], pool, threads)]
        size = first.packed.numel()
        room = fresh(len(each) * size)
        room[:size] = first.packed
        for number, part in enumerate(each[1:], 1):
            made.append(make(library, part, pool, threads, room[number * size :][:size]))
        biases = [linear.bias for linear in made if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        whole = replace(first, packed=room, bias=bias, outputs=len(each) * first.outputs)
        return _shortened(library, whole, pool, threads)

    @property
    def parts(self) -> list["PackedLinear"]:
        """This one, and what follows it."""
        return [self, *(self.next.parts if self.next else [])]

    @property
    def nbytes(self) -> int:
        return sum(part.packed.nbytes for part in self.parts)

    def describe(self) -> RzLinear:
        """The structure that the kernels take."""
        made = RzLinear(self.packed.data_ptr(), None, self.outputs, self.inputs)
        if self.bias is not None:
            made.bias = self.bias.data_ptr()
        if self.form is not None:
            made.format = self.form.describe(self.permutation)
        if self.next is not None:
            made.next = ctypes.pointer(self.next.describe())
        return made


@contextmanager
def packing(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that pack. Each computes alone: PyTorch would start others beside it."""
    of_torch = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "pack", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(of_torch)  # of threads to come


def plain_rows(weight: Tensor) -> PackedLinear:
    """bf16 [outputs, inputs] as it is, in its own memory: rows to look up."""
    rows = weight.detach().contiguous()
    return PackedLinear(rows.view(torch.uint8).flatten(), None, *rows.shape)


def _of_one_format(pieces: list[PackedSegment]) -> list[list[PackedSegment]]:
    """`pieces` in runs of one format each; in one run where they alternate."""
    if any(piece.step != piece.run for piece in pieces):
        return [_unified(pieces)]
    runs: list[list[PackedSegment]] = []
    for piece in pieces:
        if runs and _alike(runs[-1][-1].weight, piece.weight):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [
        [
            replace(laid, source=piece.source)
            for laid, piece in zip(one_after_another((piece.weight, piece.bias) for piece in run), run, strict=True)
        ]
        for run in runs
    ]


def _alike(one: Weight, other: Weight) -> bool:
    formats = [weight.like if isinstance(weight, DeferredRows) else weight for weight in (one, other)]
    if isinstance(formats[0], QuantizedRows) and isinstance(formats[1], QuantizedRows):
        return formats[0].same_format(formats[1])
    return isinstance(one, Tensor) and isinstance(other, Tensor)


def _unified(pieces: list[PackedSegment]) -> list[PackedSegment]:
    if all(_alike(pieces[0].weight, piece.weight) for piece in pieces[1:]):
        return pieces
    weights = [piece.weight.read() if isinstance(piece.weight, DeferredRows) else piece.weight for piece in pieces]
    coded = [weight for weight in weights if isinstance(weight, QuantizedRows)]
    if not coded:
        return pieces
    same = QuantizedRows.of_one_format(coded) if len(coded) == len(weights) else None
    if same is None:
        log.info(
            "weights_unpacked",
            reason="weights that are computed as one have formats that cannot be one",
            shape=coded[0].shape,
        )
        plain = [weight.dequantized().bfloat16() if isinstance(weight, QuantizedRows) else weight for weight in weights]
        return [replace(piece, weight=weight) for piece, weight in zip(pieces, plain, strict=True)]
    return [replace(piece, weight=weight) for piece, weight in zip(pieces, same, strict=True)]


def _pack_bf16(
    library: Any, pieces: list[PackedSegment], pool: Executor, threads: int, into: Tensor | None = None
) -> PackedLinear:
    """`into`: the room, uint8; None: one is made."""
    outputs, inputs = sum(piece.rows for piece in pieces), pieces[0].weight.shape[1]
    packed = fresh(library.rz_packed_bytes(outputs, inputs)) if into is None else into
    if outputs % PANEL or inputs % 2:
        packed.zero_()  # what fills up the last panel and pair counts as zero
    jobs = [part for piece in pieces for part in piece.cut(threads)]
    for job in [pool.submit(_pack, library, part, packed) for part in jobs]:
        job.result()
    return PackedLinear(packed, _joined_bias(pieces, outputs), outputs, inputs, sources=_sources_of(pieces))


def has_short_exponents(library: Any) -> bool:
    """Whether bf16 weights are kept in 12 bits at the library's level. AMX multiplies what it reads from memory, and
    would have to wait for it to be unpacked."""
    return str(library.level) != "amx"


def _shortened(library: Any, linear: PackedLinear, pool: Executor, threads: int) -> PackedLinear:
    """The same weights in 12 bits each, where they are bf16 whose exponents allow it."""
    size = library.rz_short_exponents_panel_bytes(linear.inputs)
    if linear.form is not None or not size or not has_short_exponents(library):
        return linear
    panels = -(-linear.outputs // PANEL)
    packed = fresh(panels * size)
    step = -(-panels // threads)
    pack = partial(library.rz_short_exponents_pack, packed.data_ptr(), linear.packed.data_ptr(), linear.inputs)
    jobs = [pool.submit(pack, first, min(first + step, panels)) for first in range(0, panels, step)]
    fits = [job.result() for job in jobs]
    return replace(linear, packed=packed, form=short_exponents(linear.inputs)) if all(fits) else linear


def _pack(library: Any, piece: PackedSegment, packed: Tensor) -> None:
    weight = piece.weight
    assert isinstance(weight, Tensor), "quantized rows are packed by panels"
    rows, inputs = weight.shape
    places = (piece.first, piece.run, piece.step)
    library.rz_pack(packed.data_ptr(), weight.data_ptr(), rows, inputs, weight.stride(0), *places)


def _pack_quantized(
    library: Any, pieces: list[PackedSegment], pool: Executor, threads: int, into: Tensor | None = None
) -> PackedLinear:
    weight = pieces[0].weight
    like = servable(weight.like if isinstance(weight, DeferredRows) else _coded(weight))
    outputs = sum(piece.rows for piece in pieces)
    form = format_of(like)
    placed = [(piece.weight, piece.places()) for piece in pieces]
    packed = pack_rows(library, partial(_block, placed), form, outputs, pool, threads, into)
    bias = _joined_bias(pieces, outputs)
    return PackedLinear(packed, bias, outputs, like.inputs, form, like.permutation, sources=_sources_of(pieces))


def _sources_of(pieces: list[PackedSegment]) -> list[SourceRows]:
    return [
        SourceRows(piece.source, piece.rows, piece.first, piece.run, piece.step)
        for piece in pieces
        if piece.source is not None
    ]


def _block(placed: Sequence[tuple[Weight, Tensor]], first: int, end: int) -> QuantizedRows:
    """The outputs [first, end) of all pieces, each a weight with the places of its rows; those of weights in files are
    read."""
    held, places = [], []
    for weight, there in placed:
        low, high = torch.searchsorted(there, torch.tensor([first, end])).tolist()
        if low < high:
            held.append(_coded(rows_between(weight, low, high)))
            places.append(there[low:high] - first)
    joined = held[0] if len(held) == 1 else QuantizedRows.joined(held)
    order = torch.cat(places)
    return joined if torch.equal(order, torch.arange(len(order))) else joined.picked(order.argsort())


def _coded(weight: Weight) -> QuantizedRows:
    if isinstance(weight, DeferredRows):
        return weight.read()
    assert isinstance(weight, QuantizedRows), "others are packed as bf16"
    return weight


def _joined_bias(pieces: list[PackedSegment], outputs: int) -> Tensor | None:
    """float32 [outputs, rounded up to whole panels]"""
    if all(piece.bias is None for piece in pieces):
        return None
    joined = torch.zeros(-(-outputs // PANEL) * PANEL, dtype=torch.float32)
    for piece in pieces:
        if piece.bias is not None:
            joined[piece.places()] = piece.bias.float()
    return joined
