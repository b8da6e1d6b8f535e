"""Decode and prefill: tokens/s, and the share of what the memory, or the rate of matrix products, allows.

The limit of a decode step is the time in which the weights and the keys and values that it reads pass through the
memory at the bandwidth that a copy has; what is written is a thousandth of it. The cache holds random numbers:
computing contexts of 8k for 128 sequences would take minutes, and changes no byte of what a step reads.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.machine import took
from benchmarks.on_gpu.served import BackToBack, Served, decode_plan, greedy, prefill_plan, served
from benchmarks.on_gpu.shapes import BLOCK, LLAMA_8B, LLAMA_13B, TINY, KvDType, Shape, WeightDType, at_most

SHORT, LONG = 1024, 8192
CHUNK = 512  # tokens of a step at most


class Case(NamedTuple):
    """One figure; cases of one ring stand together."""

    weights: WeightDType
    kv: KvDType
    context: int
    batch: int

    def key(self, shape: Shape) -> str:
        return f"decode/{shape.name.lower()}/{self.weights}/kv-{self.kv}/{self.context}/{self.batch}"

    def what(self, shape: Shape) -> str:
        return f"decode {shape.name}, {self.weights} weights, {self.kv} KV, context {self.context}, batch {self.batch}"


def _cases(weights: WeightDType, kv: KvDType, short: Sequence[int], long: Sequence[int]) -> list[Case]:
    return [Case(weights, kv, SHORT, n) for n in short] + [Case(weights, kv, LONG, n) for n in long]


CASES_8B = [
    *_cases("bf16", "bf16", (1, 8, 32, 128), (1, 8, 32, 128)),
    *_cases("bf16", "fp8", (1, 8, 32, 128), (1, 8, 32, 128)),
    *_cases("bf16", "int8", (1, 32), (1, 32)),
]
CODED_8B = [
    *_cases("fp8", "bf16", (1, 8, 32, 128), (1, 32)),
    *_cases("fp8", "fp8", (1, 8, 32, 128), (1, 8, 32, 128)),
    *_cases("int8", "bf16", (1, 32), ()),
    *_cases("int4", "bf16", (1, 8, 32, 128), ()),
    *_cases("q4_k", "bf16", (1, 32), ()),
]
HEADLINE_8B = [*_cases("bf16", "bf16", (1,), ()), *_cases("int4", "bf16", (1,), ())]
CASES_13B = [
    *_cases("bf16", "bf16", (1, 8, 32, 128), (1, 8, 128)),
    *_cases("fp8", "fp8", (1, 8, 32, 128), (1, 8, 32, 128)),
    *_cases("bf16", "fp8", (1, 32), (1, 8)),
]
TINY_CASES = [Case("bf16", "bf16", 40, 1), Case("bf16", "fp8", 40, 2)]
TINY_CODED = [Case("fp8", "bf16", 40, 1), Case("int4", "bf16", 40, 1)]


def bf16_8b(bench: Bench) -> None:
    measure_decode(bench, TINY if bench.tiny else LLAMA_8B, TINY_CASES if bench.tiny else CASES_8B)


def coded_8b(bench: Bench) -> None:
    """Weights in fp8 are for GPUs alone: a dry run learns that they are refused."""
    measure_decode(bench, TINY if bench.tiny else LLAMA_8B, TINY_CODED if bench.tiny else CODED_8B)


def all_13b(bench: Bench) -> None:
    measure_decode(bench, TINY if bench.tiny else LLAMA_13B, TINY_CASES[:1] if bench.tiny else CASES_13B)


def measure_decode(bench: Bench, shape: Shape, cases: Sequence[Case]) -> None:
    """Cases of one ring stand together."""
    for (weights, kv), group in groupby(cases, lambda case: (case.weights, case.kv)):
        fitting = list(_that_fit(bench, shape, list(group)))
        if fitting:
            key = f"decode/{shape.name.lower()}/{weights}/kv-{kv}"
            with bench.case(key, f"decode {shape.name}, {weights} weights, {kv} KV"):
                _ring(bench, shape, weights, kv, fitting)


def _that_fit(bench: Bench, shape: Shape, cases: Sequence[Case]) -> Iterator[Case]:
    """Says of the others why not."""
    memory = torch.cuda.mem_get_info(bench.device)[1] if bench.device.type == "cuda" else 1e9
    for case in cases:
        why = at_most(case.batch, case.context, shape, case.weights, case.kv, memory)
        if why:
            bench.missing(case.key(shape), case.what(shape), why)
        elif not bench.late(case.key(shape), case.what(shape)):
            yield case


def _ring(bench: Bench, shape: Shape, weights: WeightDType, kv: KvDType, cases: Sequence[Case]) -> None:
    """One ring for all cases that share its weights and blocks."""
    most = max(case.batch for case in cases)
    memory = int(max(_cache_bytes(shape, case, most) for case in cases))
    options: dict[str, Any] = {"kv_dtype": kv, "kv_memory": memory, "max_sequences": most, "max_batch_tokens": CHUNK}
    options |= {"weight_dtype": weights} if weights != "bf16" else {}
    with served(shape, bench.device, context_length=max(case.context for case in cases) + BLOCK, **options) as ring:
        ring.fill_cache()
        for case in cases:
            if bench.late(case.key(shape), case.what(shape)):
                continue
            try:
                _measure(bench, ring, shape, case)
            except (ValueError, torch.OutOfMemoryError) as error:  # of this case alone
                bench.failed(case.key(shape), case.what(shape), error)


def _cache_bytes(shape: Shape, case: Case, sequences: int) -> float:
    """A little more than the case's blocks. Where they are compressed the last of each sequence is writable, and the
    ring keeps some for prompts."""
    writable = 2 * sequences + CHUNK // BLOCK + 32 if case.kv != "bf16" else 32
    cache = case.batch * (case.context + BLOCK) * shape.kv_bytes(case.kv)
    return 1.01 * cache + writable * BLOCK * shape.kv_bytes("bf16")


def _measure(bench: Bench, ring: Served, shape: Shape, case: Case) -> None:
    plan = decode_plan(case.batch, case.context, ring.spec.num_blocks, ring.spec.num_quantized)
    steps = BackToBack(ring, plan)
    repeats, warm = (2, 1) if bench.tiny else (20, 3)
    wall = took(steps, bench.device, repeats, warm, most=1.5).wall
    steps.drain()
    read = shape.decode_bytes(case.batch, case.context, case.weights, case.kv)
    limit = case.batch * bench.bandwidth / read if bench.bandwidth else None
    note = f"{wall * 1e3:.2f} ms a step, {read / 1e9:.2f} GB"
    bench.measured(case.key(shape), case.what(shape), case.batch / wall, "tok/s", limit, note)


PROMPTS = (2048, 8192)
CHUNKS = (512, 2048, 8192)  # 512 is the default of --max-batch-tokens


def prefill(bench: Bench) -> None:
    for weights in ("bf16",) if bench.tiny else ("bf16", "fp8"):
        measure_prefill(bench, weights, PROMPTS, CHUNKS)


def measure_prefill(bench: Bench, weights: str, prompts: Sequence[int], chunks: Sequence[int]) -> None:
    """One ring's, which computes each of `prompts` in each of `chunks` that it is not shorter than."""
    shape = TINY if bench.tiny else LLAMA_8B
    prompts, chunks = ((64,), (32, 64)) if bench.tiny else (prompts, chunks)
    longest = max(prompts)
    memory = int(4 * longest * shape.kv_bytes("bf16"))
    options: dict[str, Any] = {"kv_dtype": "bf16", "kv_memory": memory, "max_sequences": 1, "max_batch_tokens": longest}
    options |= {"weight_dtype": weights} if weights != "bf16" else {}
    with (
        bench.case(f"prefill/{weights}", f"prefill {shape.name}, {weights} weights"),
        served(shape, bench.device, context_length=longest + BLOCK, **options) as ring,
    ):
        for tokens in prompts:
            for chunk in [each for each in chunks if each <= tokens]:
                key = f"prefill/{weights}/{tokens}/{chunk}"
                what = f"prefill {shape.name}, {weights} weights, prompt {tokens}, chunks of {chunk}"
                if not bench.late(key, what):
                    seconds = _prompt(bench, ring, tokens, chunk)
                    flops, rate = shape.flops(tokens), bench.matrix_rate(weights)
                    limit = tokens * rate / flops if rate else None
                    note = f"{flops / seconds / 1e12:.3g} TFLOP/s, first token after {seconds * 1e3:.0f} ms"
                    bench.measured(key, what, tokens / seconds, "tok/s", limit, note)


def _prompt(bench: Bench, ring: Served, tokens: int, chunk: int) -> float:
    """Seconds of a prompt in such chunks."""
    writable, quantized = ring.spec.num_blocks, ring.spec.num_quantized
    seconds = 0.0
    for before in range(0, tokens, chunk):
        last = before + chunk >= tokens
        plan = prefill_plan(min(chunk, tokens - before), before, writable, quantized, last=last)
        samples = greedy(1 if last else 0)
        # Each once before: a longer context may be cut into parts, by kernels that are not compiled yet.
        seconds += took(lambda p=plan, g=samples: ring.step(p, g), bench.device, 1 if bench.tiny else 3, warm=1).wall  # type: ignore[misc]
    return seconds


def headline(bench: Bench) -> None:
    if bench.tiny:
        measure_decode(bench, TINY, TINY_CASES[:1])
    else:
        measure_decode(bench, LLAMA_8B, HEADLINE_8B)
    measure_prefill(bench, "bf16", (8192,), (2048,))
