"""Cycles of the AVX2 kernels' inner loops by static analysis: `python -m benchmarks.engine.inner_loops --help`.

llvm-mca simulates a loop's instructions on a model of a processor, with all data in its first cache. So it says what
the kernels would take if memory were no bound, on processors that are not at hand. It needs `objdump` (binutils) and
`llvm-mca` (llvm). A loop is taken as it stands: the prefetches of a panel's first pass are counted in each.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.errors import BenchError
from benchmarks.harness import Sheet, run, show
from services.executor.native.library import library_file

COLUMNS, LANES, PANEL = 32, 16, 32  # of a block of codes; outputs of a side, and of both
LEVEL = "avx2"
_TURNS = 500  # of a loop


class Loop(NamedTuple):
    """The loop of a compiled function, and what one turn of it does."""

    format: str
    function: str
    rows: int
    products: int  # multiplications and additions in a turn
    multiply: int  # instructions of a turn that do, at least
    bytes: float  # of 32 weights in memory


def _quantized(name: str, function: str, rows: int, multiply: int, held: float) -> Loop:
    """A turn is a block of codes: both sides of one row, one side of four."""
    return Loop(name, function, rows, rows * COLUMNS * (PANEL if rows == 1 else LANES), multiply, held)


LOOPS = (
    Loop("bf16", "lines_1", 1, 4 * PANEL, 16, 48),  # a turn is four inputs
    _quantized("Q8_0", "slab_1_8_0_BY_BLOCKS_0", 1, 64, 34),
    _quantized("Q6_K", "span_1_6_0_BY_HALVES", 1, 48, 26.25),
    _quantized("Q4_K", "span_1_4_0_BY_BLOCKS", 1, 36, 18),
    _quantized("Q4_0", "slab_1_4_0_BY_BLOCKS_0", 1, 36, 18),
    Loop("bf16", "block_6", 6, 6 * 2 * LANES, 24, 48),  # a turn is two, unpacked before
    _quantized("Q8_0", "slab_4_8_0_BY_BLOCKS_0", 4, 128, 34),
    _quantized("Q6_K", "span_4_16_0_BY_HALVES", 4, 96, 26.25),
    _quantized("Q4_K", "span_4_14_0_BY_BLOCKS", 4, 72, 18),
    _quantized("Q4_0", "slab_4_14_0_BY_BLOCKS_0", 4, 72, 18),
)


class Instruction(NamedTuple):
    address: int
    text: str


_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t([^<#\n]+)", re.MULTILINE)


def functions(library: Path, level: str) -> dict[str, list[Instruction]]:
    """The static functions of `level` by name: its source file has them alone, as each level's has its own.

    Raises BenchError.
    """
    listing, symbols = _objdump(library, "-d", "--no-show-raw-insn"), _objdump(library, "--syms")
    code = {
        int(start, 16): [Instruction(int(at, 16), text.strip()) for at, text in _INSTRUCTION.findall(body)]
        for start, body in re.findall(r"^([0-9a-f]+) <[^>]+>:\n((?:.+\n)*)", listing, re.MULTILINE)
    }
    own = re.search(rf" df \*ABS\*\s+\S+\s+{level}\.c\n(.*?)(?: df |\Z)", symbols, re.DOTALL)
    if own is None:
        raise BenchError(f"The kernels have nothing of {level}: were they stripped, or compiled for another processor?")
    places = re.findall(r"^([0-9a-f]+) l\s+F \.text\s+\S+\s+(\S+)$", own[1], re.MULTILINE)
    return {name: code[int(start, 16)] for start, name in places if int(start, 16) in code}


def _objdump(library: Path, *options: str) -> str:
    command = ["objdump", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def innermost(code: list[Instruction], least: int) -> list[Instruction]:
    """The shortest loop of at least so many instructions that multiply. Raises BenchError where there is none."""
    places = {one.address: at for at, one in enumerate(code)}
    loops = []
    for at, one in enumerate(code):
        jump = re.match(r"j\w+\s+([0-9a-f]+)$", one.text)
        start = places.get(int(jump[1], 16), at + 1) if jump else at + 1
        if sum("madd" in inside.text for inside in code[start : at + 1]) >= least:
            loops.append(code[start : at + 1])
    if not loops:
        raise BenchError(f"No loop with {least} multiplications was found.")
    return min(loops, key=len)


def cycles(loop: list[Instruction], cpu: str) -> float:
    """Of a turn of `loop` on `cpu`, as llvm-mca names it. Raises BenchError."""
    texts = [re.sub(r"^(j\w+)\s.*", r"\1 .Lstart", one.text) for one in loop]
    command = ["llvm-mca", f"-mcpu={cpu}", f"-iterations={_TURNS}"]
    done = subprocess.run(
        command, input="\n".join([".Lstart:", *texts, ""]), capture_output=True, text=True, check=False
    )
    total = re.search(r"^Total Cycles:\s+(\d+)$", done.stdout, re.MULTILINE)
    if total is None:
        raise BenchError(f"llvm-mca failed: {done.stderr.strip()[:300]}")
    return int(total[1]) / _TURNS


def main(
    cpus: Annotated[str, typer.Option(help="With commas, as llvm-mca names them.")] = "haswell,znver3,alderlake",
) -> None:
    """Cycles per 32 weights and row of the kernels' inner loops, with data in the first cache."""
    library = library_file()
    if library is None or not library.is_file():
        raise BenchError("There are no native kernels here: install the package with a C compiler at hand.")
    for tool in ("objdump", "llvm-mca"):
        if shutil.which(tool) is None:
            raise BenchError(f"{tool} is not installed.")
    found, names = functions(library, LEVEL), cpus.split(",")
    rows = []
    for loop in LOOPS:
        if loop.function not in found:
            raise BenchError(f"{LEVEL} has no function {loop.function}: were the kernels compiled by another version?")
        turn = innermost(found[loop.function], loop.multiply)
        each = [f"{cycles(turn, cpu) * 32 / loop.products:.2f}" for cpu in names]
        rows.append((loop.format, str(loop.rows), f"{loop.bytes:g}", f"{len(turn) * 32 / loop.products:.2f}", *each))
    show(Sheet(("weights", "rows", "bytes", "instructions", *names), rows, "per 32 weights and row"))


if __name__ == "__main__":
    run(main)
