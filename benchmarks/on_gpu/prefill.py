"""Prefill: tokens/s of one prompt in chunks, and the share of the rate that matrix products reach."""

from collections.abc import Sequence

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.served import Served, greedy, prefill_plan, served
from benchmarks.on_gpu.shapes import BLOCK, LLAMA_8B, TINY, Shape
from benchmarks.on_gpu.timing import release, took

PROMPTS = (2048, 8192)
CHUNKS = (512, 2048, 8192)
"""512 is the default of --max-batch-tokens."""


def prefill(bench: Bench) -> None:
    for weights in ("bf16",) if bench.tiny else ("bf16", "fp8"):
        measure_prefill(bench, weights, PROMPTS, CHUNKS)


def measure_prefill(bench: Bench, weights: str, prompts: Sequence[int], chunks: Sequence[int]) -> None:
    """One ring's, which computes each of `prompts` in each of `chunks` that it is not shorter than."""
    shape = TINY if bench.tiny else LLAMA_8B
    prompts, chunks = ((64,), (32, 64)) if bench.tiny else (prompts, chunks)
    longest = max(prompts)
    memory = int(4 * longest * shape.kv_bytes("bf16"))
    options = {"kv_dtype": "bf16", "kv_memory": memory, "max_sequences": 1, "max_batch_tokens": longest}
    options |= {"weight_dtype": weights} if weights != "bf16" else {}
    try:
        with served(shape, bench.device, context_length=longest + BLOCK, **options) as ring:
            for tokens in prompts:
                for chunk in [each for each in chunks if each <= tokens]:
                    key = f"prefill/{weights}/{tokens}/{chunk}"
                    what = f"prefill {shape.name}, {weights} weights, prompt {tokens}, chunks of {chunk}"
                    if bench.left() <= 0:
                        bench.missing(key, what, "no time was left")
                        continue
                    _prompt(bench, ring, shape, weights, tokens, chunk)
    except Exception as error:  # one kind of weights that fails leaves the other
        bench.failed(f"prefill/{weights}", f"prefill {shape.name}, {weights} weights", error)
    release(bench.device)


def _prompt(bench: Bench, ring: Served, shape: Shape, weights: str, tokens: int, chunk: int) -> None:
    hot, cold = ring.spec.num_blocks, ring.spec.num_cold
    seconds = 0.0
    for before in range(0, tokens, chunk):
        last = before + chunk >= tokens
        plan = prefill_plan(min(chunk, tokens - before), before, hot, cold, last=last)
        samples = greedy(1 if last else 0)
        # Each once before: a longer context may be cut into parts, by kernels that are not compiled yet.
        seconds += took(
            lambda p=plan, g=samples: ring.step(p, g), bench.device, 1 if bench.tiny else 3, warm=1
        ).wall  # type: ignore[misc]
    flops = shape.flops(tokens)
    rate = bench.matrix_rate(weights)
    bench.measured(
        f"prefill/{weights}/{tokens}/{chunk}",
        f"prefill {shape.name}, {weights} weights, prompt {tokens}, chunks of {chunk}",
        tokens / seconds,
        "tok/s",
        tokens * rate / flops if rate else None,
        f"{flops / seconds / 1e12:.3g} TFLOP/s, first token after {seconds * 1e3:.0f} ms",
    )
