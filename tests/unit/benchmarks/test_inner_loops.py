"""The loop whose cycles are told is the one that multiplies, and of the level that was asked for."""

import platform
import shutil

import pytest

from benchmarks.engine.inner_loops import LEVEL, LOOPS, Instruction, functions, innermost
from benchmarks.errors import BenchError
from services.executor.native.library import library_file, load_library

_CODE = [
    Instruction(0x10, "xor    %eax,%eax"),
    Instruction(0x12, "vmovdqu (%rdi),%ymm0"),
    Instruction(0x16, "vpmaddwd %ymm0,%ymm1,%ymm2"),
    Instruction(0x1A, "jne    16"),
    Instruction(0x1C, "vpmaddwd %ymm0,%ymm1,%ymm3"),
    Instruction(0x20, "jne    12"),
    Instruction(0x22, "jne    40"),
]


def test_the_shortest_loop_with_so_many_products_is_taken() -> None:
    assert innermost(_CODE, 1) == _CODE[2:4]
    assert innermost(_CODE, 2) == _CODE[1:6]
    with pytest.raises(BenchError, match="No loop with 3"):
        innermost(_CODE, 3)


def test_every_loop_is_found_in_the_kernels() -> None:
    library = library_file()
    if library is None or load_library() is None or platform.machine() != "x86_64" or not shutil.which("objdump"):
        pytest.skip("there are no kernels of x86-64 here, or no objdump")
    found = functions(library, LEVEL)
    for loop in LOOPS:
        turn = innermost(found[loop.function], loop.multiply)
        assert not any("zmm" in one.text for one in turn), "another level's"
