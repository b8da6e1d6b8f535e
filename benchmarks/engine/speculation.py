"""What n-gram speculation gains, and that it costs nothing where it gains nothing.

`python -m benchmarks.engine.speculation MODEL`: the real model, batcher and sampler in this process, without HTTP
and NATS. Each load runs with and without speculation in turn; the best round of either counts. Loads:

    repeat   a text that is to be repeated word for word        greedy, ends as the model ends it
    edit     code in which one name is to be changed            greedy, ends as the model ends it
    words    random words (`benchmarks.serve.workloads`)   greedy, 128 tokens each
    sampled  random words                                       temperature 1, 128 tokens each
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import BLOCK, load_one_rank
from benchmarks.serve.workloads import PromptSource, calibrate
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import MOST_DRAFTS
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from shared.messages import GenerationRequest, SamplingParams

BLOCKS, CONTEXT = 2048, 2048
OUTPUT = 128
_TEXT = (
    "The {0} stood at the edge of the {1}, where the road turns north. Every morning the {2} came by with "
    "a basket of {3}, and every evening it went home with an empty one. Nobody knew what became of the {3}, "
    "and the {0} never told. When the first snow fell on the {1}, the {2} did not come, and the village "
    "waited for news."
)
_CODE = (
    "def total_{0}(items, rate):\n    result = 0\n    for item in items:\n        if item.kind == '{1}':\n"
    "            result += item.price * item.count\n        else:\n            result += item.price\n"
    "    if result > {2}:\n        result = result * (1 - rate)\n    return result\n"
)
_NOUNS = ("mill", "lake", "baker", "bread", "tower", "river", "fox", "apples", "church", "field", "smith")

Execute = Callable[[StepPlan, Sequence[SamplingState]], list[SampledToken]]


@dataclass
class Run:
    """One load, once."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts.values())

    @property
    def rate(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds


class Loads:
    """The requests of each load, with the model's own chat template."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))

    def make(self, load: str, count: int) -> list[GenerationRequest]:
        rng = random.Random(7)
        sampling = SamplingParams(temperature=1.0 if load == "sampled" else 0.0)
        stops = [self._tokenizer.eos_token_id] if load in ("repeat", "edit") else []
        return [
            GenerationRequest(
                str(number),
                "r",
                "m",
                "c",
                self._render([message]),
                OUTPUT,
                SamplingParams(sampling.temperature, seed=number),
                stops,
            )
            for number, message in enumerate(self._messages(load, count, rng))
        ]

    def _messages(self, load: str, count: int, rng: random.Random) -> list[str]:
        if load == "repeat":
            texts = [_TEXT.format(*rng.sample(_NOUNS, 4)) for _ in range(count)]
            return [f"Repeat this text word for word:\n\n{text}" for text in texts]
        if load == "edit":
            codes = [_CODE.format(*rng.sample(_NOUNS, 2), rng.randrange(1000)) for _ in range(count)]
            return [f"Rename the variable result to amount in this code:\n\n{code}" for code in codes]
        vocabulary = asyncio.run(calibrate(self._measure, turns=False))
        source = PromptSource(vocabulary, 7)
        return [source.prompt(128) for _ in range(count)]

    async def _measure(self, messages: Sequence[str]) -> int:
        return len(self._render(messages))

    def _render(self, messages: Sequence[str]) -> list[int]:
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
        rendered = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        tokens: list[int] = rendered["input_ids"]
        return tokens


def make_execute(directory: Path, dtype_name: str, threads: int) -> tuple[Execute, EngineSpec]:
    """A function that computes and samples one step."""
    runner, _ = load_one_rank(directory, dtype_name, threads, BLOCKS)
    from services.executor.sampling.sampler import Sampler, wants_of

    runner.warm_up()
    sampler, vocabulary = Sampler(), runner.vocab_size

    def execute(plan: StepPlan, states: Sequence[SamplingState]) -> list[SampledToken]:
        import msgspec

        wants = wants_of(states, vocabulary)
        logits = runner.forward(msgspec.structs.replace(plan, candidates=wants.tobytes()))
        assert logits is not None
        return sampler.sample(logits, states)

    return execute, EngineSpec(BLOCK, BLOCKS, CONTEXT, vocabulary)


def run(
    execute: Execute, spec: EngineSpec, requests: list[GenerationRequest], at_once: int, drafts: int
) -> Run:
    """All requests, `at_once` at a time."""
    batcher = ContinuousBatcher(spec, BatchSettings(max_sequences=at_once, max_drafts=drafts), "benchmark")
    for request in requests:
        batcher.add(request)
    result = Run({request.generation_id: [] for request in requests})
    began = time.perf_counter()
    while batcher.has_work:
        scheduled = batcher.schedule(began)
        assert scheduled is not None
        plan, rows = scheduled
        step_began = time.perf_counter()
        sampled = execute(plan, [row.sampling for row in rows])
        for entry in batcher.update(sampled, time.perf_counter() - step_began).get("c", []):
            result.texts[entry.generation_id] += entry.tokens
        result.steps += 1
    result.seconds = time.perf_counter() - began
    result.drafted, result.accepted = batcher.drafter.drafted, batcher.drafter.accepted
    return result


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Rounds with and without, in turn.", min=1)] = 2,
    loads: Annotated[str, typer.Option(help="Which loads.")] = "repeat,edit,words,sampled",
    at_once: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16",
    turns: Annotated[int, typer.Option(help="Requests for each place, one after the other.", min=1)] = 1,
    drafts: Annotated[int, typer.Option(help="Drafts of one sequence at most.")] = MOST_DRAFTS,
) -> None:
    """Tokens per second with and without speculation."""
    execute, spec = make_execute(model, dtype, threads)
    source = Loads(model)
    table = Table(
        "load", "at once", "without tok/s", "with tok/s", "gain", "drafts/step", "accepted", "same text"
    )
    for load in loads.split(","):
        for places in map(int, at_once.split(",")):
            requests = source.make(load, max(2, places * turns))
            found: dict[int, list[Run]] = {0: [], drafts: []}
            for _ in range(rounds):
                for most, runs in found.items():
                    runs.append(run(execute, spec, requests, places, most))
            off, on = (max(runs, key=lambda each: each.rate) for runs in found.values())
            same = sum(off.texts[name] == text for name, text in on.texts.items())
            table.add_row(
                load,
                str(places),
                f"{off.rate:.0f}",
                f"{on.rate:.0f}",
                f"{on.rate / off.rate - 1:+.0%}",
                f"{on.drafted / on.steps:.1f}",
                f"{on.accepted / on.drafted:.0%}" if on.drafted else "-",
                f"{same}/{len(on.texts)}",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
