"""What the launching code launches, and what Triton's compiler makes of it for an H100 or H200; neither need be there.

    launching code ─▶ kernel[grid](...) ─▶ Triton binds and specialises ─▶ noted here; nothing is run

Tensors are those of the device `meta`: they have shapes, and take the branches that a GPU takes. So what is compiled is
what serving launches, and an argument that Triton does not take is refused here as it would be there.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

TARGET = GPUTarget("cuda", 90, 32)
# Patterns of SASS.
INSTRUCTIONS = {
    "wgmma": r"HGMMA",
    "mma": r"\bHMMA",
    "async": r"LDGSTS",
    "wide async": r"LDGSTS\S*\.128",
    "wide load": r"\bLDG\S*\.128",
    "convert": r"\b(I2F|F2F|I2FP)",
}


class Compiled(NamedTuple):
    """A kernel as machine code."""

    name: str
    registers: int
    stack: int  # bytes of each thread; spilled registers lie there
    shared: int  # bytes of each program
    counts: dict[str, int]  # of `INSTRUCTIONS`


def _cuobjdump(*arguments: str) -> str:
    """Of Triton's own wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout


class Launched(NamedTuple):
    """The first launch of a kernel with arguments of such kinds."""

    kernel: Any
    # Triton's types by argument; `constexpr` among them, also what it has made a constant of, as it does of 1.
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]  # by the argument's place
    attributes: dict[tuple[int, ...], Any]  # by the argument's place: that it divides by 16
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def values(self) -> dict[str, Any]:
        """The constants by name."""
        return {self.kernel.arg_names[at]: value for (at,), value in self.constants.items()}


class NoDevice:
    """Triton's driver of a GPU that need not be there."""

    def get_current_target(self) -> Any:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def launches(work: Callable[[], object]) -> list[Launched]:
    """What `work` launches, in its order. From now on this process launches nothing on a GPU."""
    found: list[Launched] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002  # Triton's name for it
        attributes = compile["configs"][0]
        found.append(
            Launched(
                fn.jit_function, dict(compile["signature"]), dict(compile["constants"]), dict(attributes),
                compile["num_warps"], compile["num_stages"],
            )
        )  # fmt: skip
        return True  # neither compiled nor launched

    driver.set_active(NoDevice())
    triton.knobs.runtime.jit_cache_hook = note
    try:
        work()
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return found


def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that has no numbers."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def compile_launched(name: str, launched: Launched) -> Compiled:
    """As Triton would at this launch."""
    source = ASTSource(launched.kernel, launched.signature, launched.constants, launched.attributes)
    options = {"num_warps": launched.warps, "num_stages": launched.stages}
    made = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    taken = {what: int(number) for what, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {what: len(re.findall(pattern, sass)) for what, pattern in INSTRUCTIONS.items()}
    stack = taken["STACK"] + taken["LOCAL"]
    return Compiled(name, taken["REG"], stack, made.metadata.shared, counts)


def compile_work(name: str, work: Callable[[], object]) -> Iterator[Compiled]:
    """Each kind of launch of `work`, once; the first is called `name`, and the kernels of others are named, too."""
    seen: list[Launched] = []
    for launched in launches(work):
        if launched not in seen:
            yield compile_launched(name if not seen else f"{name} {launched.name}", launched)
            seen.append(launched)
