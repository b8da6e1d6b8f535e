"""C compilers that are here; and the level `amx` on processors that lack it, in the tests' own process.

With RYZANSTEIN_TEST_EMULATE=amx the library's own machine code runs, and each instruction of AMX is carried out by a
handler of its signal (`levels/amx_emulator.c`): right, and thousands of times slower.
"""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

from services.executor.native import library

SOURCE = Path(__file__).with_name("levels") / "amx_emulator.c"


def emulate_amx() -> None:
    """Before anything asks for levels. The processor needs `avx512bf16`."""
    has = library._levels_of
    if "avx512bf16" not in has(library.compiled()) or "amx" in has(library.compiled()):
        raise SystemExit(
            "RYZANSTEIN_TEST_EMULATE=amx needs a CPU with AVX512-BF16, compiled kernels, and no AMX; leave it out."
        )
    with tempfile.TemporaryDirectory() as directory:
        emulator = Path(directory, "amx_emulator.so")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", SOURCE, "-o", emulator, "-lm"], check=True)
        ctypes.CDLL(str(emulator))  # its constructor takes the signal
    library._levels_of = lambda compiled: ("amx", *has(compiled))


def compilers() -> list[str]:
    """That are here, of those that users have."""
    names = ("gcc", *(f"gcc-{version}" for version in (12, 13, 14)), *(f"clang-{version}" for version in (14, 16, 19)))
    found = {str(Path(path).resolve()): name for name in reversed(names) if (path := shutil.which(name))}
    return sorted(found.values()) or ["gcc"]
