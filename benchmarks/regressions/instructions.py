"""Instructions that a product of the AVX2 kernels takes, counted by valgrind on any x86 machine: no clock is read, and
newer instructions of the processor change nothing. Printed and compared by `benchmarks.regressions.counts`.

What is multiplied is packed here; a process without PyTorch, whose import alone takes minutes under valgrind,
multiplies it.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.errors import BenchError
from services.executor.native.library import LEVEL, RzLinear, RzModel, load_library

ROOT = Path(__file__).parents[2]
COUNTED = "avx2"
OUTPUTS, INPUTS = 256, 2048
ROWS = {1: "1 row", 64: "64 rows"}  # a stream by itself, and a full batch
KINDS = ("bf16", "int8", "q8_0", "q6_k", "q4_k", "4 bits, 32")
_TIME_LIMIT = 300.0  # seconds: only so that nothing hangs for ever


def missing() -> str | None:
    """Why nothing can be counted here, or None."""
    if platform.machine() != "x86_64":
        return "not an x86-64 machine"
    if load_library() is None:
        return "there are no native kernels"
    return None if shutil.which("valgrind") else "valgrind is not installed"


def count() -> dict[str, int]:
    """Instructions of a product of each kind with each number of rows, by what counts.json calls them.

    Raises BenchError where valgrind does not come to an end.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _write_products(Path(scratch))
        product = f"rz_multiply_{COUNTED}"
        watch = ("--collect-atstart=no", f"--toggle-collect={product}", f"--dump-after={product}")
        command = ["valgrind", "--tool=callgrind", *watch, f"--callgrind-out-file={scratch}/counted"]
        child = [sys.executable, "-c", f"from {__name__} import multiply; multiply({scratch!r})"]
        try:
            done = subprocess.run(
                [*command, *child],
                cwd=ROOT,
                env=os.environ | {LEVEL: COUNTED},
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"Counting instructions took longer than {_TIME_LIMIT:g} s.") from None
        if done.returncode:
            raise BenchError(f"Counting instructions failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        works = [f"kernels: {COUNTED}, {said} by {kind}, instructions" for kind in KINDS for said in ROWS.values()]
        profiles = sorted(Path(scratch).glob("counted.*"), key=lambda file: int(file.suffix[1:]))
        # The level's proof of itself came before them.
        return dict(zip(works, map(_total, profiles[-len(works) :]), strict=True))


def _write_products(scratch: Path) -> None:
    """Writes of each kind `NUMBER.linear`, how a product is described, and `NUMBER.packed`, its weights."""
    from benchmarks.engine.quantized import formats
    from services.executor.cpu.packed_linear import PackedLinear, one_after_another

    library = load_library()
    weights = dict(formats(OUTPUTS, INPUTS))
    with ThreadPoolExecutor(1) as pool:
        for number, kind in enumerate(KINDS):
            linear = PackedLinear.of(library, one_after_another([(weights[kind], None)]), pool, 1)
            (scratch / f"{number}.linear").write_bytes(bytes(linear.describe()))
            (scratch / f"{number}.packed").write_bytes(linear.packed.numpy().tobytes())


def _total(profile: Path) -> int:
    found = re.search(r"^totals: (\d+)$", profile.read_text(), re.MULTILINE)
    if found is None:
        raise BenchError("valgrind counted nothing: are the kernels' symbols stripped?")
    return int(found[1])


def multiply(scratch: str) -> None:
    """Multiplies what `_write_products` wrote there, with each number of rows."""
    library = load_library()
    assert library is not None, "products were written for it"
    decoder = library.rz_decoder_new(ctypes.byref(RzModel()), 1, None)
    for number in range(len(KINDS)):
        linear = RzLinear.from_buffer_copy(Path(scratch, f"{number}.linear").read_bytes())
        packed = ctypes.create_string_buffer(Path(scratch, f"{number}.packed").read_bytes())
        linear.packed = ctypes.addressof(packed)
        for rows in ROWS:
            x, out = b"\x80\x3f" * (rows * INPUTS), ctypes.create_string_buffer(rows * OUTPUTS * 4)
            library.rz_decoder_multiply(decoder, ctypes.byref(linear), x, rows, out)
    library.rz_decoder_free(decoder)
