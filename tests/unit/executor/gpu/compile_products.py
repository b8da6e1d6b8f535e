"""Compiles the kernels of `products.py` for sm_90 and prints what they take, as JSON; needs no GPU.

A process of its own: in the tests' process the kernels are interpreted. Run by test_products_compiled.py, or by hand:
python -m tests.unit.executor.gpu.compile_products
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.executor.triton_kernels import product_launch, products

TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("scales", "parts"), "*fp32"),
    **dict.fromkeys(("rows", "outputs", "inputs", "x_stride", "splits"), "i32"),
    **dict.fromkeys(("limit", "smallest"), "fp32"),
    "codes": "*i8",
    "arrivals": "*i32",
}
ALIGNED = [["tt.divisibility", 16]]
"""What PyTorch's memory and usual widths are, and Triton sees at a launch."""
EVEN = frozenset({"outputs", "inputs", "x_stride"})


def measure(kernel: Any, warps: int, stages: int, constants: dict[str, Any]) -> dict[str, int]:
    """Registers, bytes of stack (spills) and shared memory, and what is copied and multiplied how."""
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
    wide = [at for at, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name in EVEN]
    source = ASTSource(kernel, signature, constants, {(at,): ALIGNED for at in wide})
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"] + found["LOCAL"],
        "shared": compiled.metadata.shared,
        "products": compiled.asm["ptx"].count("wgmma.mma_async"),
        "copies": compiled.asm["ptx"].count("cp.async.c"),
    }


def main() -> None:
    coded = {"CODE": 2, "BIAS": True, "WIDE": False}
    few = {"BLOCK_T": 64, "BLOCK_N": product_launch.BLOCK_N, "BLOCK_K": product_launch.BLOCK_K, "SPLIT": True}
    one = {
        "BLOCK_N": product_launch.ONE_ROW_N,
        "BLOCK_K": product_launch.ONE_ROW_K,
        "STAGES": product_launch.STAGES,
    }
    found = {
        "few rows": measure(products.few_rows, 4, product_launch.STAGES, {**few, **coded}),
        "one row": measure(products.one_row, 4, 3, {**one, **coded}),
        "encode": measure(products.encode_rows, 16, 3, {"BLOCK": 32768, "CODE": 2}),
    }
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
