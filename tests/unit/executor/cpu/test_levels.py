"""The kernels at each level of instructions: the same integers, the same floats up to the order of sums, and at one
level the same bits however a step is cut, by each compiler that is here. Levels that this processor lacks run with
their instructions emulated (`levels/amx_emulator.c`: the compiler's own machine code), over a model of one
(`levels/avxvnni_model.c`), or in an emulator (`qemu-aarch64`)."""

import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from services.executor.native import library
from tests.unit.executor.cpu.emulation import compilers
from tests.unit.executor.model.lanes import in_lanes

NATIVE = Path(library.__file__).parent
CHECKS = Path(__file__).with_name("levels")
OPTIONS = ["-std=gnu11", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-builtin-macro-redefined", "-pthread"]
# Of what AVX512-BF16 computes, by its SHA-256: it stays what it is, to the bit, or `ARITHMETIC` is raised.
RECORDED = "2e43ea2c4c67cf36f0349565eb015438a3546b518f9bb852ea58eb122b65bf5d"
# Of a sum, as a share of the largest of its line: sums of products of bf16, in another order.
TOLERANCE = 1e-6
# The same behind layers whose sums are rounded to bf16, a few of which fall the other way.
ROUNDED = 4e-3
# Of what is rounded between two products: adapters' columns go through all of a layer's, to 8 bits as codes.
TOLERANCES = {"latents": ROUNDED, "logits": ROUNDED, "adapted": 1e-2, "coded": 3e-2}


PROGRAMS = tempfile.TemporaryDirectory()
X86, ARM = platform.machine() == "x86_64", platform.machine() == "aarch64"
CROSS = ("aarch64-linux-gnu-gcc", "-static")
EMULATOR = ("qemu-aarch64", "-cpu", "max")


class Level(NamedTuple):
    source: Path
    needs: str  # a level that this processor must have, to run without an emulator
    is_arm: bool = False
    emulator: str = ""  # a source beside `check.c` that carries out what the processor lacks


LEVELS = {
    "avx2": Level(NATIVE / "levels/avx2.c", "avx2"),
    "avxvnni": Level(NATIVE / "levels/avxvnni.c", "avxvnni")
    if "avxvnni" in library.levels()
    else Level(CHECKS / "avxvnni_model.c", "avx2"),
    "avx512vnni": Level(NATIVE / "levels/avx512vnni.c", "avx512vnni"),
    "avx512bf16": Level(NATIVE / "levels/avx512bf16.c", "avx512bf16"),
    "amx": Level(NATIVE / "levels/amx.c", "avx512bf16", emulator="amx_emulator.c"),
    "neon": Level(NATIVE / "levels/neon.c", "neon", is_arm=True),
    "neonbf16": Level(NATIVE / "levels/neonbf16.c", "neonbf16", is_arm=True),
}
PLAINEST = "neon" if ARM else "avx2"
# What CI compares in full: those take longest, and CI has AMX' tiles alone.
COMPARED = LEVELS.keys() - {"amx", "avxvnni", "avx512vnni"}


def build(program: Path, level: Level, main: Path, native: Path, compiler: tuple[str, ...], *more: str) -> None:
    """`main`, which includes the level of the sources in `native`; `more`: options."""
    source = native / level.source.relative_to(NATIVE) if level.source.is_relative_to(NATIVE) else level.source
    others = [native / f"{name}.c" for name in ("reference", "shared_memory", "threads")]
    if level.emulator:
        others.append(CHECKS / ("amx_permission.c" if level.source.stem in library.levels() else level.emulator))
    # clang knows no `#pragma GCC target`.
    told = re.search(r'#pragma GCC target\("(.*)"\)', source.read_text()) if "clang" in compiler[0] else None
    flags = [f"-m{feature}" for feature in told[1].split(",")] if told else []
    if "-mavx512bf16" in flags:
        flags.append("-mavx512vbmi")  # of functions that only processors with it call
    options = [*compiler, *OPTIONS, *flags, f'-DCHECKED_LEVEL="{source}"', *more]
    with tempfile.TemporaryDirectory() as objects:
        subprocess.run([*options, "-c", *others], check=True, stderr=subprocess.DEVNULL, cwd=objects)
        # The functions that nothing in `main` calls take most of the time; clang compiles them all the same.
        whole = ["-fwhole-program"] if "gcc" in compiler[0] else []
        command = [*options, *whole, main, *Path(objects).glob("*.o"), "-o", program, "-lm"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


@cache
def built(name: str, compiler: str, optimization: str, tiles: bool) -> list[str]:
    """The command that runs `levels/check.c` for a level, all of it or its `tiles` alone."""
    level = LEVELS[name]
    emulated = level.is_arm and X86
    command, runner = (CROSS, EMULATOR) if emulated else ((compiler,), ())
    for tool in (*command[:1], *runner[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not emulated and level.needs not in library.levels():
        pytest.skip(f"this processor lacks {level.needs}")
    program = Path(PROGRAMS.name, f"{name}-{compiler}-{optimization}-{tiles}")
    build(program, level, CHECKS / "check.c", NATIVE, command, f"-O{optimization}", f"-DONLY_TILES={tiles:d}")
    return [*runner, str(program)]


@cache
def lines_of(name: str, compiler: str = "gcc", optimization: str = "g", which: str = "") -> list[list[str]]:
    """What `levels/check.c` says of a level, all or `which` part. `-Og` takes a third to two thirds of the time of
    `-O1` to compile, and what it makes is as fast."""
    command = [*built(name, compiler, optimization, which == "tiles"), which]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout.splitlines()[-1:] + ran.stderr.splitlines()
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.timeout(900)  # two compilations of 20 s each and an emulator, on cores that others use: seen at 300
@pytest.mark.parametrize("name", in_lanes((name for name in LEVELS if name != PLAINEST), (), COMPARED))
def test_every_level_computes_the_same(name: str) -> None:
    which = "few" if LEVELS[name].is_arm and X86 else ""
    found = lines_of(name, which=which)
    compare(found, lines_of(PLAINEST, which=which))
    if name == "avx512bf16":  # here, for its program takes ten seconds to compile
        sums = [line for line in found if line[0] in ("tile", "logits")]
        assert len(sums) == 5
        assert hashlib.sha256(repr(sums).encode()).hexdigest() == RECORDED


def compare(found: list[list[str]], plainest: list[list[str]]) -> None:
    assert [line[0] for line in found] == [line[0] for line in plainest]
    for ours, theirs in zip(found, plainest, strict=True):
        if ours[0] == "exact":
            assert ours == theirs
        else:
            values, expected = np.array(ours[1:], float), np.array(theirs[1:], float)
            largest = np.abs(expected[np.isfinite(expected)]).max()
            tolerance = TOLERANCES.get(ours[0], TOLERANCE)
            np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("optimization", in_lanes("23", (), "3"))
@pytest.mark.parametrize("compiler", compilers())
def test_every_compiler_makes_the_same_of_tiles(compiler: str, optimization: str) -> None:
    """A compiler knows nothing of what an instruction reads but what its operands say."""
    compare(lines_of("amx", compiler, optimization, "tiles"), lines_of(PLAINEST, which="tiles"))


class Bug(NamedTuple):
    """`wrong` in the place of `right`, an expression or, with its semicolon, a statement in the source `file`."""

    file: str
    right: str
    wrong: str
    told: str


BUGS = {
    "avx512bf16": (
        Bug(
            "short_exponents.c",
            "bytes_look_up(table->upper, code)",
            "bytes_look_up(table->lower, code)",
            "products of bf16",
        ),
        Bug("gemm.c", "panel += 2 * PANEL;", "panel += PANEL;", "products of bf16"),
        Bug("quantized.c", "i32_set1(x.starts[group * x.apart + row])", "i32_set1(0)", "products of int8"),
        Bug(
            "levels/vector_avx512.h",
            "_mm512_add_epi32(_mm512_slli_epi32(a, 7), b)",
            "_mm512_add_epi32(_mm512_slli_epi32(a, 6), b)",
            "products of 14-bit numbers",
        ),
        Bug("vector.h", "f32_set1(6.931513118e-1f)", "f32_set1(6.5e-1f)", "attention over bf16 keys"),
        Bug(
            "attention_codes.c",
            "values->largest / LARGEST_NUMBER + keys->nothing",
            "values->largest / UPPER + keys->nothing",
            "attention over int8 keys",
        ),
    ),
    "amx": (
        Bug(
            "levels/spans_amx.h",
            "_mm512_slli_epi32(i32_load(at[1][row + i]), 8)",
            "_mm512_slli_epi32(i32_load(at[1][row + i]), 7)",
            "products of int8",
        ),
        Bug(
            "levels/few_amx.h",
            "tile_multiply_bf16(1, 5, 6);",
            "tile_multiply_bf16(1, 4, 6);",
            "attention over bf16 keys",
        ),
        Bug(
            "attention_few.c",
            "add_key(count, 1, weights + key + 1, rows[key + 1] + column, added);",
            "add_key(count, 1, weights + key, rows[key + 1] + column, added);",
            "attention over bf16 keys",
        ),
        Bug(
            "levels/spans_amx.h",
            "tile_load(7, codes + LINE_BYTES, 2 * LINE_BYTES);",
            "tile_load(7, codes, 2 * LINE_BYTES);",
            "products of int8",
        ),
        Bug("levels/blocks_amx.h", "(row >= begin)", "(row >= 0)", "products of int8"),
        Bug(
            "levels/blocks_amx.h",
            "codes + (block) * BLOCK_BYTES,",
            "codes + 0 * (block) * BLOCK_BYTES,",
            "products of int8",
        ),
    ),
}
# A fault of what the compiler knows is one of the whole program.
UNKNOWN_MEMORY = Bug(
    "levels/instructions_amx.h",
    '"r"((const void *)(from)), "r"((long)(stride)) : "memory")',
    '"r"((const void *)(from)), "r"((long)(stride)))',
    "products of bf16",
)


def either(bug: Bug, number: int) -> str:
    """The bug where `planted` is its number."""
    if bug.right.endswith(";"):
        return f"if (planted == {number}) {{ {bug.wrong} }} else {{ {bug.right} }}"
    end = "," if bug.right.endswith(",") else ""
    return f"(planted == {number} ? {bug.wrong.removesuffix(',')} : {bug.right.removesuffix(',')}){end}"


def build_wrong(directory: Path, level: str, changes: Iterable[tuple[Bug, str]]) -> Path:
    """A proof of the level, with each bug's `right` replaced."""
    native, program = directory / "native", directory / "prove"
    shutil.copytree(NATIVE, native, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for bug, text in changes:
        source = (native / bug.file).read_text()
        assert source.count(bug.right) == 1
        (native / bug.file).write_text(source.replace(bug.right, text))
    build(program, LEVELS[level], CHECKS / "prove.c", native, ("gcc",), "-O1", "-include", str(CHECKS / "planted.h"))
    return program


def proof_of(program: Path, *planted: int) -> str | None:
    returned = subprocess.run([program, *map(str, planted)], check=False).returncode
    return dict(enumerate(library.PROOFS)).get(returned)


@pytest.mark.slow
@pytest.mark.timeout(900)  # as above
@pytest.mark.parametrize("level", BUGS)
def test_the_proof_of_a_level_tells_what_it_computes_wrongly(level: str, tmp_path: Path) -> None:
    if LEVELS[level].needs not in library.levels():
        pytest.skip(f"this processor lacks {LEVELS[level].needs}")
    bugs = dict(enumerate(BUGS[level], 1))
    program = build_wrong(tmp_path, level, ((bug, either(bug, number)) for number, bug in bugs.items()))
    assert proof_of(program) == ""
    assert {bug: proof_of(program, number) for number, bug in bugs.items()} == {bug: bug.told for bug in bugs.values()}


@pytest.mark.slow
def test_the_proof_tells_of_loads_whose_memory_the_compiler_does_not_know(tmp_path: Path) -> None:
    if LEVELS["amx"].needs not in library.levels():
        pytest.skip(f"this processor lacks {LEVELS['amx'].needs}")
    program = build_wrong(tmp_path, "amx", [(UNKNOWN_MEMORY, UNKNOWN_MEMORY.wrong)])
    assert proof_of(program) == UNKNOWN_MEMORY.told
