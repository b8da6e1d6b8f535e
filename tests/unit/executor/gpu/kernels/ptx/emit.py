"""What Triton's compiler makes of launches, as JSON: `python -m tests.unit.executor.gpu.kernels.ptx.emit CASE ...`.

In a process of its own, with TRITON_INTERPRET=0: kernels that the interpreter has decorated cannot be compiled.
"""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np

from tests.unit.executor.gpu.kernels.ptx.machine import run
from tests.unit.executor.gpu.kernels.ptx.memory import Memory

Value = np.ndarray[Any, Any] | float | int


class Emitted(NamedTuple):
    """A kernel that was compiled for one launch."""

    kernel: str
    ptx: str
    signature: dict[str, str]
    """Triton's types, by name, of what is passed when it runs."""
    warps: int
    shared: int

    def run(self, grid: tuple[int, ...], memory: Memory, **arguments: Value) -> None:
        """`arguments`: arrays, which are written to; addresses; numbers."""
        values = [_bits(arguments[name], kind, memory) for name, kind in self.signature.items()]
        run(self.ptx, grid, self.warps, self.shared, values, memory)


def _bits(value: Value, kind: str, memory: Memory) -> int:
    if isinstance(value, np.ndarray):
        return memory.give(value)
    if kind == "fp32":
        return int(np.float32(value).view(np.uint32))
    return int(value) & (2**64 - 1)


def emitted(*cases: str) -> dict[str, list[Emitted]]:
    """By case: its launches, in their order."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, *cases],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return {name: [Emitted(*one) for one in kernels] for name, kernels in json.loads(found.stdout).items()}


def main() -> None:
    import triton
    from triton.compiler import ASTSource

    from benchmarks.on_gpu.launched import TARGET, Launched, launches
    from tests.unit.executor.gpu.kernels.ptx.cases import LAUNCHES

    made: list[tuple[Launched, Emitted]] = []

    def emit(launched: Launched) -> Emitted:
        for before, emitted in made:
            if before == launched:
                return emitted
        source = ASTSource(launched.kernel, launched.signature, launched.constants, launched.attributes)
        options = {"num_warps": launched.warps, "num_stages": launched.stages}
        compiled = triton.compile(source, target=TARGET, options=options)
        passed = {name: kind for name, kind in launched.signature.items() if kind != "constexpr"}
        emitted = Emitted(
            launched.name, compiled.asm["ptx"], passed, launched.warps, compiled.metadata.shared
        )
        made.append((launched, emitted))
        return emitted

    json.dump({name: [emit(one) for one in launches(LAUNCHES[name])] for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
