"""The two figures that matter most, for a first look: one of decode, one of prefill, as their sections measure them."""

from benchmarks.on_gpu.decode import CASES_8B, TINY_CASES, measure_decode
from benchmarks.on_gpu.prefill import measure_prefill
from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.shapes import LLAMA_8B, TINY


def headline(bench: Bench) -> None:
    if bench.tiny:
        measure_decode(bench, TINY, TINY_CASES[:1])
    else:
        measure_decode(bench, LLAMA_8B, CASES_8B[:1])
    measure_prefill(bench, "bf16", (8192,), (2048,))
