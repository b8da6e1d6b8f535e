"""What products with quantized weights take: `python -m benchmarks.engine.quantized --help`.

One linear layer in every format, at several counts of rows, in this process: the formats take turns, and the best of
many rounds counts, so that a noisy machine troubles them alike. With few rows memory bounds them, and GB/s of packed
weights tell; with many the processor does, and billions of multiplications and additions a second tell. bf16 is what
they are compared with: an integer dot product does twice as many of them as a bf16 one.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import typer

from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, run, show, timed
from services.executor.cpu.packed_linear import PackedLinear, one_after_another
from services.executor.model.loading.arena import fresh
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Weight
from services.executor.native.library import RzModel, load_library

OUTPUTS, INPUTS = 11264, 2048  # gate and up of a model of 1.1B parameters
ROWS = (1, 2, 4, 16, 64, 256)
PYTORCH = "float32, PyTorch"  # by oneDNN or MKL
PLAIN = "bf16, its exponents as they are"
SPINS = 0.1  # seconds: so long PyTorch's threads may look for more work, on the cores of what is timed next
COPIES_OF = 160 << 20  # bytes of each format that take turns at few rows: more than the caches hold


def formats(outputs: int = OUTPUTS, inputs: int = INPUTS) -> Iterator[tuple[str, Weight]]:
    """(name, a weight in it) of random codes."""
    weight = torch.randn(outputs, inputs) * 0.02
    yield "bf16", weight.bfloat16()
    for name, codec in CODECS.items():
        room = codec.empty(outputs, inputs)
        codec.encode_into(room, weight)
        yield name, room
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    for group in (32, 128):
        scales = torch.rand(outputs, inputs // group).half()
        yield f"4 bits, {group}", QuantizedRows(codes, 4, group, scales, offset=8)
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
        yield f"4 bits, {group}, zero points", QuantizedRows(codes, 4, group, scales, zeros=zeros)
    scales = torch.randint(-32, 32, (outputs, inputs // 16), dtype=torch.int8)
    supers = torch.rand(outputs, inputs // 256).half()
    yield "q3_k", QuantizedRows(codes % 8, 3, 16, scales, offset=4, supers=supers, per=16)


class Products:
    """Packed copies of one weight."""

    def __init__(
        self, library: Any, decoder: Any, weight: Weight, pool: ThreadPoolExecutor, plain: bool = False
    ) -> None:
        self._library, self._decoder = library, decoder
        self._linear = PackedLinear.of(library, one_after_another([(weight, None)]), pool, 2, plain)
        self.nbytes = self._linear.nbytes
        self._memory = [self._linear.packed]
        while len(self._memory) * self.nbytes < COPIES_OF:
            self._memory.append(fresh(self.nbytes).copy_(self._linear.packed))

    def seconds(self, x: torch.Tensor, out: torch.Tensor) -> float:
        """The best of one product with each copy."""
        best = float("inf")
        for memory in self._memory if len(x) < ROWS[3] else self._memory[:1]:
            described = self._linear.describe()
            described.packed = memory.data_ptr()
            began = time.perf_counter()
            self._library.rz_decoder_multiply(
                self._decoder, ctypes.byref(described), x.data_ptr(), len(x), out.data_ptr()
            )
            best = min(best, time.perf_counter() - began)
        return best


def products(threads: int, rounds: int) -> Sheet:
    library = load_library()
    if library is None:
        raise typer.Exit(1)
    decoder = library.rz_decoder_new(ctypes.byref(RzModel()), threads, None)
    weights = dict(formats())
    with ThreadPoolExecutor(threads) as pool:
        products = {name: Products(library, decoder, weight, pool) for name, weight in weights.items()}
        products[PLAIN] = Products(library, decoder, weights["bf16"], pool, plain=True)
    plain = torch.randn(OUTPUTS, INPUTS)
    sizes = {name: made.nbytes for name, made in products.items()} | {PYTORCH: plain.nbytes}
    best: dict[str, list[float]] = {name: [] for name in sizes}
    torch.set_num_threads(threads)
    for rows in ROWS:
        x, out = torch.randn(rows, INPUTS).bfloat16(), torch.empty(rows, OUTPUTS)
        work: dict[str, Callable[[], float]] = {name: partial(one.seconds, x, out) for name, one in products.items()}
        work[PYTORCH] = partial(_seconds_by_pytorch, x.float(), plain)
        for name, taken in in_turns(work, rounds).items():
            best[name].append(min(taken))
    library.rz_decoder_free(decoder)
    head = ("format", *(f"{rows} rows, {'GB/s' if rows < ROWS[3] else 'GOPS'}" for rows in ROWS))
    cells = [(name, *_cells(size, best[name], best["bf16"])) for name, size in sizes.items()]
    return Sheet(head, cells, f"{OUTPUTS} x {INPUTS}, {threads} threads, {library.level}; in brackets: x bf16")


def _seconds_by_pytorch(x: torch.Tensor, weight: torch.Tensor) -> float:
    taken = timed(partial(torch.nn.functional.linear, x, weight))()
    time.sleep(SPINS)
    return taken


def _cells(nbytes: int, times: Sequence[float], plain: Sequence[float]) -> Iterator[str]:
    for rows, taken, of_bf16 in zip(ROWS, times, plain, strict=True):
        few = rows < ROWS[3]
        rate = (nbytes if few else 2 * rows * OUTPUTS * INPUTS) / taken / 1e9
        yield f"{rate:.{int(few)}f} ({of_bf16 / taken:.2f})"


def main(threads: Threads = CORES, rounds: Rounds = 8) -> None:
    """Times products in every format."""
    show(products(threads, rounds))


if __name__ == "__main__":
    run(main)
