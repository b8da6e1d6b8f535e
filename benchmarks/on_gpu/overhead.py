"""What a served step costs besides the GPU's work (the batcher's plans, launches, sampling, the tokens' way back), and
what `--batch-invariant` costs.

The real loop runs requests to their end; what a step takes more than the section `decode` says is overhead.
"""

import statistics
import time
from typing import Any

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.machine import release
from benchmarks.on_gpu.served import GREEDY, Served, generate, greedy, prefill_plan, random_prompts, served
from benchmarks.on_gpu.shapes import LLAMA_8B, TINY, Shape
from services.executor.core.step_plan import StepPlan
from shared.messages import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("graphs, lookahead", {"cuda_graphs": "auto", "lookahead": "on"}),
    ("graphs, no lookahead", {"cuda_graphs": "auto", "lookahead": "off"}),
    ("eager, no lookahead", {"cuda_graphs": "off", "lookahead": "off"}),
)


def overhead(bench: Bench) -> None:
    """Of all modes."""
    shape = TINY if bench.tiny else LLAMA_8B
    batches = (2,) if bench.tiny else (1, 32)
    cases = [(batch, *sampling) for batch in batches for sampling in (("greedy", GREEDY), ("sampled", SAMPLED))]
    for mode, settings in MODES:
        key, what = f"overhead/{mode}", f"a step, {mode}"
        if not bench.late(key, what):
            with bench.case(key, what), _ring(bench, shape, max(batches), settings) as ring:
                for batch, name, sampling in cases:
                    _measure(bench, ring, mode, batch, name, sampling)
    with bench.case("overhead/prompt", "a step of a prompt"):
        prompt_steps(bench)


def prompt_steps(bench: Bench) -> None:
    """Of chunks of a prompt, from graphs and kernel by kernel."""
    shape = TINY if bench.tiny else LLAMA_8B
    chunks = (16,) if bench.tiny else (64, 256, 512)
    known: dict[str, Any] = {
        "kv_dtype": "int8",
        "kv_memory": 1 << 20 if bench.tiny else 4 << 30,
        "max_sequences": 2,
        "lookahead": "off",
    }
    for graphs, name in (("off", "eager"), ("all", "graphs")):
        with served(shape, bench.device, max_batch_tokens=chunks[-1], cuda_graphs=graphs, **known) as ring:
            for tokens in chunks:
                plan = prefill_plan(tokens, 0, ring.store.num_writable, ring.store.num_quantized, last=True)
                took = [_seconds(ring, plan) for _ in range(2 if bench.tiny else 20)]
                what = f"a step of {tokens} tokens of one prompt, {name}"
                bench.measured(f"overhead/prompt/{tokens}/{name}", what, statistics.median(took[1:]) * 1e3, "ms")
        release(bench.device)


def _seconds(ring: Served, plan: StepPlan) -> float:
    began = time.perf_counter()
    ring.step(plan, greedy(1))
    return time.perf_counter() - began


def _ring(bench: Bench, shape: Shape, batch: int, settings: dict[str, Any]) -> Any:
    prompt, new = _lengths(bench)
    memory = int(4 * batch * (prompt + new) * shape.kv_bytes("bf16"))
    known: dict[str, Any] = {"kv_dtype": "bf16", "kv_memory": memory, "max_sequences": batch}
    return served(shape, bench.device, context_length=4 * (prompt + new), **known, **settings)


def _lengths(bench: Bench) -> tuple[int, int]:
    """(prompt, new tokens)"""
    return (16, 5) if bench.tiny else (256, 96)


def _measure(bench: Bench, ring: Served, mode: str, batch: int, name: str, sampling: SamplingParams) -> None:
    new = _lengths(bench)[1]
    prompts = random_prompts([_lengths(bench)[0]] * batch, batch)
    generate(ring, prompts, 2, sampling)  # compiles
    run = generate(ring, prompts, new, sampling)
    # The first steps are the prompts'; at the end sequences end.
    step = statistics.median(run.steps[-(new - 2) : -1])
    key = f"overhead/{mode}/{batch}/{name}".replace(", ", "+").replace(" ", "-")
    what = f"a step of {batch} in the server's loop, {mode}, {name}"
    bench.measured(key, what, step * 1e3, "ms", note="from one plan to the next")


# Drawn from all tokens: random weights leave no two logits far apart, and any difference shows soon.
FROM_ALL = SamplingParams(temperature=1.0, seed=3)


def invariance(bench: Bench) -> None:
    """With it first; the ratio needs both."""
    took: list[tuple[float, float]] = []
    for invariant in (True, False):
        name = "with" if invariant else "without"
        with bench.case(f"invariance/{name}", f"a ring {name} --batch-invariant"):
            took.append(_alone_and_beside(bench, name, invariant))
    if len(took) == 2:
        for what, slow, fast in zip(("step", "prompt"), *took, strict=True):
            bench.measured(
                f"invariance/cost/{what}", f"a {what} with --batch-invariant over one without", slow / fast, "x"
            )


def _alone_and_beside(bench: Bench, name: str, invariant: bool) -> tuple[float, float]:
    """Seconds of a decode step and of a prompt."""
    shape = TINY if bench.tiny else LLAMA_8B
    prompt, new, count = (6, 3, 2) if bench.tiny else (2048, 64, 8)
    memory = max(int(4 * count * (prompt + new) * shape.kv_bytes("bf16")), 1 << 20)
    known: dict[str, Any] = {"kv_dtype": "int8", "kv_memory": memory, "max_sequences": count, "lookahead": "off"}
    prompts = random_prompts([prompt] * count, 4)
    with served(shape, bench.device, context_length=2 * (prompt + new), batch_invariant=invariant, **known) as ring:
        if not bench.tiny:
            generate(ring, prompts[:1], 2, FROM_ALL)  # compiles
        alone = generate(ring, prompts[:1], new, FROM_ALL)
        if invariant:
            together = generate(ring, prompts, new, FROM_ALL)
            pairs = list(zip(alone.tokens["0"], together.tokens["0"], strict=True))
            wrong = sum(one != other for one, other in pairs)
            what = "tokens alone against those beside others"
            bench.wrong_or_right("invariance/exact", what, not wrong, float(wrong), 0.0, f"of {len(pairs)} differ")
        return _times(bench, name, alone.steps, new)


def _times(bench: Bench, name: str, steps: list[float], new: int) -> tuple[float, float]:
    step, prompt = statistics.median(steps[-(new - 1) :]), sum(steps[: -(new - 1)])
    bench.measured(f"invariance/step/{name}", f"a decode step {name} --batch-invariant", step * 1e3, "ms")
    bench.measured(f"invariance/prompt/{name}", f"a prompt {name} --batch-invariant", prompt * 1e3, "ms")
    return step, prompt
