"""`--batch-invariant`: whether answers are the same alone and beside others, and what a step and a prompt cost."""

import random
import statistics

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.served import generate, served
from benchmarks.on_gpu.shapes import LLAMA_8B, TINY
from benchmarks.on_gpu.timing import release
from shared.messages import SamplingParams

FROM_ALL = SamplingParams(temperature=1.0, seed=3)
"""Drawn from all tokens: random weights leave no two logits far apart, and any difference shows soon."""


def invariance(bench: Bench) -> None:
    """With it first; the ratio needs both."""
    took: list[tuple[float, float]] = []
    for invariant in (True, False):
        name = "with" if invariant else "without"
        try:
            took.append(_alone_and_beside(bench, name, invariant))
        except Exception as error:  # the other one still says something
            bench.failed(f"invariance/{name}", f"a ring {name} --batch-invariant", error)
        release(bench.device)
    if len(took) == 2:
        for what, slow, fast in zip(("step", "prompt"), *took, strict=True):
            bench.measured(
                f"invariance/cost/{what}",
                f"a {what} with --batch-invariant over one without",
                slow / fast,
                "x",
            )


def _alone_and_beside(bench: Bench, name: str, invariant: bool) -> tuple[float, float]:
    """Seconds of a decode step and of a prompt."""
    shape = TINY if bench.tiny else LLAMA_8B
    prompt, new, count = (6, 3, 2) if bench.tiny else (2048, 64, 8)
    memory = max(int(4 * count * (prompt + new) * shape.kv_bytes("bf16")), 1 << 20)
    known = {"kv_dtype": "int8", "kv_memory": memory, "max_sequences": count, "lookahead": "off"}
    draw = random.Random(4)
    prompts = [[draw.randrange(3, 250) for _ in range(prompt)] for _ in range(count)]
    with served(
        shape, bench.device, context_length=2 * (prompt + new), batch_invariant=invariant, **known
    ) as ring:
        if ring.unknown:
            raise RuntimeError("this version has no --batch-invariant")
        if not bench.tiny:
            generate(ring, prompts[:1], 2, FROM_ALL)  # compiles
        alone = generate(ring, prompts[:1], new, FROM_ALL)
        if invariant:
            together = generate(ring, prompts, new, FROM_ALL)
            pairs = list(zip(alone.tokens["0"], together.tokens["0"], strict=True))
            wrong = sum(one != other for one, other in pairs)
            what = "tokens alone against those beside others"
            bench.wrong_or_right(
                "invariance/exact", what, not wrong, float(wrong), 0.0, f"of {len(pairs)} differ"
            )
        return _times(bench, name, alone.steps, new)


def _times(bench: Bench, name: str, steps: list[float], new: int) -> tuple[float, float]:
    step, prompt = statistics.median(steps[-(new - 1) :]), sum(steps[: -(new - 1)])
    bench.measured(f"invariance/step/{name}", f"a decode step {name} --batch-invariant", step * 1e3, "ms")
    bench.measured(f"invariance/prompt/{name}", f"a prompt {name} --batch-invariant", prompt * 1e3, "ms")
    return step, prompt
