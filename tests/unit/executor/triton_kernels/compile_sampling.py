"""Compiles the kernels that sample for an H200, which need not be there, and prints each one's name and shared memory.
A process of its own: `python -m tests.unit.executor.triton_kernels.compile_sampling`, with TRITON_INTERPRET=0."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.executor.triton_kernels import sampling
from services.executor.triton_kernels.drawing import BLOCK, WARPS

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "logits": "*bf16", "largest": "*fp32", "params": "*fp64", "prefixes": "*i32", "tallies": "*fp64",
    "needs": "*fp64", "sums": "*fp64", "tokens": "*i64",
}  # fmt: skip
CHUNKS = 32


def compile_one(kernel: Any, **constants: int | bool) -> None:
    signature = {name: POINTERS.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": WARPS})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__, compiled.metadata.shared)  # noqa: T201  # what it is run for


if __name__ == "__main__":
    for weights in (False, True):
        compile_one(sampling.tally, WEIGHTS=weights, FILL=0xFFFF, BLOCK=BLOCK)
        compile_one(sampling.choose, WEIGHTS=weights, CHUNKS=CHUNKS)
    compile_one(sampling.weigh, FILL=0xFFFF, BLOCK=BLOCK)
    compile_one(sampling.draw, FILL=0xFFFF, BLOCK=BLOCK, CHUNKS=CHUNKS)
