"""What Triton's compiler makes of one kernel for an H100 or H200, which need not be there."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
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


def compile_source(name: str, source: Any, warps: int, stages: int) -> Compiled:
    """As Triton would at the first launch; `source`: its `ASTSource`."""
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


def _cuobjdump(*arguments: str) -> str:
    """Of Triton's own wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout
