"""What Triton's compiler makes of one kernel for an H100 or H200, which need not be there."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 << 10
"""Bytes of shared memory that one program can have there."""
ALIGNED = [["tt.divisibility", 16]]
"""What PyTorch's memory and usual widths are, and Triton sees at a launch."""
INSTRUCTIONS = {
    "wgmma": r"HGMMA",
    "mma": r"\bHMMA",
    "async": r"LDGSTS",
    "wide async": r"LDGSTS\S*\.128",
    "load": r"\bLDG\.",
    "wide load": r"\bLDG\S*\.128",
    "byte load": r"\bLDS\S*\.[US]8",
    "convert": r"\b(I2F|F2F|I2FP)",
    "branch": r"\bBRA\b",
}
"""Patterns of SASS."""


class Compiled(NamedTuple):
    """A kernel as machine code."""

    name: str
    registers: int
    stack: int
    """Bytes of each thread; spilled registers lie there."""
    shared: int
    """Bytes of each program."""
    counts: dict[str, int]
    """Of `INSTRUCTIONS`."""
    sass: str = ""


def compile_kernel(
    name: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: set[str],
    warps: int,
    stages: int = 3,
) -> Compiled:
    """As Triton would at the first launch. `signature`: Triton's types by argument, `constexpr` among them; `aligned`:
    the arguments that divide by 16."""
    attributes = {(at,): ALIGNED for at, argument in enumerate(kernel.arg_names) if argument in aligned}
    source = ASTSource(kernel, dict(signature), dict(constants), attributes)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    taken = {what: int(number) for what, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {what: len(re.findall(pattern, sass)) for what, pattern in INSTRUCTIONS.items()}
    stack = taken["STACK"] + taken["LOCAL"]
    return Compiled(name, taken["REG"], stack, made.metadata.shared, counts, sass)


def with_types(kernel: Any, types: Mapping[str, str]) -> dict[str, str]:
    """A signature: constants are what has no type."""
    return {name: types.get(name, "constexpr") for name in kernel.arg_names}


def pointers(signature: Mapping[str, str]) -> set[str]:
    return {name for name, kind in signature.items() if kind.startswith("*")}


def _cuobjdump(*arguments: str) -> str:
    """Of Triton's own wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout
