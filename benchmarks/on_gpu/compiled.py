"""What Triton's compiler makes of the kernels for a GPU that need not be there: `python -m benchmarks.on_gpu.compiled`.

For each kernel, and of attention each variant that serving uses: registers, bytes of stack (spilled registers lie
there), shared memory, and how often instructions that matter occur. Kernels that the interpreter has decorated cannot
be compiled: run it in a process of its own, with TRITON_INTERPRET=0 where there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.on_gpu.compiled_kernels import attention, fused, products, sampling
from benchmarks.on_gpu.compiled_kernels.launched import INSTRUCTIONS, Compiled
from services.executor.gpu.kernels.tiles import SHARED


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu.compiled", description=__doc__)
    parser.add_argument("--some", action="store_true", help="few variants, the largest among them")
    parser.add_argument("--only", default="", help="attention, fused, products or sampling")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each kernel, and no verdict")
    parser.add_argument("--sass", default="", help="the machine code of those that have this in their name")
    given = parser.parse_args()
    families: dict[str, Callable[[], Iterator[Compiled]]] = {
        "attention": partial(attention.attention_kernels, not given.some),
        "fused": fused.fused_kernels,
        "products": partial(products.product_kernels, not given.some),
        "sampling": partial(sampling.sampling_kernels, not given.some),
    }
    if given.only:
        families = {given.only: families[given.only]}
    bad = 0
    if not (given.json or given.sass):
        print(f"{'kernel':48} {'registers':>9} {'stack':>6} {'shared':>7}  " + "  ".join(INSTRUCTIONS))
    for family in families.values():
        for one in family():
            bad += _is_bad(one)
            if given.json:
                print(json.dumps({**one._asdict(), "sass": ""}), flush=True)
            elif not given.sass:
                counts = "  ".join(f"{one.counts[what]:>{len(what)}}" for what in INSTRUCTIONS)
                print(f"{one.name:48} {one.registers:9} {one.stack:6} {one.shared:7}  {counts}", flush=True)
            elif given.sass in one.name:
                print(one.name, one.sass, sep="\n")
    if bad and not (given.json or given.sass):
        sys.exit(f"{bad} kernels spill registers or need more shared memory than there is")


def _is_bad(one: Compiled) -> bool:
    """Models in float32 are for checks: their products take registers that no one has."""
    return (one.stack > attention.MOST_STACK and "fp32" not in one.name) or one.shared > SHARED


if __name__ == "__main__":
    main()
