"""The kernels at each level of instructions: the same integers, the same floats up to the order of sums, and at one
level the same bits however a step is cut. Levels that this processor lacks run over a model of their instructions
(`levels/amx_model.c`, `levels/avxvnni_model.c`) or in an emulator (`qemu-aarch64`)."""

import hashlib
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
RECORDED = "e2aca3a63a92da1d545d4ce3a21bfb97fa8d45eea51190261d3896c11e9ac38e"
"""Of what AVX512-BF16 computes, by its SHA-256: it stays what it is, to the bit."""
TOLERANCE = 1e-6
"""Of a sum, as a share of the largest of its line: sums of products of bf16, in another order."""


@dataclass(frozen=True)
class Level:
    source: Path
    needs: str = ""
    """A level that this processor must have."""
    compiler: str = "gcc"
    run_with: tuple[str, ...] = ()
    machine: str = "x86_64"


LEVELS = {
    "avx2": Level(NATIVE / "levels/avx2.c", "avx2"),
    "avxvnni": Level(CHECKS / "avxvnni_model.c", "avx2"),
    "avx512vnni": Level(NATIVE / "levels/avx512vnni.c", "avx512vnni"),
    "avx512bf16": Level(NATIVE / "levels/avx512bf16.c", "avx512bf16"),
    "amx": Level(CHECKS / "amx_model.c", "avx512bf16"),
    "neon": Level(
        NATIVE / "levels/neon.c", compiler="aarch64-linux-gnu-gcc", run_with=("qemu-aarch64", "-cpu", "max")
    ),
    "neonbf16": Level(
        NATIVE / "levels/neonbf16.c",
        compiler="aarch64-linux-gnu-gcc",
        run_with=("qemu-aarch64", "-cpu", "max"),
    ),
}
PLAINEST = "avx2"


def lines_of(level: Level, directory: Path) -> list[list[str]]:
    """What `levels/check.c` says of it."""
    for tool in (level.compiler, *level.run_with[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if platform.machine() != level.machine or (level.needs and level.needs not in library.levels()):
        pytest.skip(f"this processor lacks {level.needs or level.machine}")
    program = directory / "check"
    sources = [CHECKS / "check.c", NATIVE / "shared_memory.c", NATIVE / "threads.c"]
    static = ["-static"] if level.run_with else []
    checked = f'-DCHECKED_LEVEL="{level.source}"'
    subprocess.run([level.compiler, *OPTIONS, *static, checked, *sources, "-o", program, "-lm"], check=True)
    ran = subprocess.run([*level.run_with, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout.splitlines()[-1:] + ran.stderr.splitlines()
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def plainest(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return lines_of(LEVELS[PLAINEST], tmp_path_factory.mktemp("plainest"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("neon" in name)) for name in LEVELS if name != PLAINEST],
)
def test_every_level_computes_the_same(name: str, plainest: list[list[str]], tmp_path: Path) -> None:
    found = lines_of(LEVELS[name], tmp_path)
    assert [line[0] for line in found] == [line[0] for line in plainest]
    for ours, theirs in zip(found, plainest, strict=True):
        if ours[0] == "exact":
            assert ours == theirs
        else:
            values, expected = np.array(ours[1:], float), np.array(theirs[1:], float)
            largest = np.abs(expected[np.isfinite(expected)]).max()
            np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE * largest)


def test_avx512_bf16_computes_what_it_always_has(tmp_path: Path) -> None:
    lines = lines_of(LEVELS["avx512bf16"], tmp_path)
    sums = [line for line in lines if line[0] in ("tile", "logits")]
    assert len(sums) == 5
    assert hashlib.sha256(repr(sums).encode()).hexdigest() == RECORDED
