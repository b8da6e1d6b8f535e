"""Compiles the kernels of `fused.py` for sm_90 and prints what they take, as JSON; needs no GPU.

A process of its own: in the tests' process the kernels are interpreted. Run by test_fused_compiled.py, or by hand:
python -m tests.unit.executor.triton_kernels.compile_fused
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

from services.executor.triton_kernels import activations, fused, norms, rotary

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]
"""What PyTorch's memory and usual widths are, and Triton sees at a launch."""


def measure(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, int]:
    """Registers, bytes of stack (spills) and shared memory, and loads of 16 bytes of one kernel."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert {name for name, kind in signature.items() if kind == "constexpr"} == constants.keys()
    wide = [
        at for at, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name == "width"
    ]
    source = ASTSource(kernel, signature, constants, {(at,): ALIGNED for at in wide})
    compiled = triton.compile(source, target=TARGET, options={"num_warps": warps})
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
        "wide_loads": len(re.findall(r"ld\.global\S*\.v(?:4\.b32|2\.b64|8\.b16)", compiled.asm["ptx"])),
    }


def add_norm(width: int, dtype: str = "*bf16", **switches: Any) -> dict[str, int]:
    types = dict.fromkeys(("x", "residual", "out"), dtype) | dict.fromkeys(("after", "weight"), "*fp32")
    types |= {"scale": "fp32", "eps": "fp32", "width": "i32"}
    constants = {"BLOCK": triton.next_power_of_2(width), **switches}
    return measure(norms.add_norm, types, constants, fused.norm_warps(constants["BLOCK"]))


def place(
    q_heads: int, kv_heads: int, width: int, half: int, normed: bool, dtype: str = "*bf16"
) -> dict[str, int]:
    types = dict.fromkeys(("qkv", "query", "hot"), dtype) | {"slots": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("cosines", "sines"), "*fp32" if half else "*bf16")
    types |= dict.fromkeys(("query_norm", "key_norm"), "*fp32" if normed else "*bf16")
    block = triton.next_power_of_2(width)
    constants = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "SIZE": 16, "WIDTH": width, "HALF": half}
    constants |= {"BLOCK_H": fused.VALUES // block, "BLOCK_D": block, "NORMS": normed, "OFFSET": False}
    return measure(rotary.place, types, constants, 4)


def gated(gelu: bool) -> dict[str, int]:
    types = {"x": "*bf16", "out": "*bf16", "width": "i32"}
    return measure(activations.gated, types, {"BLOCK": fused.VALUES, "GELU": gelu}, 4)


def main() -> None:
    plain = {"ADD": True, "AFTER": False, "SCALED": False, "OFFSET": False}
    whole = {"ADD": True, "AFTER": True, "SCALED": True, "OFFSET": True}
    found = {
        "norm, 4096": add_norm(4096, **{**plain, "ADD": False}),
        "add and norm, 4096": add_norm(4096, **plain),
        "add and norm, 5120": add_norm(5120, **plain),
        "add and norm, 4096, fp32": add_norm(4096, "*fp32", **plain),
        "norm, add and norm, 8192": add_norm(8192, **whole),
        "norm, add and norm, 16384": add_norm(16384, **whole),
        "place, 32 and 8 heads": place(32, 8, 128, 64, normed=False),
        "place, norms": place(32, 8, 128, 64, normed=True),
        "place, norms, fp32": place(32, 8, 128, 64, normed=True, dtype="*fp32"),
        "place, heads of 256, norms": place(8, 4, 256, 128, normed=True),
        "place, heads of 96": place(32, 32, 96, 48, normed=False),
        "place, not turned": place(16, 4, 128, 0, normed=False),
        "silu": gated(gelu=False),
        "gelu": gated(gelu=True),
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
