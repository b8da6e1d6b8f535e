"""The two figures that matter most, for a first look: one of decode, one of prefill, as their sections measure them."""

from benchmarks.on_gpu import decode, prefill
from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.shapes import LLAMA_8B, TINY


def run(bench: Bench) -> None:
    if bench.tiny:
        decode.measure(bench, TINY, decode.TINY_CASES[:1])
    else:
        decode.measure(bench, LLAMA_8B, decode.CASES_8B[:1])
    prefill.measure(bench, "bf16", (8192,), (2048,))
