"""The kernels at each level of instructions: the same integers, the same floats up to the order of sums, and at one
level the same bits however a step is cut. Levels that this processor lacks run over a model of their instructions
(`levels/amx_model.c`, `levels/avxvnni_model.c`) or in an emulator (`qemu-aarch64`)."""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from services.executor.native import library

NATIVE = Path(library.__file__).parent
CHECKS = Path(__file__).with_name("levels")
OPTIONS = [
    "-O1",
    "-std=gnu11",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",
    "-Wno-builtin-macro-redefined",
    "-pthread",
]
RECORDED = "be91994fe36c5135ccba3a13d6ac704c71047e06fc4f2215c02199c318051a74"
"""Of what AVX512-BF16 computes, by its SHA-256: it stays what it is, to the bit, or `ARITHMETIC` is raised."""
TOLERANCE = 1e-6
"""Of a sum, as a share of the largest of its line: sums of products of bf16, in another order."""
ROUNDED = 4e-3
"""The same behind tens of thousands of sums that are rounded to bf16, some of which fall the other way."""
TOLERANCES = {"latents": ROUNDED, "adapted": 1e-2, "coded": 3e-2}
"""Of what is rounded between two products: adapters' columns go through all of a layer's, to 8 bits as codes."""


X86, ARM = platform.machine() == "x86_64", platform.machine() == "aarch64"
CROSS = ("aarch64-linux-gnu-gcc", "-static")
EMULATOR = ("qemu-aarch64", "-cpu", "max")


class Level(NamedTuple):
    source: Path
    needs: str
    """A level that this processor must have, to run without an emulator."""
    is_arm: bool = False


LEVELS = {
    "avx2": Level(NATIVE / "levels/avx2.c", "avx2"),
    "avxvnni": Level(CHECKS / "avxvnni_model.c", "avx2"),
    "avx512vnni": Level(NATIVE / "levels/avx512vnni.c", "avx512vnni"),
    "avx512bf16": Level(NATIVE / "levels/avx512bf16.c", "avx512bf16"),
    "amx": Level(CHECKS / "amx_model.c", "avx512bf16"),
    "neon": Level(NATIVE / "levels/neon.c", "neon", is_arm=True),
    "neonbf16": Level(NATIVE / "levels/neonbf16.c", "neonbf16", is_arm=True),
}
PLAINEST = "neon" if ARM else "avx2"


@cache
def lines_of(name: str) -> list[list[str]]:
    """What `levels/check.c` says of a level."""
    level = LEVELS[name]
    emulated = level.is_arm and X86
    compiler, runner = (CROSS, EMULATOR) if emulated else (("gcc",), ())
    for tool in (*compiler[:1], *runner[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not emulated and level.needs not in library.levels():
        pytest.skip(f"this processor lacks {level.needs}")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "check")
        sources = [CHECKS / "check.c", NATIVE / "shared_memory.c", NATIVE / "threads.c"]
        checked = f'-DCHECKED_LEVEL="{level.source}"'
        subprocess.run([*compiler, *OPTIONS, checked, *sources, "-o", program, "-lm"], check=True)
        ran = subprocess.run([*runner, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout.splitlines()[-1:] + ran.stderr.splitlines()
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    "name",
    [
        "avx512bf16",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in LEVELS
            if name not in (PLAINEST, "avx512bf16")
        ),
    ],
)
def test_every_level_computes_the_same(name: str) -> None:
    found, plainest = lines_of(name), lines_of(PLAINEST)
    assert [line[0] for line in found] == [line[0] for line in plainest]
    for ours, theirs in zip(found, plainest, strict=True):
        if ours[0] == "exact":
            assert ours == theirs
        else:
            values, expected = np.array(ours[1:], float), np.array(theirs[1:], float)
            largest = np.abs(expected[np.isfinite(expected)]).max()
            tolerance = TOLERANCES.get(ours[0], TOLERANCE)
            np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * largest)


def test_avx512_bf16_computes_what_it_always_has() -> None:
    sums = [line for line in lines_of("avx512bf16") if line[0] in ("tile", "logits")]
    assert len(sums) == 5
    assert hashlib.sha256(repr(sums).encode()).hexdigest() == RECORDED
